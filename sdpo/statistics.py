"""Figures with their uncertainty: pass@k, avg@k, discovery@k, and intervals.

Which interval answers what:

    bootstrap_interval   one model, many tasks: would other tasks of this kind say the same?  (resamples tasks)
    wilson_interval      a plain success count, also 0 of n or n of n, where a bootstrap would have no width
    t_interval           several seeds: would another run say the same?

Resampling, binomial and t quantiles are scipy's. Not covered: tests of significance, censoring at different budgets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

__all__ = [
    "MeanInterval",
    "avg_at_k",
    "bootstrap_interval",
    "discovery_at_k",
    "pass_at_k",
    "t_interval",
    "wilson_interval",
]


class MeanInterval(NamedTuple):
    """A mean and the ends of its interval."""

    mean: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k attempts succeeds: 1 - C(n-c, k) / C(n, k)
    (2107.03374, Eq. 1).

    Args:
        n: attempts made.
        c: successes among them.
        k: attempts allowed, at most n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n = {n}, c = {c}, k = {k}")
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def avg_at_k(values: Sequence[Sequence[float]]) -> float:
    """Mean over tasks of the mean over a task's k rollouts; tasks weigh the same however many rollouts were graded.

    Args:
        values: for each task its rollouts' successes (0 or 1) or rewards, at least one.
    """
    return sum(sum(task) / len(task) for task in values) / len(values)


def discovery_at_k(first_success: Sequence[int | None], k: int, *, budget: int) -> float:
    """Share of tasks solved within the first k attempts (2601.20802, Sec. 5).

    Args:
        first_success: for each task the attempt, counted from 1, that first succeeded; None: none did within `budget`.
        k: attempts, at most `budget`: beyond it nothing was observed.
        budget: attempts that each unsolved task was given.
    """
    if not first_success:
        raise ValueError("discovery@k of no tasks")
    if not 1 <= k <= budget:
        raise ValueError(f"discovery@k needs 1 <= k <= budget, not k = {k}, budget = {budget}")
    for attempt in first_success:
        if attempt is not None and not 1 <= attempt <= budget:
            raise ValueError(f"a first success at attempt {attempt} lies outside 1 to budget = {budget}")
    return sum(attempt is not None and attempt <= k for attempt in first_success) / len(first_success)


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, seed: int = 0, resamples: int = 10_000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over tasks.

    The percentile method, because it is defined for every sample, also one of equal values, and stays within their
    range. It is too narrow for few tasks (under about 20), and has no width where all tasks agree: use
    `wilson_interval` there.

    Args:
        values: one number a task, for example its share of successes.
        seed: equal seeds give equal intervals.

    Returns:
        (low, high); both NaN for fewer than two tasks, about which resampling cannot say anything.
    """
    if len(values) < 2:
        return math.nan, math.nan
    sample = np.asarray(values, dtype=np.float64)
    found = stats.bootstrap(
        (sample,),
        np.mean,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        batch=max(1, 10_000_000 // len(values)),
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def wilson_interval(successes: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a success probability; (0, 1) when nothing was tried."""
    if n == 0:
        return 0.0, 1.0
    found = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return float(found.low), float(found.high)


def t_interval(values: Sequence[float], *, confidence: float = 0.95) -> MeanInterval:
    """Mean over seeds with its Student t interval: mean +- t * s / sqrt(n), s the sample standard deviation.

    Returns:
        The interval; its ends are NaN for a single seed, which says nothing about spread.
    """
    sample = np.asarray(values, dtype=np.float64)
    mean = float(sample.mean())
    if len(sample) < 2:
        return MeanInterval(mean, math.nan, math.nan)
    half = float(stats.t.ppf((1 + confidence) / 2, len(sample) - 1) * stats.sem(sample))
    return MeanInterval(mean, mean - half, mean + half)
