"""Warnings while a run goes on: what has gone wrong before in runs like this one, and what to do about it.

The monitors read the metrics of each step (sdpo.metrics.METRICS) and the results of each evaluation, and say each thing
once when it sets in; it may be said again after the condition was away for `patience` observations. `MONITORS` is the
one table of codes, formulas and remedies; docs/troubleshooting.md is printed from it. Not covered: anything that needs
a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sdpo.config import MonitorConfig

__all__ = ["MONITORS", "Monitor", "Rule", "Warning_"]

_SOLVED = 0.9  # success rate from which low entropy is certainty, not collapse


@dataclass(frozen=True, slots=True)
class Warning_:
    """One warning.

    Attributes:
        code: key of `MONITORS`.
        message: one line: what was seen, the threshold, the likely cause, the remedy.
        step: at which it set in.
    """

    code: str
    message: str
    step: int

    def __str__(self) -> str:
        return f"step {self.step}: {self.code}: {self.message}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One monitor.

    Attributes:
        formula: when it warns, in names of metrics and of [monitor] settings.
        cause: the likely cause.
        remedy: what to do.
        settings: the [monitor] settings it reads besides `patience` and `eval_patience`.
        metric: the step metric it looks at; empty for the rules that look at a course of values.
        holds: whether the condition holds, given the step's metrics; None likewise.
        at_once: warn at the first step instead of after `patience` steps in a row.
    """

    formula: str
    cause: str
    remedy: str
    settings: tuple[str, ...] = ()
    metric: str = ""
    holds: Callable[[Mapping[str, float], MonitorConfig], bool] | None = None
    at_once: bool = False


MONITORS: dict[str, Rule] = {
    "no_teacher_context": Rule(
        formula="context/active_fraction = 0",
        cause="no rollout has a successful sibling or feedback to show to the teacher",
        remedy='take easier tasks, larger groups, context.demonstration = "task" or an environment that gives feedback',
        metric="context/active_fraction",
        holds=lambda m, c: m["context/active_fraction"] == 0,
        at_once=True,
    ),
    "all_failed": Rule(
        formula="groups/all_failed = 1 for monitor.patience steps",
        cause="the tasks are too hard for this policy, or the grader never accepts the form of its answers",
        remedy="read rollouts/*.jsonl; take easier tasks, or tell the answer's form in the prompt",
        metric="groups/all_failed",
        holds=lambda m, c: m["groups/all_failed"] == 1,
    ),
    "all_solved": Rule(
        formula="groups/all_solved = 1 for monitor.patience steps",
        cause="the tasks have become too easy to learn from",
        remedy="take harder tasks, or end the run",
        metric="groups/all_solved",
        holds=lambda m, c: m["groups/all_solved"] == 1,
    ),
    "grad_norm_floor": Rule(
        formula="grad_norm < monitor.grad_norm_floor for monitor.patience steps",
        cause="hardly any rollout carries a signal",
        remedy="look at context/active_fraction (SDPO), groups/constant_fraction (GRPO) and policy/entropy",
        settings=("grad_norm_floor",),
        metric="grad_norm",
        holds=lambda m, c: m["grad_norm"] < c.grad_norm_floor,
    ),
    "grad_norm_ceiling": Rule(
        formula="grad_norm > monitor.grad_norm_ceiling",
        cause="the learning rate is too high, or policy and teacher run away from each other",
        remedy="lower optim.lr or teacher.rate, or set loss.token_clip",
        settings=("grad_norm_ceiling",),
        metric="grad_norm",
        holds=lambda m, c: not m["grad_norm"] <= c.grad_norm_ceiling,
        at_once=True,
    ),
    "skipped_updates": Rule(
        formula="skipped_updates > 0",
        cause="the gradient was not finite, so the update was left out",
        remedy='lower optim.lr, or set model.compute = "float32"',
        metric="skipped_updates",
        holds=lambda m, c: m["skipped_updates"] > 0,
        at_once=True,
    ),
    "length_shrinks": Rule(
        formula="length < monitor.length_drop * the length when reward last rose by monitor.reward_rise; means over "
        "monitor.patience steps in training (completion/length, reward/mean), over monitor.eval_patience evaluations "
        "in validation (length, success)",
        cause="the teacher's context lets it answer without reasoning, and the policy copies that (2603.24472)",
        remedy='show the teacher less (context.feedback, context.rows = "failures"), or set teacher.kind = "frozen"',
        settings=("length_drop", "reward_rise"),
    ),
    "truncated": Rule(
        formula="completion/truncated_fraction > monitor.truncated_fraction for monitor.patience steps",
        cause="the token budget is too small, or completions inflate (2604.08527)",
        remedy="raise sampling.max_tokens; if completion/repetition rises too, lower optim.lr from a checkpoint on",
        settings=("truncated_fraction",),
        metric="completion/truncated_fraction",
        holds=lambda m, c: m["completion/truncated_fraction"] > c.truncated_fraction,
    ),
    "repetition": Rule(
        formula="completion/repetition > monitor.repetition_ratio for monitor.patience steps",
        cause="completions run in circles (2604.08527)",
        remedy="lower optim.lr, set loss.token_clip, or go back to the best checkpoint",
        settings=("repetition_ratio",),
        metric="completion/repetition",
        holds=lambda m, c: m["completion/repetition"] > c.repetition_ratio,
    ),
    "entropy_collapse": Rule(
        formula=f"policy/entropy < monitor.entropy_floor while success/rate < {_SOLVED}, for monitor.patience steps",
        cause="the policy has stopped exploring before it solves the tasks",
        remedy="lower optim.lr, raise policy.clip_high or sampling.temperature, or go back to a checkpoint",
        settings=("entropy_floor",),
        metric="policy/entropy",
        holds=lambda m, c: m["policy/entropy"] < c.entropy_floor and m.get("success/rate", 0.0) < _SOLVED,
    ),
    "logprob_gap": Rule(
        formula="sampler/logprob_gap > monitor.logprob_gap",
        cause="the sampler runs on other weights or in another precision than the trainer",
        remedy="check that the sampler is synchronised after each step; keep train.rollout_is_clip; use one precision",
        settings=("logprob_gap",),
        metric="sampler/logprob_gap",
        holds=lambda m, c: not m["sampler/logprob_gap"] <= c.logprob_gap,
        at_once=True,
    ),
    "failed_rollouts": Rule(
        formula="failed_fraction > monitor.failed_fraction for monitor.patience steps",
        cause="the environment or its sandbox cannot grade them",
        remedy="read the failures in rollouts/*.jsonl; check the sandbox; lower env.max_concurrent, raise env.timeout",
        settings=("failed_fraction",),
        metric="failed_fraction",
        holds=lambda m, c: m["failed_fraction"] > c.failed_fraction,
    ),
    "validation_collapse": Rule(
        formula="best - success >= monitor.collapse_min, and >= monitor.collapse_sharp * best at once or >= "
        "monitor.collapse_drop * best for monitor.eval_patience evaluations in a row",
        cause="late collapse: the policy, and a moving teacher after it, have worn out",
        remedy="use the best checkpoint; go on from it with a lower optim.lr or teacher.rate, a frozen teacher, or "
        'algo.name = "sample_routing"',
        settings=("collapse_drop", "collapse_sharp", "collapse_min"),
    ),
}

_STOPPING = ("validation_collapse", "logprob_gap")


@dataclass
class _Streak:
    """How long a condition has held, and whether it has been told."""

    bad: int = 0
    good: int = 0
    told: bool = False

    def observe(self, holds: bool, needed: int, patience: int) -> bool:
        """Whether to tell it now: it held `needed` times in a row, and was away for `patience` since the last time."""
        self.bad, self.good = (self.bad + 1, 0) if holds else (0, self.good + 1)
        if self.good >= patience:
            self.told = False
        if self.bad < needed or self.told:
            return False
        self.told = True
        return True


@dataclass
class _Shrinkage:
    """Length against its value when the score last rose, both averaged over a window."""

    recent: list[tuple[float, float]] = field(default_factory=list)
    reference: tuple[float, float] | None = None
    length: float = 0.0

    def observe(self, length: float, score: float, window: int, config: MonitorConfig) -> bool:
        """Whether the length has dropped without a rise of the score."""
        self.recent = [*self.recent, (length, score)][-window:]
        if len(self.recent) < window:
            return False
        self.length = sum(x for x, _ in self.recent) / window
        mean = sum(x for _, x in self.recent) / window
        if self.reference is None or mean >= self.reference[1] + config.reward_rise:
            self.reference = (self.length, mean)
        return self.length < config.length_drop * self.reference[0]


class Monitor:
    """Watches one run.

    Args:
        config: the [monitor] section.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self.config = config
        self.best: tuple[int, float] | None = None
        self._streaks = {code: _Streak() for code in MONITORS}
        self._shrinkage = {"training": _Shrinkage(), "validation": _Shrinkage()}
        self._shrunk = {"training": False, "validation": False}

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation, the first of equals; None before any."""
        return None if self.best is None else self.best[0]

    @property
    def should_stop(self) -> bool:
        """Whether the run should end, which only `stop_on_collapse` asks for."""
        return self.config.stop_on_collapse and any(self._streaks[code].told for code in _STOPPING)

    def observe_step(self, step: int, metrics: Mapping[str, float]) -> list[Warning_]:
        """Warnings that set in with this step. A rule whose metric is missing keeps its state."""
        patience = self.config.patience
        found = []
        for code, rule in MONITORS.items():
            if rule.holds is None or rule.metric not in metrics:
                continue
            needed = 1 if rule.at_once else patience
            if self._streaks[code].observe(rule.holds(metrics, self.config), needed, patience):
                found.append(Warning_(code, self._describe(rule, metrics), step))
        if "completion/length" in metrics and "reward/mean" in metrics:
            found += self._length("training", step, metrics["completion/length"], metrics["reward/mean"], patience)
        return found

    def observe_eval(self, step: int, success: float, *, length: float | None = None) -> list[Warning_]:
        """Warnings that set in with this evaluation; keeps the best step.

        Args:
            success: success rate on the held-out tasks, 0 to 1; NaN (nothing could be graded) is left out.
            length: mean completion length in tokens.
        """
        if math.isnan(success):
            return []
        if self.best is None or success > self.best[1]:
            self.best = (step, success)
        found = self._collapse(step, success)
        if length is not None:
            found += self._length("validation", step, length, success, self.config.eval_patience)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state` needs, JSON-able."""
        return {
            "best": self.best,
            "streaks": {code: asdict(streak) for code, streak in self._streaks.items()},
            "shrinkage": {where: asdict(shrinkage) for where, shrinkage in self._shrinkage.items()},
            "shrunk": dict(self._shrunk),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, also one that has been through JSON."""
        self.best = _pair(state["best"])
        self._streaks = {code: _Streak(**state["streaks"].get(code, {})) for code in MONITORS}
        self._shrinkage = {
            where: _Shrinkage([(x, y) for x, y in kept["recent"]], _pair(kept["reference"]), kept["length"])
            for where, kept in state["shrinkage"].items()
        }
        self._shrunk = dict(state["shrunk"])

    def _describe(self, rule: Rule, metrics: Mapping[str, float]) -> str:
        value = metrics[rule.metric]
        limits = ", ".join(f"monitor.{s} = {getattr(self.config, s):g}" for s in rule.settings)
        lasted = "" if rule.at_once else f" after {self.config.patience} steps in a row"
        cause = _why_no_context(metrics) if rule is MONITORS["no_teacher_context"] else rule.cause
        return f"{rule.metric} = {value:.3g}{lasted}{f' ({limits})' if limits else ''}; {cause}; {rule.remedy}"

    def _length(self, where: str, step: int, length: float, score: float, window: int) -> list[Warning_]:
        self._shrunk[where] = self._shrinkage[where].observe(length, score, window, self.config)
        # One warning for both courses: they tell of the same thing.
        if not self._streaks["length_shrinks"].observe(any(self._shrunk.values()), 1, self.config.patience):
            return []
        rule, seen = MONITORS["length_shrinks"], self._shrinkage[where]
        assert seen.reference is not None
        message = (
            f"{where} completions fell from {seen.reference[0]:.0f} to {seen.length:.0f} tokens and reward has not "
            f"risen by {self.config.reward_rise:g} since (monitor.length_drop = {self.config.length_drop:g}); "
            f"{rule.cause}; {rule.remedy}"
        )
        return [Warning_("length_shrinks", message, step)]

    def _collapse(self, step: int, success: float) -> list[Warning_]:
        assert self.best is not None
        config, (best_step, best) = self.config, self.best
        fall = best - success
        counts = fall > 0 and fall >= config.collapse_min
        sharp = counts and fall >= config.collapse_sharp * best
        fallen = counts and fall >= config.collapse_drop * best
        needed = 1 if sharp else config.eval_patience
        if not self._streaks["validation_collapse"].observe(fallen or sharp, needed, config.eval_patience):
            return []
        rule = MONITORS["validation_collapse"]
        limit = "collapse_sharp" if sharp else "collapse_drop"
        message = (
            f"validation success fell from its best, {best:.3g} at step {best_step}, to {success:.3g} "
            f"(monitor.{limit} = {getattr(config, limit):g}); {rule.cause}; {rule.remedy}"
        )
        return [Warning_("validation_collapse", message, step)]


def _why_no_context(metrics: Mapping[str, float]) -> str:
    """What left the teacher with nothing, as far as the metrics tell."""
    success, feedback = metrics.get("success/rate"), metrics.get("context/feedback_available_fraction")
    if success == 0:
        if not feedback:
            return "no rollout succeeded and the environment gave no feedback"
        return "no rollout succeeded, and the feedback that there was is not shown (context.feedback, context.rows)"
    if success == 1:
        return "every rollout succeeded, and context.rows leaves successes out"
    if metrics.get("context/lone_success"):
        return "the only successes may not be their own demonstrations, and there was no feedback to show"
    return MONITORS["no_teacher_context"].cause


def _pair(value: Any) -> Any:
    return None if value is None else tuple(value)
