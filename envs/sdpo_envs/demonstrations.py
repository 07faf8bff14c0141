"""Questions with an expert's answer, for learning from demonstrations (SDFT, 2601.19897) where there is no grader.

Rows have a prompt and a response under any column names, or a chat as `messages` whose last message is the expert's.
Rows without one of them are an error, rows that are too long are left out and counted (never cut: half a demonstration
teaches to stop half-way). The reward compares with the demonstration and is meant for evaluation: SDFT does not use it.

Not covered: several demonstrations of one question (repeat the row), images, tool messages.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from sdpo.env import Env
from sdpo.errors import ConfigError, did_you_mean
from sdpo.types import Grade, Message, Task
from sdpo_envs.grading.text import final_text
from sdpo_envs.multiple_choice import one_of
from sdpo_envs.rows import Row, hub_rows, json_files, read_rows

__all__ = ["Demonstrations"]

Measure = Literal["exact", "f1", "none"]
_ROLES = ("system", "user", "assistant")


class Demonstrations(Env):
    """Prompt and response pairs; splits "train" and "test".

    Args:
        path: file or folder of JSON lines; None needs `hub`.
        hub: name of a hub data set, with `revision`; optionally `config` and `hub_split`.
        revision: the commit to load, for a run that can be repeated.
        prompt, response: the columns; a prompt may be a text or a list of messages.
        system: a system prompt for rows that have none.
        test_fraction: part of the rows that becomes "test", by a seeded shuffle; rows that have `split` keep theirs.
        seed: of that shuffle.
        max_chars: longer prompts or responses are left out and counted.
        measure: how `grade` compares with the demonstration: "exact" (white space and case apart), "f1" (of words), or
            "none" (reward 0 for all, no feedback).
    """

    feedback_reveals_target = True  # there is no other target than the demonstration, and no feedback

    def __init__(
        self,
        path: str | None = None,
        *,
        hub: str | None = None,
        revision: str | None = None,
        config: str | None = None,
        hub_split: str = "train",
        prompt: str = "prompt",
        response: str = "response",
        system: str = "",
        test_fraction: float = 0.1,
        seed: int = 0,
        max_chars: int = 100_000,
        measure: Measure = "f1",
    ) -> None:
        if (path is None) == (hub is None):
            raise ConfigError("demonstrations: no data", hint="give either path or hub")
        if hub is not None and revision is None:
            raise ConfigError(
                f"demonstrations: hub = {hub!r} has no revision", hint="give revision, the commit to load"
            )
        if not 0.0 <= test_fraction < 1.0:
            raise ConfigError(f"demonstrations: test_fraction = {test_fraction}", hint="at least 0 and below 1")
        one_of("measure", measure, get_args(Measure))
        self._source = (path, hub, revision, config, hub_split)
        self._columns = (prompt, response)
        self._system = system
        self._test = test_fraction
        self._seed = seed
        self._max = max_chars
        self._measure = measure
        self.too_long = 0

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._splits:
            raise ConfigError(f"demonstrations have no split {split!r}", hint=did_you_mean(split, self._splits))
        return self._splits[split]

    def grade(self, task: Task, completion: str) -> Grade:
        given = final_text(completion) or ""
        exact = _words(given) == _words(task.demonstration or "")
        overlap = _f1(_words(given), _words(task.demonstration or ""))
        reward = {"exact": float(exact), "f1": overlap, "none": 0.0}[self._measure]
        return Grade(reward=reward, success=exact, metrics={"exact": float(exact), "f1": overlap})

    def describe(self) -> str:
        sizes = ", ".join(f"{len(tasks)} {split}" for split, tasks in self._splits.items())
        return (
            f"{super().describe()}\n\nRows: {sizes}. Left out as longer than {self._max} characters: {self.too_long}."
        )

    @cached_property
    def _splits(self) -> dict[str, list[Task]]:
        path, hub, revision, config, hub_split = self._source
        if path is not None:
            files = json_files(Path(path).expanduser())
            rows = [(f"{file}, row {n}", row) for file in files for n, row in enumerate(read_rows(file), 1)]
        else:
            assert hub is not None
            assert revision is not None
            rows = [(f"{hub}, row {n}", row) for n, row in enumerate(hub_rows(hub, config, hub_split, revision), 1)]
        held_out = set(random.Random(self._seed).sample(range(len(rows)), int(len(rows) * self._test)))
        splits: dict[str, list[Task]] = {}
        for number, (where, row) in enumerate(rows):
            messages, response = self._pair(row, where)
            if max(len(response), *(len(m["content"]) for m in messages)) > self._max:
                self.too_long += 1
                continue
            split = str(row.get("split") or ("test" if number in held_out else "train"))
            name = f"{split}-{row.get('id', number)}"
            splits.setdefault(split, []).append(Task(name, messages, target=response, demonstration=response))
        return splits

    def _pair(self, row: Row, where: str) -> tuple[tuple[Message, ...], str]:
        prompt, response = self._columns
        if isinstance(row.get("messages"), list) and prompt not in row:
            *before, last = _chat(row["messages"], where)
            if last["role"] != "assistant":
                raise ConfigError(f"{where}: the last message is the {last['role']}'s", hint="it must be the expert's")
            answer = last["content"]
        else:
            for column in (prompt, response):
                if column not in row:
                    known = ", ".join(row)
                    raise ConfigError(
                        f"{where} has no column {column!r}", hint=f"it has: {known}; set prompt, response"
                    )
            value = row[prompt]
            before = _chat(value, where) if isinstance(value, list) else [Message(role="user", content=str(value))]
            answer = "\n".join(row[response]) if isinstance(row[response], list) else str(row[response] or "")
        if not answer.strip():
            raise ConfigError(f"{where}: the response is empty", hint="remove the row")
        if not before or before[-1]["role"] != "user":
            raise ConfigError(f"{where}: the response does not follow a user's message", hint="end the prompt with one")
        if self._system and before[0]["role"] != "system":
            before.insert(0, Message(role="system", content=self._system))
        return tuple(before), answer


def _chat(value: Any, where: str) -> list[Message]:
    found = []
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(message.get("content"), str):
            raise ConfigError(f"{where}: a message is not {{role, content}}", hint=f"roles: {', '.join(_ROLES)}")
        found.append(Message(role=role, content=message["content"]))
    if not found:
        raise ConfigError(f"{where}: there are no messages")
    return found


def _words(text: str) -> list[str]:
    return text.casefold().split()


def _f1(given: Sequence[str], wanted: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, each counted as often as it occurs."""
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted)) if common else 0.0
