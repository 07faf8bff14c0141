"""Metrics of a step: values by hand, defects, and what must not end a run."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo.metrics import METRICS, context_metrics, repetition, rollout_metrics
from sdpo.types import Completion, Failure, FinishReason, Grade, Group, Message, Rollout, Task, TeacherContext

QUESTION = (Message(role="user", content="2 + 2?"),)


def rollout(
    index: int,
    reward: float | None,
    *,
    text: str = "four",
    tokens: int = 3,
    finish: FinishReason = "stop",
    feedback: str = "",
    **metrics: Any,
) -> Rollout:
    grade = None if reward is None else Grade(reward, feedback, success=reward >= 0.5, metrics=metrics)
    failure = Failure("sandbox", "down") if reward is None else None
    completion = Completion(text, tuple(range(tokens)), finish_reason=finish)
    return Rollout("t", index, (1, 2), completion, grade, failure)


def group(*rollouts: Rollout) -> Group:
    return Group(Task("t", QUESTION), rollouts)


def rewards(*values: float | None) -> Group:
    return group(*(rollout(i, value) for i, value in enumerate(values)))


def context(demonstration: int | None = None, feedback: bool = False, truncated: int = 0) -> TeacherContext:
    return TeacherContext(QUESTION, (1,), demonstration, feedback, truncated)


def test_rewards_and_groups() -> None:
    found = rollout_metrics([rewards(1, 1), rewards(0, 0), rewards(1, 0), rewards(0.25, 0.25)])
    assert found["reward/mean"] == pytest.approx(3.5 / 8)
    assert found["success/rate"] == pytest.approx(3 / 8)
    assert found["groups/all_solved"] == pytest.approx(1 / 4)
    assert found["groups/all_failed"] == pytest.approx(2 / 4)
    assert found["groups/constant_fraction"] == pytest.approx(3 / 4)


def test_spread_within_groups_is_told_apart_from_spread_between_them() -> None:
    found = rollout_metrics([rewards(1, 1), rewards(0, 0)])
    assert found["reward/std"] == pytest.approx(0.5)
    assert found["reward/group_std"] == 0.0
    assert found["groups/constant_fraction"] == 1.0


def test_a_constant_reward_is_constant_although_its_mean_is_not_zero() -> None:
    assert rollout_metrics([rewards(0.1 + 0.2, 0.3)])["groups/constant_fraction"] == 1.0


def test_what_could_not_be_graded_is_no_reward_of_zero() -> None:
    found = rollout_metrics([rewards(1, None, None), rewards(None, None)])
    assert found["reward/mean"] == 1.0
    assert found["success/rate"] == 1.0
    assert found["failed_fraction"] == pytest.approx(4 / 5)
    assert found["groups/all_failed"] == 0.0
    assert found["groups/all_solved"] == 1.0


def test_with_nothing_graded_rewards_are_left_out_rather_than_zero() -> None:
    found = rollout_metrics([rewards(None, None)])
    assert "reward/mean" not in found
    assert "groups/all_failed" not in found
    assert found["failed_fraction"] == 1.0
    assert rollout_metrics([]) == {}


def test_completions() -> None:
    found = rollout_metrics(
        [
            group(
                rollout(0, 1, tokens=10),
                rollout(1, 0, tokens=2, finish="length"),
                rollout(2, 0, tokens=1, text=""),
                rollout(3, 0, tokens=7, text=" \n"),
            )
        ]
    )
    assert found["completion/length"] == 5.0
    assert (found["completion/length_min"], found["completion/length_max"]) == (1.0, 10.0)
    assert found["completion/tokens"] == 20.0
    assert found["completion/truncated_fraction"] == 0.25
    assert found["completion/empty_fraction"] == 0.5


def test_repetition_tells_prose_from_circles() -> None:
    prose = (
        "The river rose in the night and by morning the lower meadow was a lake; we moved the sheep to the hill, "
        "mended the east gate, and waited for the water to fall, which it did not do until Thursday afternoon."
    )
    assert 1 < repetition(prose) < 3
    assert repetition("wait, let me check. " * 200) > 10
    assert repetition("") == 0.0


def test_repetition_looks_at_the_end_only() -> None:
    draw = random.Random(0)
    start = "".join(chr(draw.randrange(33, 123)) for _ in range(20_000))
    assert repetition(start + "ha " * 4000) > 10
    assert repetition("ha " * 4000 + start) < 10


def test_text_that_is_no_unicode_is_measured_all_the_same() -> None:
    assert repetition("\ud800" * 50) > 1


def test_environment_metrics_average_over_those_who_report_them() -> None:
    found = rollout_metrics(
        [group(rollout(0, 1, passed=1.0, seconds=2), rollout(1, 0, passed=0.5), rollout(2, None), rollout(3, 0))]
    )
    assert found["env/passed"] == 0.75
    assert found["env/seconds"] == 2.0


def test_environment_metrics_that_are_no_finite_numbers_are_left_out() -> None:
    found = rollout_metrics(
        [group(rollout(0, 1, a=math.nan, b=10**400, c=None, d="x", e=math.inf, good=True), rollout(1, 0, a=4.0))]
    )
    assert {k: v for k, v in found.items() if k.startswith("env/")} == {"env/a": 4.0, "env/good": 1.0}


def test_context_fractions() -> None:
    groups = [
        group(rollout(0, 1), rollout(1, 0, feedback="wrong"), rollout(2, 0, feedback="wrong")),
        group(rollout(0, 0, feedback=" \n"), rollout(1, None), rollout(2, 0, feedback="late")),
    ]
    contexts = [[None, context(0), context(0, True, 5)], [None, None, context(None, True, 7)]]
    assert context_metrics(groups, contexts) == {
        "context/active_fraction": 3 / 6,
        "context/demonstration_fraction": 2 / 6,
        "context/feedback_available_fraction": 3 / 6,
        "context/feedback_used_fraction": 2 / 6,
        "context/truncated_tokens": 12.0,
        "context/lone_success": 1.0,
    }


def test_the_lone_success_of_a_group_is_counted_unless_it_has_a_demonstration() -> None:
    lone = rewards(1, 0, 0, 0)
    assert context_metrics([lone], [[None, *[context(0)] * 3]])["context/lone_success"] == 1.0
    assert context_metrics([lone], [[context(None, True), *[context(0)] * 3]])["context/lone_success"] == 1.0
    assert context_metrics([lone], [[context(0), *[context(0)] * 3]])["context/lone_success"] == 0.0
    assert context_metrics([rewards(1, 1, 0)], [[None, None, context(0)]])["context/lone_success"] == 0.0
    assert context_metrics([rewards(0, 0)], [[None, None]])["context/lone_success"] == 0.0


def test_contexts_that_do_not_match_the_rollouts_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        context_metrics([rewards(1, 0)], [[None]])


def test_every_metric_is_documented() -> None:
    groups = [group(rollout(0, 1, seconds=1.0), rollout(1, 0))]
    names = {*rollout_metrics(groups), *context_metrics(groups, [[None, None]])}
    assert {n for n in names if not n.startswith("env/")} <= set(METRICS)
    assert "env/*" in METRICS


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=1, max_size=5), min_size=1, max_size=5))
def test_fractions_lie_between_0_and_1(values: list[list[float | None]]) -> None:
    found = rollout_metrics([rewards(*g) for g in values])
    assert all(0 <= v <= 1 for k, v in found.items() if k.startswith("groups/") or "fraction" in k or "rate" in k)
    if "reward/mean" in found:
        graded = [v for g in values for v in g if v is not None]
        assert min(graded) - 1e-9 <= found["reward/mean"] <= max(graded) + 1e-9
        assert found["reward/group_std"] <= 5 + 1e-9
