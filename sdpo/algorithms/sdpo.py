"""SDPO: the self-teacher's next-token distribution is distilled into the policy (2601.20802, Eq. 1).

Two presets: `sdpo` is the setting without rich feedback (Sec. 3: Jensen-Shannon, top-100, EMA .05) and
`sdpo_rich_feedback` the one with it (Sec. 4: reverse KL, top-20, EMA .01, one question an optimiser step), both from
Table 12. Left out: the sequence gradient's future-KL term (App. A.1), which the paper found to bring nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sdpo.algorithms.base import Algorithm, Objective, Signals

if TYPE_CHECKING:
    from torch import Tensor

    from sdpo.config import Config
    from sdpo.loss import DistillationLoss

__all__ = ["SDPO", "SDPORichFeedback", "distil", "distillation_mask"]


def distillation_mask(mask: Tensor, has_context: Tensor, config: Config) -> Tensor:
    """[B, T] float: completion tokens of rows with a context, less the first `loss.skip_first_tokens`."""
    target = mask * has_context[:, None].to(mask.dtype)
    target[:, : config.loss.skip_first_tokens] = 0
    return target


def distil(signals: Signals, target: Tensor, weights: Tensor, normalizer: Tensor, config: Config) -> DistillationLoss:
    """The distillation loss of the R rows that the teacher scored, by the settings of [loss].

    Args:
        target: [B, T] tokens that count.
        weights: [B, T] detached weights, aggregation included.
        normalizer: 0-d.
    """
    from sdpo.loss import distillation_loss

    assert signals.student_logits is not None
    assert signals.teacher_logits is not None
    loss, rows = config.loss, signals.rows
    return distillation_loss(
        signals.student_logits,
        signals.teacher_logits,
        target[rows],
        divergence=loss.divergence,
        alpha=loss.alpha,
        top_k=loss.top_k,
        tail=loss.tail,
        top_k_from=loss.top_k_from,
        token_ids=signals.token_ids[rows],
        old_logprobs=signals.old_logprobs[rows],
        is_clip=loss.is_clip,
        granularity=loss.granularity,
        token_clip=loss.token_clip,
        advantage_clip=loss.advantage_clip,
        weights=weights[rows],
        normalizer=normalizer,
        temperature=config.sampling.temperature,
        teacher_temperature=config.teacher.temperature,
    )


class SDPO(Algorithm):
    """Every rollout with a teacher context is distilled; rewards only choose the demonstrations."""

    name = "sdpo"
    summary = "self-distillation, the setting without rich feedback (2601.20802, Sec. 3)"
    preset = {
        "loss": {"divergence": "js", "alpha": 0.5, "top_k": 100, "is_clip": 2.0},
        "teacher": {"kind": "ema", "rate": 0.05},
        "optim": {"lr": 1e-5, "warmup_steps": 10, "weight_decay": 0.01},
        "train": {"prompts_per_step": 32, "rollouts_per_prompt": 8, "mini_batch_prompts": None, "rollout_is_clip": 2.0},
        "eval": {"rollouts": 16, "temperature": 0.6, "top_p": 0.95},
    }
    sections = ("context", "teacher", "loss")
    needs_teacher = True
    needs_advantages = False

    def counts(self, mask: Tensor, has_context: Tensor, success: Tensor, config: Config) -> dict[str, Tensor]:
        from sdpo.loss import aggregation_count

        every_row = has_context.new_ones(has_context.shape)
        rows = has_context if config.loss.denominator == "active" else every_row
        target = distillation_mask(mask, rows, config)
        return {"distillation": aggregation_count(target, config.loss.aggregation, config.sampling.max_tokens)}

    def objective(self, signals: Signals, totals: Mapping[str, Tensor], config: Config) -> Objective:
        from sdpo.loss import aggregation_weights

        if signals.student_logits is None:
            return Objective(signals.logprobs.sum() * 0.0, {})
        target = distillation_mask(signals.mask, signals.has_context, config)
        weights = aggregation_weights(target, config.loss.aggregation, config.sampling.max_tokens)
        out = distil(signals, target, weights * signals.sampler_weights, totals["distillation"], config)
        return Objective(out.loss, out.totals)


class SDPORichFeedback(SDPO):
    """The same step with the settings of the experiments with rich feedback."""

    name = "sdpo_rich_feedback"
    summary = "self-distillation, the setting with rich feedback (2601.20802, Sec. 4)"
    preset = {
        "loss": {"divergence": "reverse_kl", "top_k": 20, "is_clip": 2.0},
        "teacher": {"kind": "ema", "rate": 0.01},
        "optim": {"lr": 1e-6, "warmup_steps": 0, "weight_decay": 0.01},
        "train": {"prompts_per_step": 32, "rollouts_per_prompt": 8, "mini_batch_prompts": 1, "rollout_is_clip": 2.0},
        "eval": {"rollouts": 4, "temperature": 0.6, "top_p": 0.95},
    }
