"""The clipped policy gradient of GRPO and its relatives.

Aggregation (token mean, sequence mean, constant length) comes in through `weights` and `normalizer`, and group
baselines through the advantages, so that Dr.GRPO, DAPO and GSPO differ in arguments alone. Not here: entropy bonus,
critics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sdpo.errors import ConfigError, did_you_mean
from sdpo.loss.importance import importance_ratio
from sdpo.loss.result import LossResult, over_normalizer

__all__ = ["Importance", "PolicyGradientLoss", "policy_gradient_loss"]

Importance = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class PolicyGradientLoss(LossResult):
    """Names of `metrics` and `totals`, all means over counted tokens before weights and normaliser:

    policy/ratio                importance ratio
    policy/clip_low_fraction    share of tokens held by the lower clip: negative advantage, ratio under 1 - clip_low
    policy/clip_high_fraction   share of tokens held by the upper clip: positive advantage, ratio over 1 + clip_high
    policy/dual_clip_fraction   share of tokens held by the dual clip; only with dual_clip
    policy/approx_kl            KL(old || policy), estimated as ratio - 1 - log ratio of the token, in nats
    policy/active_fraction      share of tokens whose advantage is not 0
    policy/reference_kl         KL(policy || reference), k3 estimate, in nats; only with ref_logprobs
    """


def policy_gradient_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    importance: Importance = "token",
    dual_clip: float | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> PolicyGradientLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3, for each token.

    Masked tokens may hold NaN; without a single token the loss is a differentiable 0.

    Args:
        logprobs: [B, T] of the sampled tokens under the policy, with gradient.
        old_logprobs: [B, T] under the policy that started the step. Equal to logprobs.detach() on policy.
        advantages: [B], or [B, T] for advantages by token.
        mask: [B, T], not 0 on tokens that count.
        clip_low: the ratio's lower clip is 1 - clip_low.
        clip_high: the upper is 1 + clip_high (2503.14476: larger than clip_low).
        importance: "token": r_t = p_t / p_old_t. "sequence": GSPO's s = exp(mean_t log r_t) for all tokens of a row,
            with the gradient s * grad log p_t at token t (2507.18071, the GSPO-token form). Summed over a row with one
            advantage this is the gradient of GSPO itself, times the row's length; aggregate by sequence_mean for GSPO.
        dual_clip: c > 1: where A < 0 the loss is at most -c A, so that an exploding ratio cannot dominate (1912.09729).
        ref_logprobs: [B, T] under a reference policy, for the KL term.
        kl_coef: weight of k3 = exp(d) - d - 1 with d = log p_ref - log p.
        weights: [B, T] detached factors of the whole token loss, the KL term included: aggregation, rollout correction.
        normalizer: what the sum is divided by; None: the number of counted tokens.

    Raises:
        ConfigError: a ValueError for arguments that contradict each other or shapes that do not fit.
    """
    _check(importance, clip_low, clip_high, dual_clip, kl_coef, ref_logprobs)
    if mask.shape != logprobs.shape or advantages.shape not in (mask.shape, mask.shape[:1]):
        raise ConfigError(
            f"mask {tuple(mask.shape)} and advantages {tuple(advantages.shape)} do not fit log-probs "
            f"{tuple(logprobs.shape)}",
            hint="log-probs and mask are [B, T], advantages [B] or [B, T]",
        )
    counted = mask != 0

    def only(values: Tensor) -> Tensor:
        return torch.where(counted, values, torch.zeros((), device=values.device, dtype=values.dtype))

    logp = only(logprobs if logprobs.dtype == torch.float64 else logprobs.float())
    advantages = only((advantages[:, None] if advantages.dim() == 1 else advantages).detach().expand_as(logp))
    token_log_ratio = logp - only(old_logprobs.detach())
    log_ratio = token_log_ratio
    if importance == "sequence":
        mean = token_log_ratio.detach().sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = logp - logp.detach() + mean
    ratio = importance_ratio(log_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    sums = {
        "ratio": ratio,
        "clip_low_fraction": (advantages < 0) & (ratio < 1 - clip_low),
        "clip_high_fraction": (advantages > 0) & (ratio > 1 + clip_high),
        "approx_kl": importance_ratio(token_log_ratio) - 1 - token_log_ratio,
        "active_fraction": advantages != 0,
    }
    if dual_clip is not None:
        floor = dual_clip * advantages
        sums["dual_clip_fraction"] = (advantages < 0) & (gain < floor)
        gain = torch.where(advantages < 0, torch.maximum(gain, floor), gain)
    per_token = -gain
    if ref_logprobs is not None:
        d = only(ref_logprobs.detach()) - logp
        k3 = importance_ratio(d) - d - 1
        sums["reference_kl"] = k3
        per_token = per_token + kl_coef * k3
    if weights is not None:
        per_token = per_token * only(weights.detach())
    per_token = only(per_token)
    count = counted.sum().float()
    means = {f"policy/{name}": (only(v.detach().float()).sum(), count) for name, v in sums.items()}
    return PolicyGradientLoss(over_normalizer(per_token, counted, normalizer), per_token, means)


def _check(
    importance: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl_coef: float,
    ref_logprobs: Tensor | None,
) -> None:
    if importance not in ("token", "sequence"):
        raise ConfigError(f"unknown importance {importance!r}", hint=did_you_mean(importance, ("token", "sequence")))
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ConfigError(
            f"clip_low = {clip_low}, clip_high = {clip_high}", hint="0 <= clip_low <= 1 and clip_high >= 0 are needed"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip = {dual_clip} is not above 1", hint="3 is common; None switches it off")
    if kl_coef and ref_logprobs is None:
        raise ConfigError(f"kl_coef = {kl_coef} needs ref_logprobs", hint="pass them, or kl_coef=0")
