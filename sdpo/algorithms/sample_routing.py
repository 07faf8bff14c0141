"""Sample routing (SRPO, 2604.02288): each rollout gets the signal that suits it.

Successes, and failures without a teacher, go to GRPO; failures with a teacher context are distilled, each token weighted
by exp(-H of the teacher there) over the mean of those weights. One denominator for both: all routed tokens. Plain SDPO
stalls or falls late because it also distils what is already right; here it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sdpo.algorithms.base import Algorithm, Objective, Signals
from sdpo.algorithms.grpo import GRPOOnPolicy, policy_gradient
from sdpo.algorithms.sdpo import SDPO, distil, distillation_mask

if TYPE_CHECKING:
    from torch import Tensor

    from sdpo.config import Config

__all__ = ["SampleRouting"]


class SampleRouting(Algorithm):
    """Failures with a teacher to SDPO, everything else to GRPO."""

    name = "sample_routing"
    summary = "successes to GRPO, failures with a teacher to SDPO, entropy weights (2604.02288)"
    preset = {
        **GRPOOnPolicy.preset,
        "loss": {**SDPO.preset["loss"], "is_clip": None},
        "teacher": SDPO.preset["teacher"],
        "optim": {"lr": 5e-6, "warmup_steps": 10, "weight_decay": 0.01},
        "algo": {"entropy_weights": True},
    }
    sections = ("context", "teacher", "loss", "policy")
    options = ("entropy_weights",)
    needs_teacher = True
    needs_advantages = True

    def counts(self, mask: Tensor, has_context: Tensor, success: Tensor, config: Config) -> dict[str, Tensor]:
        from sdpo.loss import route

        distilled = self.distilled(mask, has_context, success, config)
        policy = mask * (~route(success, has_context))[:, None].to(mask.dtype)
        return {"routed": (distilled + policy).sum(), "distilled": distilled.sum()}

    def distilled(self, mask: Tensor, has_context: Tensor, success: Tensor, config: Config) -> Tensor:
        from sdpo.loss import route

        return distillation_mask(mask, route(success, has_context), config)

    def needs_teacher_entropy(self, config: Config) -> bool:
        return config.algo.entropy_weights

    def objective(self, signals: Signals, totals: Mapping[str, Tensor], config: Config) -> Objective:
        from sdpo.loss import entropy_weights, route

        to_teacher = route(signals.success, signals.has_context)
        to_policy = (~to_teacher)[:, None].to(signals.mask.dtype)
        policy = policy_gradient(
            signals, signals.advantages, to_policy * signals.sampler_weights, totals["routed"], config
        )
        metrics = dict(policy.totals)
        loss = policy.loss
        if signals.teacher_logits is not None:
            target = self.distilled(signals.mask, signals.has_context, signals.success, config)
            weights = signals.sampler_weights.clone()
            if config.algo.entropy_weights:
                mean = totals["teacher_entropy_weight"] / totals["distilled"].clamp(min=1)
                raw = entropy_weights(signals.teacher_logits, temperature=config.teacher.temperature)
                weights[signals.rows] *= raw / mean
            out = distil(signals, target, weights, totals["routed"], config)
            loss = loss + out.loss
            metrics |= out.totals
        rows = float(to_teacher.numel())
        return Objective(loss, {**metrics, "routing/distilled_fraction": (float(to_teacher.sum()), rows)})
