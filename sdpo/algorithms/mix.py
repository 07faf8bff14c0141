"""A convex mix of GRPO's and SDPO's advantages, the paper's answer for small models (2601.20802, Sec. 4).

    A = mix * A_GRPO + (1 - mix) * A_SDPO,  mix = .9

The gradient is linear in the advantage, so on policy the mix of the two losses has exactly the gradient of the mixed
advantage; that is what is computed, each part with its own clipping and its own denominator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sdpo.algorithms.base import Algorithm, Objective, Signals
from sdpo.algorithms.grpo import GRPO, GRPOOnPolicy
from sdpo.algorithms.sdpo import SDPO, SDPORichFeedback

if TYPE_CHECKING:
    from torch import Tensor

    from sdpo.config import Config

__all__ = ["SDPOGRPO"]


class SDPOGRPO(Algorithm):
    """mix * GRPO + (1 - mix) * SDPO."""

    name = "sdpo_grpo"
    summary = "mix * GRPO + (1 - mix) * SDPO, mix = .9, for small models (2601.20802, Sec. 4)"
    preset = {**SDPORichFeedback.preset, **GRPOOnPolicy.preset, "algo": {"mix": 0.9}}
    sections = ("context", "teacher", "loss", "policy")
    options = ("mix",)
    needs_teacher = True
    needs_advantages = True

    def counts(self, mask: Tensor, has_context: Tensor, success: Tensor, config: Config) -> dict[str, Tensor]:
        return {
            **GRPO().counts(mask, has_context, success, config),
            **SDPO().counts(mask, has_context, success, config),
        }

    def objective(self, signals: Signals, totals: Mapping[str, Tensor], config: Config) -> Objective:
        policy = GRPO().objective(signals, totals, config)
        distilled = SDPO().objective(signals, totals, config)
        mix = config.algo.mix
        return Objective(mix * policy.loss + (1 - mix) * distilled.loss, {**policy.metrics, **distilled.metrics})
