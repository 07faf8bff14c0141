"""Evaluation: the numbers by hand, ungraded and truncated rollouts, the record's round trip."""

from __future__ import annotations

import json
import math

import pytest

from sdpo.evaluate import EvalResult, summarise
from sdpo.types import Completion, Failure, Grade, Group, Message, Rollout, Task


def group(name: str, *rewards: float | None, finish: str = "stop") -> Group:
    task = Task(name, (Message(role="user", content="q"),))
    rollouts = tuple(
        Rollout(
            name,
            i,
            (1,),
            Completion("x", (1,) * (i + 1), finish_reason=finish),  # type: ignore[arg-type]
            None if r is None else Grade(r, success=r >= 0.5, metrics={"format": float(r > 0)}),
            Failure("sandbox", "down") if r is None else None,
        )
        for i, r in enumerate(rewards)
    )
    return Group(task, rollouts)


def test_numbers_by_hand() -> None:
    result = summarise([group("a", 1, 1, 0, 0), group("b", 0, 0, 0, 0.2)], "test", 4, seed=0)
    assert (result.tasks, result.rollouts, result.failed) == (2, 4, 0)
    assert result.success == pytest.approx(0.25)
    assert result.reward == pytest.approx(2.2 / 8)
    assert result.length == pytest.approx(2.5)
    assert result.pass_at == {1: pytest.approx(0.25), 2: pytest.approx((1 - 1 / 6) / 2), 4: pytest.approx(0.5)}
    assert result.metrics == {"format": pytest.approx(3 / 8)}
    low, high = result.interval
    assert 0 <= low <= 0.25 <= high <= 0.5


def test_ungraded_rollouts_are_left_out_and_counted() -> None:
    result = summarise([group("a", 1, None, None), group("b", None, None, None)], "test", 3, seed=0)
    assert result.failed == 5
    assert result.success == 1.0
    assert result.pass_at == {1: 1.0}


def test_truncation_is_reported() -> None:
    result = summarise([group("a", 0, 0, finish="length"), group("b", 1, 1)], "test", 2, seed=0)
    assert result.truncated == 0.5


def test_record_survives_json() -> None:
    result = summarise([group("a", 1, 0), group("b", 0, 0)], "test", 2, seed=0)
    assert EvalResult.from_record(json.loads(json.dumps(result.to_record()))) == result


def test_one_task_has_no_interval() -> None:
    assert all(math.isnan(x) for x in summarise([group("a", 1, 0)], "test", 2, seed=0).interval)
