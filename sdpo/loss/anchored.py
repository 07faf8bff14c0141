"""Verifier-anchored re-weighting (RLSD, 2604.03128): the verifier says in which direction, the teacher only how far.

    D_t = log p_teacher(y_t) - log p_policy(y_t),   held fixed
    w_t = exp(sign(A) D_t)
    A_t = A * ((1 - mix) + mix * clip(w_t, 1 - clip, 1 + clip))

A_t then takes A's place in `policy_gradient_loss`, which brings the trainable log-probability: the paper's Eq. 17. Its
Eq. 16 and Algorithm 1, as printed, have none and would train nothing. Since 1 - clip > 0 the teacher can never turn the
sign of A, and since its distribution is no target, what its context reveals cannot be copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdpo.errors import ConfigError
from sdpo.loss.importance import importance_ratio

__all__ = ["anchored_advantages"]


@torch.no_grad()
def anchored_advantages(
    advantages: Tensor, logprobs: Tensor, teacher_logprobs: Tensor, *, clip: float = 0.2, mix: float = 1.0
) -> Tensor:
    """Advantages by token, detached.

    Args:
        advantages: [B] of the verifier.
        logprobs: [B, T] of the sampled tokens under the policy.
        teacher_logprobs: [B, T] of the same tokens under the teacher.
        clip: the weight stays within 1 +- clip; in [0, 1).
        mix: share of the re-weighted advantage, the rest being that of a uniform weight: 0 is plain GRPO, 1 re-weights
            fully.

    Returns:
        [B, T]; meaningless where the tokens are masked.

    Raises:
        ConfigError: clip or mix out of range.
    """
    if not 0 <= clip < 1:
        raise ConfigError(f"clip = {clip} is outside [0, 1)", hint="at 1 the teacher could silence the verifier")
    if not 0 <= mix <= 1:
        raise ConfigError(f"mix = {mix} is outside [0, 1]", hint="0 is plain GRPO")
    a = advantages[:, None]
    weight = importance_ratio(a.sign() * (teacher_logprobs - logprobs)).clamp(1 - clip, 1 + clip)
    return a * ((1 - mix) + mix * weight)
