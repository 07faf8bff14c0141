"""Evaluations written for inspect_ai as environments: `inspect:package.module:task`.

A task's solver is run with a stand-in for the model: what it would send is the prompt, and what the policy wrote is what
it gets back; then the task's scorers judge. The scorer's explanation becomes the feedback. Only one model call is
possible, so solvers with tools, several turns, self-critique, or a sandbox are refused, each with its reason.

Not covered: scorers that call a model, score reducers over epochs, images. Needs the extra `inspect` (Python >= 3.11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from sdpo.env import Env
from sdpo.errors import ConfigError, GradingError, SDPOError
from sdpo.types import Grade, Message, Task
from sdpo_envs.adapters.imports import imported, require

__all__ = ["InspectTask"]


class _Refused(Exception):
    """The task asks for something that a single-turn environment does not have."""


class InspectTask(Env):
    """An inspect_ai task; its samples are the split "test", or what `splits` says.

    Args:
        task: "package.module:function", the function returning an inspect_ai Task.
        args: arguments of that function.
        splits: how many samples go to each split, in order, for example {train = 400, test = 100}.
        success_at: a score of at least this is a success (the first scorer decides).
        feedback: whether the scorer's explanation is passed on; explanations often quote the right answer.
    """

    feedback_reveals_target = True

    def __init__(
        self,
        task: str,
        *,
        args: Mapping[str, Any] | None = None,
        splits: Mapping[str, int] | None = None,
        success_at: float = 1.0,
        feedback: bool = True,
    ) -> None:
        require("inspect_ai", f"environment inspect:{task}", extra="inspect")
        self._name = task
        self._args = dict(args or {})
        self._sizes = dict(splits or {})
        self._success_at = success_at
        self._feedback = feedback

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._ranges:
            raise ConfigError(f"inspect:{self._name} has no split {split!r}", hint=f"it has {', '.join(self._ranges)}")
        start, stop = self._ranges[split]
        return [self._task(index) for index in range(start, stop)]

    def grade(self, task: Task, completion: str) -> Grade:
        try:
            state = _run(self._play(task.metadata["index"], completion))
            scores = [_run(scorer(state, state.target)) for scorer in self._inner.scorer]
        except SDPOError:
            raise
        except Exception as exc:
            raise GradingError(f"inspect:{self._name} could not score: {type(exc).__name__}: {exc}"[:400]) from exc
        if not scores or scores[0] is None:
            raise GradingError(f"inspect:{self._name} gave no score")
        reward = self._number(scores[0].value)
        success = reward >= self._success_at
        told = "" if success or not self._feedback else str(scores[0].explanation or "")
        return Grade(reward, feedback=told, success=success)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_inner"}

    @cached_property
    def _inner(self) -> Any:
        inner = imported(self._name, "inspect_ai task")(**self._args)
        if not inner.scorer:
            raise ConfigError(f"inspect:{self._name} has no scorer", hint="an environment needs one")
        if inner.sandbox is not None or inner.setup is not None or any(s.sandbox or s.setup for s in inner.dataset):
            raise ConfigError(
                f"inspect:{self._name} needs a sandbox", hint="only text in, text out can be trained here"
            )
        return inner

    @cached_property
    def _ranges(self) -> dict[str, tuple[int, int]]:
        left, start, ranges = len(self._inner.dataset), 0, {}
        for split, size in (self._sizes or {"test": left}).items():
            if not 0 < size <= left:
                raise ConfigError(f"inspect:{self._name}: splits.{split} = {size}", hint=f"{left} samples are left")
            ranges[split] = (start, start + size)
            start, left = start + size, left - size
        return ranges

    def _task(self, index: int) -> Task:
        sample = self._inner.dataset[index]
        state = _run(self._play(index, ""))
        messages = [Message(role=m.role, content=m.text) for m in state.metadata["sdpo_prompt"]]
        target = sample.target if isinstance(sample.target, str) else " / ".join(sample.target)
        return Task(
            id=str(sample.id if sample.id is not None else index),
            prompt=tuple(messages),
            target=target,
            metadata={"index": index},
        )

    async def _play(self, index: int, completion: str) -> Any:
        """Run the solver once with the policy's text as the model's answer."""
        from inspect_ai.model import ChatMessageUser, ModelName, ModelOutput
        from inspect_ai.scorer import Target
        from inspect_ai.solver import TaskState

        sample = self._inner.dataset[index]
        asked = [ChatMessageUser(content=sample.input)] if isinstance(sample.input, str) else list(sample.input)
        state = TaskState(
            model=ModelName("policy/policy"),
            sample_id=index,
            epoch=1,
            input=sample.input,
            messages=asked,
            target=Target(sample.target),
            choices=list(sample.choices) if sample.choices else None,
            metadata=dict(sample.metadata or {}),
        )

        async def generate(now: Any, *_: Any, **__: Any) -> Any:
            if now.tools:
                raise _Refused("it gives the model tools")
            if "sdpo_prompt" in now.metadata:
                raise _Refused("it calls the model more than once")
            now.metadata["sdpo_prompt"] = list(now.messages)
            now.output = ModelOutput.from_content("policy/policy", completion)
            now.messages.append(now.output.message)
            return now

        try:
            state = await self._inner.solver(state, generate)
        except _Refused as exc:
            raise ConfigError(
                f"inspect:{self._name} cannot be an environment: {exc}", hint="single turns only"
            ) from exc
        if "sdpo_prompt" not in state.metadata:
            raise ConfigError(
                f"inspect:{self._name} cannot be an environment: its solver does not use the given generate",
                hint="agents and solvers that call a model themselves are not supported",
            )
        return state

    def _number(self, value: Any) -> float:
        from inspect_ai.scorer import value_to_float

        if isinstance(value, (dict, list)):
            raise GradingError(f"inspect:{self._name}: the score has several values", hint="choose a task with one")
        return float(value_to_float()(value))


def _run(work: Any) -> Any:
    return asyncio.run(work)
