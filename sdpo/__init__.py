"""Reinforcement learning with rich feedback.

    import sdpo
    env = sdpo.load_env("lab")
    task = env.tasks("train")[0]
    env.grade(task, "4 2 9").feedback

The names below are the public interface. What needs torch is loaded on first use, so that `import sdpo` is cheap enough
for an environment's module and for the command line.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sdpo.env import Env, load_env
from sdpo.types import Completion, Failure, Grade, Group, Message, Rollout, StepResult, Task, TeacherContext

if TYPE_CHECKING:
    from sdpo.config import Config, load_config
    from sdpo.evaluate import evaluate
    from sdpo.train import TrainResult, train

__version__ = "0.1.0"

_LAZY = {
    "Config": "sdpo.config",
    "load_config": "sdpo.config",
    "TrainResult": "sdpo.train",
    "train": "sdpo.train",
    "evaluate": "sdpo.evaluate",
}

__all__ = [
    "Completion",
    "Config",
    "Env",
    "Failure",
    "Grade",
    "Group",
    "Message",
    "Rollout",
    "StepResult",
    "Task",
    "TeacherContext",
    "TrainResult",
    "evaluate",
    "load_config",
    "load_env",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'sdpo' has no attribute {name!r}")


class _Package(ModuleType):
    """Keeps `sdpo.train` the function once the module of that name is loaded: importing a submodule would otherwise
    bind the module over it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
