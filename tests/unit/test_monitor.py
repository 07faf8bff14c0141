"""Monitors: each warning sets in when it should, once, and not when it should not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo.config import MonitorConfig
from sdpo.metrics import METRICS, context_metrics, rollout_metrics
from sdpo.monitor import MONITORS, Monitor, Warning_
from sdpo.types import Completion, Grade, Group, Message, Rollout, Task

HEALTHY = {
    "context/active_fraction": 0.8,
    "context/feedback_available_fraction": 0.5,
    "groups/all_failed": 0.2,
    "groups/all_solved": 0.3,
    "success/rate": 0.5,
    "reward/mean": 0.5,
    "completion/length": 300.0,
    "completion/truncated_fraction": 0.02,
    "completion/repetition": 2.1,
    "failed_fraction": 0.0,
    "policy/entropy": 0.4,
    "sampler/logprob_gap": 0.01,
    "grad_norm": 0.7,
    "skipped_updates": 0.0,
}


def monitor(**settings_: Any) -> Monitor:
    return Monitor(MonitorConfig(**settings_))


def steps(watch: Monitor, name: str, values: Sequence[float], **others: float) -> dict[int, list[str]]:
    """Codes by step (counted from 1) when one metric takes these values and all else is healthy."""
    told = {i: watch.observe_step(i, {**HEALTHY, **others, name: v}) for i, v in enumerate(values, 1)}
    return {step: [w.code for w in warnings] for step, warnings in told.items() if warnings}


def evals(
    watch: Monitor, successes: Sequence[float], lengths: Sequence[float] | None = None
) -> dict[int, list[Warning_]]:
    """Warnings by evaluation, counted from 1; evaluation i is at step 10 * i."""
    told = {
        i: watch.observe_eval(10 * i, success, length=None if lengths is None else lengths[i - 1])
        for i, success in enumerate(successes, 1)
    }
    return {i: warnings for i, warnings in told.items() if warnings}


def test_a_healthy_run_is_silent() -> None:
    watch = monitor()
    assert not any(watch.observe_step(i, HEALTHY) for i in range(50))
    assert evals(watch, [0.2, 0.3, 0.28, 0.4, 0.38, 0.41], [300, 310, 280, 250, 240, 250]) == {}


def test_late_collapse_is_flagged_by_the_fifth_point_with_the_best_step() -> None:
    watch = monitor()
    told = evals(watch, [0.20, 0.55, 0.68, 0.66, 0.30, 0.05])
    assert list(told) == [5]
    (warning,) = told[5]
    assert warning.code == "validation_collapse"
    assert warning.step == 50
    assert "0.68 at step 30, to 0.3" in warning.message
    assert watch.best_step == 30
    assert not watch.should_stop


def test_a_collapse_ends_the_run_only_when_asked() -> None:
    watch = monitor(stop_on_collapse=True)
    evals(watch, [0.20, 0.55, 0.68, 0.66])
    assert not watch.should_stop
    evals(watch, [0.30])
    assert watch.should_stop


def test_a_slow_fall_needs_patience_and_a_dip_is_forgiven() -> None:
    assert list(evals(monitor(), [0.6, 0.45, 0.44])) == [3]
    assert evals(monitor(), [0.6, 0.45, 0.58, 0.45, 0.55]) == {}
    assert list(evals(monitor(eval_patience=3), [0.6, 0.45, 0.44, 0.43])) == [4]


def test_a_large_relative_fall_from_a_small_best_is_noise() -> None:
    assert evals(monitor(), [0.06, 0.01, 0.0, 0.0]) == {}
    assert list(evals(monitor(collapse_min=0.02), [0.06, 0.01])) == [2]


def test_the_first_of_equal_evaluations_is_the_best_and_nan_is_none() -> None:
    watch = monitor()
    evals(watch, [math.nan, 0.3, 0.3])
    assert watch.best_step == 20
    assert monitor().best_step is None


def test_shrinking_completions_with_flat_reward_are_flagged_by_the_fourth_evaluation() -> None:
    watch = monitor()
    told = evals(watch, [0.40, 0.41, 0.40, 0.41], [900, 700, 420, 300])
    assert list(told) == [4]
    assert told[4][0].code == "length_shrinks"
    assert "validation completions fell from 800 to 360 tokens" in told[4][0].message


def test_shrinking_completions_are_fine_while_reward_rises() -> None:
    assert evals(monitor(), [0.3, 0.4, 0.5, 0.6, 0.7, 0.75], [900, 700, 420, 300, 250, 240]) == {}


def test_shrinking_training_completions_are_flagged_too_and_only_once_for_both() -> None:
    watch = monitor()
    lengths = [900, 880, 850, 600, 400, 300, 250]
    assert list(steps(watch, "completion/length", lengths)) == [6]  # mean of 600, 400, 300 < .5 * 877
    assert evals(watch, [0.4] * 4, [900, 700, 420, 300]) == {}


def test_length_falls_against_where_reward_last_rose_not_against_the_start() -> None:
    watch = monitor()
    told = evals(watch, [0.1, 0.1, 0.5, 0.5, 0.5, 0.5], [400, 400, 900, 900, 380, 350])
    assert list(told) == [6]
    assert "from 900 to 365" in told[6][0].message


@pytest.mark.parametrize(
    ("code", "metric", "bad", "at_once"),
    [
        ("no_teacher_context", "context/active_fraction", 0.0, True),
        ("all_failed", "groups/all_failed", 1.0, False),
        ("all_solved", "groups/all_solved", 1.0, False),
        ("grad_norm_floor", "grad_norm", 1e-5, False),
        ("grad_norm_ceiling", "grad_norm", 101.0, True),
        ("grad_norm_ceiling", "grad_norm", math.nan, True),
        ("skipped_updates", "skipped_updates", 0.25, True),
        ("truncated", "completion/truncated_fraction", 0.31, False),
        ("repetition", "completion/repetition", 11.0, False),
        ("entropy_collapse", "policy/entropy", 0.01, False),
        ("logprob_gap", "sampler/logprob_gap", 0.5, True),
        ("logprob_gap", "sampler/logprob_gap", math.nan, True),
        ("failed_rollouts", "failed_fraction", 0.2, False),
    ],
)
def test_each_step_rule_sets_in_once_and_is_armed_again_when_it_clears(
    code: str, metric: str, bad: float, at_once: bool
) -> None:
    good, onset = HEALTHY[metric], 1 if at_once else 3
    assert steps(monitor(), metric, [good, *[bad] * 6]) == {1 + onset: [code]}
    flapping = [*[bad] * 4, good, good, *[bad] * 4]  # away for two steps only: not told again
    assert steps(monitor(), metric, flapping) == {onset: [code]}
    cleared = [*[bad] * 4, good, good, good, *[bad] * 4]
    assert steps(monitor(), metric, cleared) == {onset: [code], 7 + onset: [code]}
    if not at_once:
        assert steps(monitor(), metric, [bad, bad, good, bad, bad, good]) == {}


def test_every_step_rule_is_covered_above_and_reads_a_documented_metric() -> None:
    by_course = {"length_shrinks", "validation_collapse"}
    assert {code for code, rule in MONITORS.items() if rule.holds is None} == by_course
    assert {rule.metric for rule in MONITORS.values() if rule.metric} <= set(METRICS)
    assert {rule.metric for rule in MONITORS.values() if rule.metric} <= set(HEALTHY)


def test_thresholds_are_limits_not_values_to_warn_at() -> None:
    limits = {"completion/truncated_fraction": 0.3, "completion/repetition": 10.0, "sampler/logprob_gap": 0.2}
    for metric, limit in {**limits, "grad_norm": 100.0, "failed_fraction": 0.1, "policy/entropy": 0.02}.items():
        assert steps(monitor(), metric, [limit] * 5) == {}


def test_a_growing_gap_between_sampler_and_trainer_is_flagged_and_can_stop_the_run() -> None:
    series = [0.01, 0.02, 0.05, 0.12, 0.25, 0.5]
    watch = monitor(stop_on_collapse=True)
    assert steps(watch, "sampler/logprob_gap", series) == {5: ["logprob_gap"]}
    assert watch.should_stop
    patient = monitor()
    steps(patient, "sampler/logprob_gap", series)
    assert not patient.should_stop


def test_low_entropy_is_no_collapse_once_the_tasks_are_solved() -> None:
    assert steps(monitor(), "policy/entropy", [0.001] * 5, **{"success/rate": 0.97}) == {}


def test_missing_metrics_neither_warn_nor_reset() -> None:
    watch = monitor()
    bad: dict[str, float] = {"grad_norm": 1e-6}
    observed: list[Mapping[str, float]] = [bad, bad, {}, bad]
    told = [watch.observe_step(i, m) for i, m in enumerate(observed)]
    assert [len(t) for t in told] == [0, 0, 0, 1]


def failed_step(feedback: str) -> dict[str, float]:
    """The metrics of a step of two groups in which every attempt is wrong and the teacher sees nothing."""
    task = Task("t", (Message(role="user", content="?"),))
    rollouts = tuple(
        Rollout("t", i, (1,), Completion("no", (1, 2)), Grade(0.0, feedback, success=False)) for i in range(4)
    )
    groups = [Group(task, rollouts)] * 2
    return {**rollout_metrics(groups), **context_metrics(groups, [[None] * 4] * 2)}


def test_an_environment_without_reward_and_feedback_is_named_as_the_cause() -> None:
    watch = monitor()
    told = [w for i in range(1, 6) for w in watch.observe_step(i, failed_step(""))]
    assert [(w.code, w.step) for w in told] == [("no_teacher_context", 1), ("all_failed", 3)]
    assert "no rollout succeeded and the environment gave no feedback" in told[0].message


def test_feedback_that_is_not_shown_is_named_as_the_cause() -> None:
    (warning,) = monitor().observe_step(1, failed_step("off by one"))
    assert "is not shown (context.feedback" in warning.message


@pytest.mark.parametrize(
    ("others", "cause"),
    [
        ({"success/rate": 1.0}, "every rollout succeeded"),
        ({"success/rate": 0.1, "context/lone_success": 3.0}, "may not be their own demonstrations"),
        ({"success/rate": 0.1}, "no rollout has a successful sibling or feedback"),
    ],
)
def test_other_causes_of_a_silent_teacher(others: dict[str, float], cause: str) -> None:
    (warning,) = monitor().observe_step(1, {"context/active_fraction": 0.0, **others})
    assert cause in warning.message


def test_messages_are_one_line_with_value_threshold_and_remedy() -> None:
    (warning,) = monitor().observe_step(7, {"grad_norm": 250.0})
    assert str(warning).startswith("step 7: grad_norm_ceiling: grad_norm = 250 (monitor.grad_norm_ceiling = 100)")
    assert warning.message.endswith(MONITORS["grad_norm_ceiling"].remedy)
    assert "\n" not in str(warning)


def test_rules_name_only_settings_that_exist_and_every_setting_is_read_by_one() -> None:
    shared = {"patience", "eval_patience", "stop_on_collapse"}
    named = {setting for rule in MONITORS.values() for setting in rule.settings}
    assert named | shared == set(MonitorConfig.model_fields)
    for code, rule in MONITORS.items():
        assert all(f"monitor.{setting}" in rule.formula for setting in rule.settings), code


METRIC_VALUES = st.fixed_dictionaries(
    {name: st.sampled_from([0.0, value, 1.0, 500.0]) for name, value in HEALTHY.items()}
)
OBSERVATION = st.one_of(METRIC_VALUES, st.tuples(st.floats(0, 1), st.floats(1, 1000)))


@settings(max_examples=60, deadline=None)
@given(st.lists(OBSERVATION, max_size=25), st.data())
def test_a_resumed_monitor_says_what_an_uninterrupted_one_says(observations: list[Any], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(observations)))

    def observe(watch: Monitor, items: list[Any], start: int) -> list[str]:
        told = []
        for step, item in enumerate(items, start):
            if isinstance(item, dict):
                told += watch.observe_step(step, item)
            else:
                told += watch.observe_eval(step, item[0], length=item[1])
        return [str(w) for w in told]

    whole, before, after = monitor(), monitor(), monitor()
    first = observe(before, observations[:cut], 0)
    after.load_state(json.loads(json.dumps(before.state_dict())))
    assert first + observe(after, observations[cut:], cut) == observe(whole, observations, 0)
    assert after.best_step == whole.best_step
    assert after.state_dict() == whole.state_dict()
