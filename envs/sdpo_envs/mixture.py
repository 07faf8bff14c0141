"""Several environments as one: tasks in a fixed interleaving by weight, each graded by its own environment.

    [env]
    name = "mixture"
    [env.args.parts.math]
    env = "math"
    weight = 2.0
    success_at = 1.0
    [env.args.parts.puzzles]
    env = "rg:chain_sum"

Task ids get the part's name in front, metrics too ("math/correct"), so that logs and evaluations can be read by part. Not
covered: `grade_group` of the parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdpo.env import Env, load_env
from sdpo.errors import ConfigError
from sdpo.types import Grade, Task

__all__ = ["Mixture"]

_KEYS = {"env", "args", "weight", "success_at", "splits"}


class Mixture(Env):
    """A weighted mixture; its splits are those that its parts have.

    Args:
        parts: by name: `env` (as in a recipe), and optionally `args`; `weight` (default 1: tasks are interleaved in these
            proportions until the parts run out, none is repeated); `success_at` (a reward of at least this is a success,
            whatever the part says); `splits` (other names for its splits, for example {test = "validation"}).
    """

    def __init__(self, parts: Mapping[str, Mapping[str, Any]]) -> None:
        if not parts:
            raise ConfigError("mixture: parts is empty", hint="give at least one environment")
        self._weights: dict[str, float] = {}
        for name, part in parts.items():
            unknown = set(part) - _KEYS
            if unknown or "env" not in part or "/" in name:
                raise ConfigError(
                    f"mixture: part {name!r} has {', '.join(sorted(part)) or 'nothing'}",
                    hint=f"keys: {', '.join(sorted(_KEYS))}; env is needed; no slash in the name",
                )
            weight = float(part.get("weight", 1.0))
            if not 0.0 < weight < float("inf"):
                raise ConfigError(f"mixture: part {name!r} has weight {weight}", hint="a positive number")
            self._weights[name] = weight
        self._parts = dict(parts)
        self._envs = {name: load_env(part["env"], **part.get("args", {})) for name, part in parts.items()}
        self.feedback_reveals_target = any(env.feedback_reveals_target for env in self._envs.values())  # type: ignore[misc]

    def tasks(self, split: str) -> Sequence[Task]:
        found: dict[str, list[Task]] = {}
        errors = []
        for name, env in self._envs.items():
            try:
                found[name] = [
                    _named(task, name) for task in env.tasks(self._parts[name].get("splits", {}).get(split, split))
                ]
            except ConfigError as exc:
                errors.append(f"{name}: {exc}")
        if not found:
            raise ConfigError(f"mixture: no part has a split {split!r}", hint="; ".join(errors))
        return _interleaved(found, self._weights)

    def grade(self, task: Task, completion: str) -> Grade | Awaitable[Grade]:
        name, _, own = task.id.partition("/")
        verdict = self._envs[name].grade(replace(task, id=own), completion)
        return self._told(name, verdict) if isinstance(verdict, Grade) else self._later(name, verdict)

    async def _later(self, name: str, verdict: Awaitable[Grade]) -> Grade:
        return self._told(name, await verdict)

    def _told(self, name: str, grade: Grade) -> Grade:
        threshold = self._parts[name].get("success_at")
        success = grade.success if threshold is None else grade.reward >= threshold
        metrics = {f"{name}/reward": grade.reward, **{f"{name}/{key}": value for key, value in grade.metrics.items()}}
        return replace(grade, success=success, metrics=metrics)

    def describe(self) -> str:
        lines = [f"{name} ({self._weights[name]:g}): {part['env']}" for name, part in self._parts.items()]
        return "A mixture of\n" + "\n".join(lines)

    def close(self) -> None:
        for env in self._envs.values():
            env.close()


def _named(task: Task, part: str) -> Task:
    return replace(task, id=f"{part}/{task.id}")


def _interleaved(found: Mapping[str, Sequence[Task]], weights: Mapping[str, float]) -> list[Task]:
    """At every position the part that is furthest behind its share; the order is fixed, and no task comes twice."""
    taken = dict.fromkeys(found, 0)
    order: list[Task] = []
    while left := [name for name, tasks in found.items() if taken[name] < len(tasks)]:
        name = min(left, key=lambda part: (taken[part] + 0.5) / weights[part])
        order.append(found[name][taken[name]])
        taken[name] += 1
    return order
