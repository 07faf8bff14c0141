"""Environments: the one thing that a user has to write.

An environment has tasks and a grader. Both methods may be slow, both run in the trainer's process; a grader that runs
code or hostile input delegates to a sandbox or to a worker process. `load_env` finds an environment by name:

    path/to/file.py:Class       a file
    package.module:Class        a class on the import path
    name                        an entry point of the group `sdpo.envs`
    adapter:name                an entry point whose class takes `name`, for example `rg:chain_sum`
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar

from sdpo.errors import ConfigError, EnvNotFoundError, boundary, did_you_mean
from sdpo.types import Grade, Task

__all__ = ["ENTRY_POINT_GROUP", "Env", "env_names", "load_env"]

ENTRY_POINT_GROUP = "sdpo.envs"


class Env(ABC):
    """Tasks and a grader.

    Class attributes:
        feedback_reveals_target: declares that feedback may contain the target (then `sdpo env check` does not object).
    """

    feedback_reveals_target: ClassVar[bool] = False

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, in a fixed order. Raises ConfigError for a split that does not exist."""

    @abstractmethod
    def grade(self, task: Task, completion: str) -> Grade | Awaitable[Grade]:
        """Judge one attempt; may be `async def`. Anything a model writes gets a Grade: raise only when *grading* is
        impossible (then the rollout leaves the step as failed instead of counting as wrong)."""

    def grade_group(
        self, task: Task, completions: Sequence[str]
    ) -> Sequence[Grade] | Awaitable[Sequence[Grade]] | None:
        """Judge all attempts of a group at once, for graders that compare or batch. None (the default) means: one by
        one, with `grade`."""
        return None

    def describe(self) -> str:
        """A few lines for `sdpo env show`: where the tasks come from and what the splits mean."""
        return inspect.cleandoc(type(self).__doc__ or "")

    def close(self) -> None:  # noqa: B027
        """Release processes and files. Called once at the end of a run."""


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def env_names() -> list[str]:
    """Names of the installed environments, adapters with a trailing colon."""
    return sorted(_entry_points())


def _class_from_file(path: Path, attribute: str) -> Any:
    name = f"_sdpo_env_{path.stem}_{abs(hash(str(path.resolve())))}"
    if name in sys.modules:
        return getattr(sys.modules[name], attribute)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EnvNotFoundError(f"{path} is not a Python file", hint="give path/to/file.py:Class")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses and pickle look the module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return getattr(module, attribute)


def _find(name: str) -> tuple[Any, tuple[str, ...]]:
    """The environment's class and its leading arguments (an adapter's own name)."""
    known = _entry_points()
    if name in known:
        return known[name].load(), ()
    head, colon, tail = name.partition(":")
    if colon and f"{head}:" in known:
        return known[f"{head}:"].load(), (tail,)
    if not colon:
        raise EnvNotFoundError(f"no environment named {name!r}", hint=did_you_mean(name, known))
    if head.endswith(".py"):
        path = Path(head).expanduser()
        if not path.is_file():
            raise EnvNotFoundError(f"no such file: {head}", hint="the path is relative to the working directory")
        with boundary(f"load {tail!r} from {head}", EnvNotFoundError, AttributeError):
            return _class_from_file(path, tail), ()
    with boundary(f"load environment {name!r}", EnvNotFoundError, ModuleNotFoundError, AttributeError, ValueError):
        try:
            module = importlib.import_module(head)
        except ModuleNotFoundError as exc:
            if exc.name is not None and head.split(".")[0] == exc.name:
                raise EnvNotFoundError(f"no environment named {name!r}", hint=did_you_mean(name, known)) from exc
            raise
        return getattr(module, tail), ()


def load_env(name: str, **args: Any) -> Env:
    """Find an environment by name (see the module's docstring) and construct it with `args`.

    Raises:
        EnvNotFoundError: nothing answers to the name; the hint has the closest ones.
        ConfigError: the environment does not take these arguments, or is not an `Env`.
    """
    cls, leading = _find(name)
    if not inspect.isclass(cls) or not issubclass(cls, Env) or inspect.isabstract(cls):
        raise ConfigError(f"{name!r} is no environment", hint="name a subclass of sdpo.Env with tasks and grade")
    try:
        inspect.signature(cls).bind(*leading, **args)
    except TypeError as exc:
        accepted = [p for p in inspect.signature(cls).parameters if p not in ("args", "kwargs")][len(leading) :]
        raise ConfigError(f"environment {name!r}: {exc}", hint=f"it takes: {', '.join(accepted) or 'nothing'}") from exc
    return cls(*leading, **args)
