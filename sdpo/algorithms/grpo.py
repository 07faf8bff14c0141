"""GRPO and its named variants: the clipped policy gradient with group-relative advantages.

grpo            the baseline of 2601.20802 (Table 13): no std division, no KL, clip .2/.28, four optimiser steps
grpo_on_policy  the same with one optimiser step per generation batch
dr_grpo         2503.20783: no std division, constant-length aggregation
dapo            2503.14476: std, clip-higher, token mean, no KL, dynamic sampling, soft overlong punishment
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from sdpo.algorithms.base import Algorithm, Objective, Signals

if TYPE_CHECKING:
    from torch import Tensor

    from sdpo.config import Config
    from sdpo.loss import PolicyGradientLoss

__all__ = ["DAPO", "DRGRPO", "GRPO", "GRPOOnPolicy", "policy_gradient"]

_PAPER_POLICY = {"baseline": "mean", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "kl_coef": 0.0}
_PAPER_TRAIN = {"prompts_per_step": 32, "rollouts_per_prompt": 8, "mini_batch_prompts": 8, "rollout_is_clip": 2.0}
_PAPER_OPTIM = {"lr": 1e-6, "warmup_steps": 10, "weight_decay": 0.01}
_PAPER_EVAL = {"rollouts": 16, "temperature": 0.6, "top_p": 0.95}


def policy_gradient(
    signals: Signals, advantages: Tensor, weights: Tensor, normalizer: Tensor, config: Config
) -> PolicyGradientLoss:
    """The clipped policy-gradient loss by the settings of [policy].

    Args:
        advantages: [B] or [B, T].
        weights: [B, T] detached weights, aggregation included.
        normalizer: 0-d.
    """
    from sdpo.loss import policy_gradient_loss

    policy = config.policy
    return policy_gradient_loss(
        signals.logprobs,
        signals.old_logprobs,
        advantages,
        signals.mask,
        clip_low=policy.clip_low,
        clip_high=policy.clip_high,
        importance=policy.importance,
        dual_clip=policy.dual_clip,
        ref_logprobs=signals.ref_logprobs,
        kl_coef=policy.kl_coef,
        weights=weights,
        normalizer=normalizer,
    )


class GRPO(Algorithm):
    """The paper's baseline."""

    name = "grpo"
    summary = "GRPO as the baseline of 2601.20802 (Table 13): no std division, no KL, clip .2/.28"
    preset = {"policy": _PAPER_POLICY, "optim": _PAPER_OPTIM, "train": _PAPER_TRAIN, "eval": _PAPER_EVAL}
    sections: ClassVar[tuple[str, ...]] = ("policy",)
    needs_teacher = False
    needs_advantages = True

    def counts(self, mask: Tensor, has_context: Tensor, success: Tensor, config: Config) -> dict[str, Tensor]:
        from sdpo.loss import aggregation_count

        return {"policy": aggregation_count(mask, config.policy.aggregation, config.sampling.max_tokens)}

    def objective(self, signals: Signals, totals: Mapping[str, Tensor], config: Config) -> Objective:
        from sdpo.loss import aggregation_weights

        weights = aggregation_weights(signals.mask, config.policy.aggregation, config.sampling.max_tokens)
        advantages = self.token_advantages(signals, config)
        out = policy_gradient(signals, advantages, weights * signals.sampler_weights, totals["policy"], config)
        return Objective(out.loss, out.totals)

    def token_advantages(self, signals: Signals, config: Config) -> Tensor:
        """[B] or [B, T]: what multiplies each token's log-probability gradient."""
        return signals.advantages


class GRPOOnPolicy(GRPO):
    """One optimiser step a batch, so that every importance ratio is 1."""

    name = "grpo_on_policy"
    summary = "GRPO with one optimiser step per generation batch (2601.20802, Table 13)"
    preset = {**GRPO.preset, "train": {**_PAPER_TRAIN, "mini_batch_prompts": None}}


class DRGRPO(GRPO):
    """GRPO without the length and difficulty biases."""

    name = "dr_grpo"
    summary = "Dr.GRPO (2503.20783): no std division, constant-length aggregation"
    preset = {**GRPO.preset, "policy": {**_PAPER_POLICY, "clip_high": 0.2, "aggregation": "constant"}}


class DAPO(GRPO):
    """Clip-higher, dynamic sampling, token mean, soft overlong punishment."""

    name = "dapo"
    summary = "DAPO (2503.14476): std, clip-higher, dynamic sampling, soft overlong punishment"
    preset = {
        **GRPO.preset,
        "policy": {**_PAPER_POLICY, "baseline": "mean_std", "dual_clip": None, "overlong_buffer": 1024},
        "train": {**_PAPER_TRAIN, "resample_rounds": 3},
    }
