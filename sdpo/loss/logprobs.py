"""Log-probabilities and entropies from logits, in float32 or better.

Logits often come out of models in bfloat16, whose spacing is 0.125 for values between 16 and 32. So they are widened
before anything is computed from them: the rounding that happened stays, no more is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdpo.errors import ConfigError

__all__ = ["LOGPROB_FLOOR", "scaled", "token_entropy", "token_logprobs"]

LOGPROB_FLOOR = -1000.0
"""Log-probabilities, in nats, are never below this. exp(-1000) is 0 in float64 too, so no probability is changed that a
number can hold. A masked vocabulary entry (-inf, or the lowest finite number) becomes a finite one, and the reverse KL
to a teacher that excludes a token costs at most 1000 nats a token instead of infinity."""


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits over temperature, widened to float32 unless they are float64.

    Raises:
        ConfigError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ConfigError(f"temperature = {temperature} is not positive", hint="greedy decoding has no distribution")
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return wide if temperature == 1.0 else wide / temperature


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(token) at each position, differentiable, without a second tensor of the logits' size.

    Args:
        logits: [..., V].
        token_ids: [...] int64, each in 0..V-1, positions that will be masked included.
        temperature: divides the logits first; the sampler's, or ratios to its log-probs are not 1.

    Returns:
        [...] float32 (float64 for float64 logits), in nats, at least `LOGPROB_FLOOR`.
    """
    z = scaled(logits, temperature)
    chosen = z.gather(-1, token_ids[..., None]).squeeze(-1)
    return (chosen - z.logsumexp(-1)).clamp(min=LOGPROB_FLOOR)


@torch.no_grad()
def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Shannon entropy of the next-token distribution, detached.

    Args:
        logits: [..., V]; -inf is a token of probability 0.
        temperature: divides the logits first.

    Returns:
        [...] float32 (float64 for float64 logits), in nats.
    """
    logp = scaled(logits, temperature).log_softmax(-1)
    p = logp.exp()
    entropy: Tensor = -torch.linalg.vecdot(p, logp.clamp_(min=LOGPROB_FLOOR))
    return entropy
