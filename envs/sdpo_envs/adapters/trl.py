"""Reward functions in TRL's form, with a data set: `trl:package.module:function`.

TRL's `GRPOTrainer` calls `function(prompts, completions, **columns)` and gets a list of numbers. The same function grades
here, one attempt at a time; `completions` are texts, or one-message chats where the prompts are chats, as in TRL. TRL's
own feedback is a column of the data ("privileged_context"), the same for every attempt; `feedback_column` reads it.
TRL itself is not needed. Not covered: functions that look at `completion_ids` or at the whole batch.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sdpo.env import Env
from sdpo.errors import ConfigError, GradingError, did_you_mean
from sdpo.types import Grade, Message, Task
from sdpo_envs.adapters.imports import imported
from sdpo_envs.rows import field, json_files, read_rows

__all__ = ["TrlReward"]


class TrlReward(Env):
    """A TRL reward function over local rows; splits "train" and "test".

    Args:
        function: "package.module:function".
        path: file or folder of JSON lines with `prompt` (a text or a list of messages) and whatever columns the function
            takes; optionally `split`.
        success_at: a reward of at least this is a success.
        feedback_column: column that holds feedback for every attempt at the row; shown to failures.
        demonstration_column: column that holds an expert's answer.
        test_fraction: part of the rows without `split` that becomes "test", by a seeded shuffle. seed: of it.
    """

    feedback_reveals_target = True  # a column may say anything

    def __init__(
        self,
        function: str,
        *,
        path: str,
        success_at: float = 1.0,
        feedback_column: str | None = None,
        demonstration_column: str | None = None,
        test_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        if not 0.0 <= test_fraction < 1.0:
            raise ConfigError(f"trl: test_fraction = {test_fraction}", hint="at least 0 and below 1")
        if not callable(imported(function, "reward function")):
            raise ConfigError(f"trl: {function} is not a function", hint="give package.module:function")
        self._function = function
        self._path = path
        self._success_at = success_at
        self._columns = (feedback_column, demonstration_column)
        self._test = test_fraction
        self._seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._splits:
            raise ConfigError(f"trl:{self._function} has no split {split!r}", hint=did_you_mean(split, self._splits))
        return self._splits[split]

    def grade(self, task: Task, completion: str) -> Grade:
        function = imported(self._function, "reward function")
        columns = {key: [value] for key, value in task.metadata["columns"].items()}
        chat = bool(task.metadata["chat"])
        prompt: Any = [dict(message) for message in task.prompt] if chat else task.prompt[-1]["content"]
        answer: Any = [{"role": "assistant", "content": completion}] if chat else completion
        rewards = function(**_accepted(function, {**columns, "prompts": [prompt], "completions": [answer]}))
        if inspect.isawaitable(rewards):
            rewards = asyncio.run(_awaited(rewards))
        reward = rewards[0] if isinstance(rewards, (list, tuple)) and len(rewards) == 1 else None
        if not isinstance(reward, (int, float)):
            raise GradingError(f"trl:{self._function} returned {str(rewards)[:100]}, not a list of one number")
        success = reward >= self._success_at
        return Grade(float(reward), feedback="" if success else task.metadata["feedback"], success=success)

    @cached_property
    def _splits(self) -> dict[str, list[Task]]:
        rows = [
            (f"{file}, row {number}", row)
            for file in json_files(Path(self._path).expanduser())
            for number, row in enumerate(read_rows(file), 1)
        ]
        held_out = set(random.Random(self._seed).sample(range(len(rows)), int(len(rows) * self._test)))
        feedback_column, demonstration_column = self._columns
        splits: dict[str, list[Task]] = {}
        for number, (where, row) in enumerate(rows):
            prompt = field(row, ("prompt",), where)
            chat = isinstance(prompt, list)
            messages = [Message(role=m["role"], content=m["content"]) for m in prompt] if chat else []
            split = str(row.get("split") or ("test" if number in held_out else "train"))
            splits.setdefault(split, []).append(
                Task(
                    id=f"{split}-{row.get('id', number)}",
                    prompt=tuple(messages) or (Message(role="user", content=str(prompt)),),
                    demonstration=str(field(row, (demonstration_column,), where)) if demonstration_column else None,
                    metadata={
                        "chat": chat,
                        "columns": {key: value for key, value in row.items() if key != "prompt"},
                        "feedback": str(field(row, (feedback_column,), where)) if feedback_column else "",
                    },
                )
            )
        return splits


async def _awaited(value: Any) -> Any:
    return await value


def _accepted(function: Any, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns that a function takes; all of them when it takes any keyword."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return columns
    return {key: value for key, value in columns.items() if key in parameters}
