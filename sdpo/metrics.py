"""Numbers of a step from its groups and contexts: what metrics.jsonl, the trackers and the monitors read.

Pure functions, no torch. A number that cannot be computed (no graded rollout, no text) is left out rather than reported
as 0 or NaN. `METRICS` says what each name means; docs/troubleshooting.md prints it. Not covered: numbers that need
tensors (sdpo.step, sdpo.loss) and wall-clock times, which stand under "seconds" in metrics.jsonl.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

from sdpo.types import Group, TeacherContext

__all__ = ["METRICS", "REPETITION_WINDOW", "context_metrics", "repetition", "rollout_metrics"]

REPETITION_WINDOW = 10_000  # characters at the end of a completion, as 2604.08527 measures repetition
_EQUAL = 1e-9  # rewards closer than this are the same reward

METRICS: dict[str, str] = {
    "loss": "Mean loss of the step's optimiser steps.",
    "reward/mean": "Mean reward of the graded rollouts.",
    "reward/std": "Population standard deviation of all graded rewards of the step.",
    "reward/group_std": "Mean over groups of the standard deviation within the group; 0: no group-relative signal.",
    "success/rate": "Successes / graded rollouts.",
    "groups/all_solved": "Groups in which every graded rollout succeeded / groups with a graded rollout.",
    "groups/all_failed": "Groups in which none succeeded / groups with a graded rollout.",
    "groups/constant_fraction": "Groups whose graded rewards are all equal / groups with a graded rollout.",
    "groups/dropped": "Groups that dynamic sampling dropped for equal rewards (`train.resample_rounds`).",
    "completion/length": "Mean completion length in tokens, the end token included.",
    "completion/length_min": "Shortest completion in tokens.",
    "completion/length_max": "Longest completion in tokens.",
    "completion/tokens": "Tokens sampled in the step.",
    "completion/truncated_fraction": "Completions cut by `sampling.max_tokens` / all.",
    "completion/empty_fraction": "Completions without visible text / all.",
    "completion/repetition": "Mean of bytes / zlib-compressed bytes, of the last 10,000 characters of completions.",
    "failed_fraction": "Rollouts that could not be graded / all; they count in no reward and in no loss.",
    "env/*": "Mean of the environment's own metric of that name over the rollouts that report it.",
    "context/active_fraction": "Rollouts with a teacher context / all.",
    "context/demonstration_fraction": "Rollouts whose teacher sees a demonstration / all.",
    "context/feedback_available_fraction": "Rollouts for which the environment gave feedback / all.",
    "context/feedback_used_fraction": "Rollouts whose teacher sees feedback / all.",
    "context/truncated_tokens": "Tokens of demonstrations and feedback that the budgets cut, summed over the step.",
    "context/lone_success": "Groups with one success that has no demonstration, because it may not be its own.",
    "grad_norm": "Norm of the gradient before clipping, mean over the optimiser steps whose gradient was finite.",
    "skipped_updates": "Optimiser steps left out because the gradient was not finite / all.",
    "optimiser_steps": "Optimiser steps in this step.",
    "lr": "Learning rate, mean over the optimiser steps.",
    "padding_share": "Padded tokens / all tokens of the micro-batches.",
    "policy/entropy": "Mean entropy of the policy's next-token distribution on completion tokens, in nats.",
    "policy/ratio": "Mean importance ratio policy / policy before the step, over completion tokens.",
    "policy/clip_low_fraction": "Tokens with a negative advantage whose ratio is below the lower clip / all.",
    "policy/clip_high_fraction": "Tokens with a positive advantage whose ratio is above the upper clip / all.",
    "policy/dual_clip_fraction": "Tokens whose loss `policy.dual_clip` bounds / all.",
    "policy/active_fraction": "Tokens whose advantage is not 0 / all.",
    "policy/approx_kl": "Estimate ratio - 1 - log ratio of KL(policy before the step || policy), in nats.",
    "policy/reference_kl": "The same estimate of KL(policy || initial model); with `policy.kl_coef`.",
    "distillation/divergence": "Mean divergence a distilled token, in nats, before clips and weights.",
    "distillation/teacher_gap": "Mean log-probability of the sampled tokens: teacher's less student's.",
    "distillation/student_entropy": "Entropy of the student on the compared support, in nats.",
    "distillation/teacher_entropy": "Entropy of the teacher on the compared support, in nats.",
    "distillation/student_topk_mass": "Probability that the student gives to the top-k tokens compared.",
    "distillation/teacher_topk_mass": "Probability that the teacher gives to them.",
    "distillation/topk_overlap": "Share of one side's k likeliest tokens that are among the other's.",
    "distillation/token_clip_fraction": "Distilled tokens whose divergence `loss.token_clip` bounds / all.",
    "distillation/advantage_clip_fraction": "Share whose advantage `loss.advantage_clip` bounds, by student mass.",
    "distillation/is_ratio": "Mean importance ratio of the distilled tokens.",
    "distillation/is_clip_fraction": "Distilled tokens whose ratio `loss.is_clip` bounds / all.",
    "sampler/logprob_gap": "Mean |trainer - sampler| log-probability of the sampled tokens, in nats.",
    "teacher/distance": "How far the teacher's weights are from the policy's.",
    "routing/distilled_fraction": "`sample_routing`: rows that go to the teacher / rows.",
}


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, successes, lengths and defects of a step's rollouts (names: `METRICS`)."""
    rollouts = [r for g in groups for r in g.rollouts]
    if not rollouts:
        return {}
    completions = [r.completion for r in rollouts]
    lengths = [len(c.token_ids) for c in completions]
    metrics = {
        "completion/length": _mean(lengths),
        "completion/length_min": float(min(lengths)),
        "completion/length_max": float(max(lengths)),
        "completion/tokens": float(sum(lengths)),
        "completion/truncated_fraction": _mean([c.finish_reason == "length" for c in completions]),
        "completion/empty_fraction": _mean([not c.text.strip() for c in completions]),
        "failed_fraction": _mean([r.failure is not None for r in rollouts]),
    }
    if texts := [c.text for c in completions if c.text]:
        metrics["completion/repetition"] = _mean([repetition(text) for text in texts])
    return metrics | _reward_metrics(groups) | _env_metrics(groups)


def context_metrics(groups: Sequence[Group], contexts: Sequence[Sequence[TeacherContext | None]]) -> dict[str, float]:
    """What the self-teacher had to go on (names: `METRICS`).

    Args:
        groups: of the step.
        contexts: one entry a rollout, aligned with `groups`.
    """
    pairs = [
        (rollout, context)
        for group, row in zip(groups, contexts, strict=True)
        for rollout, context in zip(group.rollouts, row, strict=True)
    ]
    if not pairs:
        return {}
    taught = [context for _, context in pairs if context is not None]
    return {
        "context/active_fraction": len(taught) / len(pairs),
        "context/demonstration_fraction": sum(c.demonstration_from is not None for c in taught) / len(pairs),
        "context/feedback_available_fraction": _mean(
            [r.grade is not None and bool(r.grade.feedback.strip()) for r, _ in pairs]
        ),
        "context/feedback_used_fraction": sum(c.used_feedback for c in taught) / len(pairs),
        "context/truncated_tokens": float(sum(c.truncated for c in taught)),
        "context/lone_success": float(sum(map(_has_lone_success, groups, contexts))),
    }


def repetition(text: str) -> float:
    """Compression ratio of the end of a text: about 2 for prose, over 10 when it runs in circles (2604.08527)."""
    raw = text[-REPETITION_WINDOW:].encode("utf-8", "replace")
    return len(raw) / len(zlib.compress(raw)) if raw else 0.0


def _reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    graded = [g for g in groups if g.graded]
    if not graded:
        return {}
    rewards = [reward for g in graded for reward in g.rewards]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/group_std": _mean([_std(g.rewards) for g in graded]),
        "success/rate": sum(len(g.successes) for g in graded) / len(rewards),
        "groups/all_solved": _mean([len(g.successes) == len(g.graded) for g in graded]),
        "groups/all_failed": _mean([not g.successes for g in graded]),
        "groups/constant_fraction": _mean([max(g.rewards) - min(g.rewards) <= _EQUAL for g in graded]),
    }


def _env_metrics(groups: Sequence[Group]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rollout in (r for g in groups for r in g.graded):
        given: Mapping[str, float] = rollout.grade.metrics if rollout.grade is not None else {}
        for name, value in given.items():
            number = _finite(value)
            if number is not None:
                values.setdefault(f"env/{name}", []).append(number)
    return {name: _mean(found) for name, found in sorted(values.items())}


def _has_lone_success(group: Group, contexts: Sequence[TeacherContext | None]) -> bool:
    if len(group.successes) != 1:
        return False
    context = next(c for r, c in zip(group.rollouts, contexts, strict=True) if r.success)
    return context is None or context.demonstration_from is None


def _finite(value: object) -> float | None:
    """A number that can be averaged, or None: metrics may be computed from what a model wrote."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((v - mean) * (v - mean) for v in values) / len(values))
