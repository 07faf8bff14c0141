"""Group baselines: how much better than its siblings each rollout was.

Everything is relative to the group and nothing to the batch, so that a task with larger rewards does not drown another.
A rollout that could not be graded is unknown, not wrong: it has advantage 0 and enters no statistic. Shaping terms make
groups that all failed look as if something in them had worked; `outcome_gate` silences those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from sdpo.errors import ConfigError, did_you_mean
from sdpo.types import Group

__all__ = ["Baseline", "group_advantages", "is_constant", "overlong_penalty"]

Baseline = Literal["mean", "mean_std", "leave_one_out", "none"]

_CONSTANT = 1e-9


def _same(rewards: Sequence[float]) -> bool:
    """Whether the spread is no more than rounding: 0.1 + 0.2 and 0.3 are the same reward."""
    return not rewards or max(rewards) - min(rewards) <= _CONSTANT * max(1.0, *map(abs, rewards))


def is_constant(group: Group) -> bool:
    """Whether the group tells no rollout from another: all its rewards are equal, or none could be graded. The test is
    on the spread within the group; a test on the mean (0 or 1) lets a constant 0.5 pass."""
    return _same(group.rewards)


def group_advantages(
    groups: Sequence[Group], *, baseline: Baseline = "mean", outcome_gate: bool = False, epsilon: float = 1e-6
) -> list[list[float]]:
    """Advantages, one for each rollout of each group.

        mean            r - mean(r)                         (2503.20783; the baseline of 2601.20802)
        mean_std        (r - mean(r)) / (std(r) + epsilon)  (2402.03300), sample standard deviation
        leave_one_out   r - mean of the others              (2402.14740), that is n / (n - 1) * (r - mean(r))
        none            r                                   REINFORCE without a baseline

    Groups of equal rewards, and so groups of one, have advantages of exactly 0, unless there is no baseline.

    Args:
        groups: of the step.
        baseline: see above.
        outcome_gate: advantages of 0 for a group without a success, whatever its shaped rewards say.
        epsilon: mean_std: keeps tiny spreads from exploding.

    Returns:
        A list for each group, aligned with its rollouts; 0 for those that could not be graded.

    Raises:
        ConfigError: unknown baseline.
    """
    if baseline not in get_args(Baseline):
        raise ConfigError(f"unknown baseline {baseline!r}", hint=did_you_mean(baseline, get_args(Baseline)))
    return [_advantages(group, baseline, outcome_gate, epsilon) for group in groups]


def _advantages(group: Group, baseline: Baseline, outcome_gate: bool, epsilon: float) -> list[float]:
    if outcome_gate and not group.successes:
        return [0.0] * len(group.rollouts)
    advantage = _baseline(group.rewards, baseline, epsilon)
    return [0.0 if rollout.reward is None else advantage(rollout.reward) for rollout in group.rollouts]


def _baseline(rewards: Sequence[float], baseline: Baseline, epsilon: float) -> Callable[[float], float]:
    if baseline == "none":
        return lambda reward: reward
    if _same(rewards):
        return lambda reward: 0.0
    n = len(rewards)
    mean = math.fsum(rewards) / n
    scale = 1.0
    if baseline == "mean_std":
        scale = 1 / (math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - 1)) + epsilon)
    elif baseline == "leave_one_out":
        scale = n / (n - 1)
    return lambda reward: (reward - mean) * scale


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (2503.14476, Eq. 13), to be added to the reward.

    0 up to max_length - buffer tokens, then falling linearly to -1 at max_length, and -1 beyond.

    Args:
        length: completion tokens.
        max_length: completion budget in tokens.
        buffer: tokens before the budget over which the penalty grows, 1 to max_length.

    Returns:
        A number in [-1, 0].

    Raises:
        ConfigError: the buffer does not fit the budget.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(
            f"overlong buffer = {buffer} is not within 1 to {max_length}", hint="1/5 of the budget is usual"
        )
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))
