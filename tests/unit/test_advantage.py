"""Group baselines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo.advantage import group_advantages, is_constant, overlong_penalty
from sdpo.types import Completion, Failure, Grade, Group, Message, Rollout, Task

TASK = Task("t", (Message(role="user", content="?"),))
BASELINES = ("mean", "mean_std", "leave_one_out")


def group(rewards: Sequence[float | None], successes: Sequence[bool] | None = None) -> Group:
    """None is a rollout that could not be graded."""
    rollouts = []
    for i, reward in enumerate(rewards):
        completion = Completion("x", (1,))
        if reward is None:
            rollouts.append(Rollout("t", i, (0,), completion, failure=Failure("env.grade", "down")))
        else:
            success = reward >= 0.5 if successes is None else successes[i]
            rollouts.append(Rollout("t", i, (0,), completion, Grade(reward, success=success)))
    return Group(TASK, tuple(rollouts))


def advantages(rewards: Sequence[float | None], baseline: Any = "mean", **choice: Any) -> list[float]:
    return group_advantages([group(rewards)], baseline=baseline, **choice)[0]


def test_hand_computed() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert advantages(rewards) == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4])
    std = math.sqrt((2 * 0.36 + 3 * 0.16) / 4)
    assert advantages(rewards, "mean_std") == pytest.approx([a / std for a in (0.6, -0.4, -0.4, 0.6, -0.4)], rel=1e-5)
    assert advantages(rewards, "leave_one_out") == pytest.approx([0.75, -0.5, -0.5, 0.75, -0.5])
    assert advantages(rewards, "none") == rewards


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others() -> None:
    rewards = [0.3, 0.9, -1.0, 0.2]
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert advantages(rewards, "leave_one_out") == pytest.approx(expected)


def test_statistics_are_those_of_the_group_and_not_of_the_batch() -> None:
    small, large = group_advantages([group([1.0, 0.0]), group([10.0, 0.0])], baseline="mean_std")
    assert small == pytest.approx(large, rel=1e-5)
    assert small == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.5, 1.0, -3.7])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_constant_groups_and_groups_of_one_have_exactly_zero(baseline: Any, reward: float, size: int) -> None:
    assert advantages([reward] * size, baseline) == [0.0] * size
    assert is_constant(group([reward] * size))


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    rewards = [0.1 + 0.2, 0.3]
    assert rewards[0] != rewards[1]
    assert is_constant(group(rewards))
    assert advantages(rewards, "mean_std") == [0.0, 0.0]
    assert not is_constant(group([0.3, 0.3001]))


def test_a_constant_reward_of_one_half_is_constant_though_its_mean_is_neither_0_nor_1() -> None:
    assert is_constant(group([0.5, 0.5, 0.5]))
    assert not is_constant(group([1.0, 0.0]))


@pytest.mark.parametrize("baseline", BASELINES)
def test_invariant_7_what_could_not_be_graded_is_not_a_zero(baseline: Any) -> None:
    with_failures = advantages([None, 1.0, None, 0.0, 0.5], baseline)
    without = advantages([1.0, 0.0, 0.5], baseline)
    assert with_failures == [0.0, without[0], 0.0, without[1], without[2]]
    assert advantages([None, 1.0, 1.0], baseline) == [0.0, 0.0, 0.0]


def test_a_group_without_a_grade_is_constant_and_has_no_advantages() -> None:
    assert is_constant(group([None, None]))
    for baseline in (*BASELINES, "none"):
        assert advantages([None, None], baseline) == [0.0, 0.0]
    assert is_constant(group([None, 1.0, 1.0]))
    assert group_advantages([]) == []


def test_outcome_gate_silences_groups_without_a_success() -> None:
    """Shaped penalties among failures would otherwise be a full-size signal."""
    failed = group([-0.1, -0.2, -0.3])
    baseline: Any
    for baseline in (*BASELINES, "none"):
        assert group_advantages([failed], baseline=baseline, outcome_gate=True) == [[0.0, 0.0, 0.0]]
    assert group_advantages([failed], baseline="mean_std")[0] == pytest.approx([1.0, 0.0, -1.0], rel=1e-4)
    mixed = group([1.0, -0.2, -0.3])
    assert group_advantages([mixed], outcome_gate=True) == group_advantages([mixed])


def test_outcome_gate_reads_the_verdict_and_not_the_reward() -> None:
    high_but_wrong = group([0.9, 0.7], successes=[False, False])
    assert group_advantages([high_but_wrong], outcome_gate=True) == [[0.0, 0.0]]
    low_but_right = group([0.2, 0.1], successes=[True, False])
    assert group_advantages([low_but_right], outcome_gate=True)[0] == pytest.approx([0.05, -0.05])


@given(
    st.lists(st.floats(-10, 10) | st.none(), min_size=1, max_size=12), st.sampled_from(BASELINES), st.floats(-100, 100)
)
def test_advantages_sum_to_zero_and_do_not_see_a_constant_shift(
    rewards: list[float | None], baseline: Any, shift: float
) -> None:
    got = advantages(rewards, baseline)
    graded = [a for a, r in zip(got, rewards, strict=True) if r is not None]
    assert len(got) == len(rewards)
    assert math.fsum(graded) == pytest.approx(0, abs=1e-6)
    values = [r for r in rewards if r is not None]
    if values and max(values) - min(values) > 1e-3:
        moved = advantages([None if r is None else r + shift for r in rewards], baseline)
        assert moved == pytest.approx(got, rel=1e-4, abs=1e-4)


def test_unknown_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown baseline 'median'"):
        advantages([1.0], "median")


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (500, -1.0)]
)
def test_overlong_penalty_by_hand(length: int, expected: float) -> None:
    assert overlong_penalty(length, 100, 20) == pytest.approx(expected)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_overlong_buffers_that_do_not_fit_are_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"buffer = {buffer}"):
        overlong_penalty(10, 100, buffer)


@given(st.integers(0, 300), st.integers(1, 100), st.data())
def test_overlong_penalty_is_within_its_bounds_and_never_rises(length: int, limit: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(1, limit))
    here, next_token = overlong_penalty(length, limit, buffer), overlong_penalty(length + 1, limit, buffer)
    assert -1 <= next_token <= here <= 0
