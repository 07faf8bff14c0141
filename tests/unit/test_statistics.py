"""Estimators and intervals against numbers worked out by hand or by brute force."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo.statistics import (
    avg_at_k,
    bootstrap_interval,
    discovery_at_k,
    pass_at_k,
    t_interval,
    wilson_interval,
)


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)  # 1 - C(3,3)/C(5,3) = 1 - 1/10
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 3, 6) == 1.0  # only 5 failures: any 6 hold a success
    assert pass_at_k(2944, 1, 2750) == pytest.approx(2750 / 2944)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_refuses_the_impossible(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n = {n}, c = {c}, k = {k}"):
        pass_at_k(n, c, k)


def test_avg_at_k_weighs_tasks_not_rollouts() -> None:
    assert avg_at_k([[1, 0, 0, 0], [1]]) == pytest.approx(0.625)


def test_discovery_at_k_with_censoring() -> None:
    times = [1, 3, 3, 8, None]
    assert [discovery_at_k(times, k, budget=8) for k in (1, 2, 3, 7, 8)] == pytest.approx([0.2, 0.2, 0.6, 0.6, 0.8])


def test_discovery_at_k_says_nothing_beyond_what_was_observed() -> None:
    with pytest.raises(ValueError, match="budget = 8"):
        discovery_at_k([1, None], 9, budget=8)
    with pytest.raises(ValueError, match="attempt 9"):
        discovery_at_k([9], 4, budget=8)
    with pytest.raises(ValueError, match="attempt 0"):
        discovery_at_k([0], 4, budget=8)
    with pytest.raises(ValueError, match="no tasks"):
        discovery_at_k([], 1, budget=8)


def test_bootstrap_interval_matches_the_normal_one_on_a_large_sample() -> None:
    values = np.random.default_rng(1).normal(0.4, 0.1, 2000).tolist()
    low, high = bootstrap_interval(values, seed=3)
    mean, half = np.mean(values), 1.96 * np.std(values) / math.sqrt(2000)
    assert low == pytest.approx(mean - half, abs=4e-4)
    assert high == pytest.approx(mean + half, abs=4e-4)


def test_bootstrap_interval_of_two_values_by_hand() -> None:
    # Resampled means are 0, .5, 1 with probability 1/4, 1/2, 1/4: the 2.5 % and 97.5 % points are 0 and 1.
    assert bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], confidence=0.4) == (0.5, 0.5)


def test_bootstrap_interval_depends_on_its_seed_only() -> None:
    values = [0.1, 0.9, 0.4, 0.7, 0.2, 0.6, 0.3]
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(values, seed=1, resamples=99) != bootstrap_interval(values, seed=2, resamples=99)


def test_bootstrap_interval_where_it_has_little_to_say() -> None:
    assert bootstrap_interval([0.5] * 10) == (0.5, 0.5)
    assert all(math.isnan(x) for x in (*bootstrap_interval([0.5]), *bootstrap_interval([])))


def test_wilson_interval_by_hand() -> None:
    z = 1.959964
    # 0 of 10: low 0, high z^2 / (n + z^2)
    assert wilson_interval(0, 10) == pytest.approx((0.0, z**2 / (10 + z**2)), abs=1e-5)
    low, high = wilson_interval(5, 10)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high == pytest.approx(0.5 + z / (10 + z**2) * math.sqrt(10 / 4 + z**2 / 4), abs=1e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_t_interval_by_hand() -> None:
    # s = 1, n = 3, t(.975, 2) = 4.302653
    mean, low, high = t_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)), abs=1e-5)
    single = t_interval([0.7])
    assert single.mean == 0.7
    assert math.isnan(single.low)
    assert math.isnan(single.high)
    assert t_interval([0.7, 0.7]) == pytest.approx((0.7, 0.7, 0.7))
