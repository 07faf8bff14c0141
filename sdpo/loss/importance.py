"""Importance ratios between two policies on the sampled tokens.

The exponent is bounded before the exponential: a token whose probability vanished on one side must make no infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdpo.errors import ConfigError

__all__ = ["importance_ratio", "truncated_importance_weights"]

_MAX_LOG_RATIO = 20.0


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, its exponent bounded to +-20; the gradient is zero outside."""
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


@torch.no_grad()
def truncated_importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, clip: float) -> Tensor:
    """min(p / p_sampler, clip) for each token: corrects for rollouts drawn by an engine that is not the trainer.

    Truncated from above only, not normalised, detached (2601.20802, Table 12: 2).

    Args:
        logprobs: [B, T] of the sampled tokens under the trainer's policy, at the sampling temperature.
        sampler_logprobs: [B, T] as the sampler reported them.
        clip: upper bound of the weight.

    Returns:
        [B, T]; meaningless where the tokens are masked.
    """
    if not clip > 0:
        raise ConfigError(f"importance clip = {clip} is not positive", hint="2 is the published value")
    return importance_ratio(logprobs - sampler_logprobs).clamp(max=clip)
