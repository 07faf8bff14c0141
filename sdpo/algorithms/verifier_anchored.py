"""Verifier-anchored re-weighting (RLSD, 2604.03128): the verifier gives the direction, the teacher only the size.

    D_t = log p_teacher(y_t) - log p_policy(y_t), detached
    A_t = A * ((1 - anchor_mix) + anchor_mix * clip(exp(sign(A) * D_t), 1 - anchor_clip, 1 + anchor_clip))

The loss is GRPO's with A_t in place of A (the paper's Eq. 17, the form with a trainable log-probability). The teacher's
knowledge cannot leak into the policy's distribution, since its distribution is never a target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdpo.algorithms.base import Signals
from sdpo.algorithms.grpo import GRPO, GRPOOnPolicy
from sdpo.algorithms.sdpo import SDPO

if TYPE_CHECKING:
    from torch import Tensor

    from sdpo.config import Config

__all__ = ["VerifierAnchored"]


class VerifierAnchored(GRPO):
    """GRPO whose advantage is re-weighted token by token by the teacher."""

    name = "verifier_anchored"
    summary = "the teacher's gap re-weights GRPO's advantage token by token (2604.03128)"
    preset = {
        **GRPOOnPolicy.preset,
        "teacher": SDPO.preset["teacher"],
        "algo": {"anchor_clip": 0.2, "anchor_mix": 1.0},
    }
    sections = ("context", "teacher", "policy")
    options = ("anchor_clip", "anchor_mix")
    needs_teacher = True

    def token_advantages(self, signals: Signals, config: Config) -> Tensor:
        from sdpo.loss import anchored_advantages, token_logprobs

        per_token = signals.advantages[:, None].expand_as(signals.mask).clone()
        if signals.teacher_logits is None:
            return per_token
        rows = signals.rows
        teacher = token_logprobs(signals.teacher_logits, signals.token_ids[rows], config.teacher.temperature)
        per_token[rows] = anchored_advantages(
            signals.advantages[rows],
            signals.logprobs[rows].detach(),
            teacher,
            clip=config.algo.anchor_clip,
            mix=config.algo.anchor_mix,
        )
        return per_token
