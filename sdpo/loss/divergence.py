"""Divergences between two log-distributions, entry by entry: the formulas alone.

Of the two arguments only the student carries a gradient, and it does so wherever it appears: as the outer weight, and
inside the mixture, where its parts cancel.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from sdpo.errors import ConfigError, did_you_mean

__all__ = ["Divergence", "check_divergence", "clipped_reverse_kl", "token_divergence"]

Divergence = Literal["forward_kl", "reverse_kl", "js"]

_MAX_GAP = 80.0


def check_divergence(kind: str, alpha: float) -> None:
    """Refuse an unknown divergence, or a mixture weight that js does not have.

    Raises:
        ConfigError: names the value and the remedy.
    """
    if kind not in get_args(Divergence):
        raise ConfigError(f"unknown divergence {kind!r}", hint=did_you_mean(kind, get_args(Divergence)))
    if kind == "js" and not 0 < alpha < 1:
        raise ConfigError(
            f"alpha = {alpha} is outside (0, 1), where js vanishes",
            hint='use divergence="forward_kl" for alpha 0 and "reverse_kl" for alpha 1',
        )


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def token_divergence(student: Tensor, teacher: Tensor, kind: Divergence = "js", alpha: float = 0.5) -> Tensor:
    """The divergence of two distributions, in nats (2601.20802, App. A.3).

        forward_kl   KL(T || S)                                                     alpha = 0
        reverse_kl   KL(S || T)                                                     alpha = 1
        js           (1 - alpha) KL(S || M) + alpha KL(T || M),  M = (1 - alpha) S + alpha T

    js does not tend to the KLs at its ends, it vanishes there: js / alpha tends to KL(T || S) as alpha tends to 0, and
    js / (1 - alpha) to KL(S || T) as alpha tends to 1. With alpha = .5 it is at most log 2.

    Args:
        student: [..., K] finite log-probabilities.
        teacher: [..., K] likewise; gets no gradient.
        kind: which divergence.
        alpha: weight of the teacher in the mixture; read by js alone.

    Returns:
        [...].

    Raises:
        ConfigError: unknown kind, or alpha outside (0, 1) for js.
    """
    check_divergence(kind, alpha)
    teacher = teacher.detach()
    if kind == "forward_kl":
        return _kl(teacher, student)
    if kind == "reverse_kl":
        return _kl(student, teacher)
    return _js(student, teacher, alpha)


def _js(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """By log-ratios, which keep their precision where the two sides are close: with d = T - S,

        S - M = -log(1 - alpha + alpha e^d) = -log1p(alpha expm1(d)),   T - M = S - M + d.

    The gradient with respect to S_v is (1 - alpha) p_v (S_v - M_v): the terms through M and the one that differentiates
    S_v itself cancel for each v, so the log-ratios may be held fixed. Bounding d changes only terms whose weight is
    below e^-80.
    """
    with torch.no_grad():
        d = (teacher - student).clamp_(-_MAX_GAP, _MAX_GAP)
        to_mixture = d.expm1().mul_(alpha).log1p_().neg_()
        of_teacher = (teacher.exp() * d.add_(to_mixture)).sum(-1)
    return (1 - alpha) * (student.exp() * to_mixture).sum(-1) + alpha * of_teacher


def clipped_reverse_kl(student: Tensor, teacher: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Reverse KL as a policy gradient over the vocabulary, with bounded advantages.

    The gradient of KL(S || T) is that of -sum_v p_v A_v with p_v = exp(S_v) and A_v = log T_v - log S_v held fixed
    (2601.20802, Prop. 2.1: the remaining term, sum_v of the gradient of p_v, is zero). So with A_v clipped to +-clip,

        L = -sum_v p_v * stop_gradient(clip(A_v, -clip, clip)),

    which where no advantage is clipped has the value and the gradient of the reverse KL. Unlike with a bound on the
    divergence, a clipped entry keeps pulling, with a force of at most `clip`.

    Args:
        student: [..., K] finite log-probabilities that sum to one.
        teacher: [..., K] likewise.
        clip: bound on the advantage, in nats; 5 for training at test time (Table 12).

    Returns:
        L [...] and, detached, the student's probability mass on clipped entries [...].
    """
    advantage = (teacher - student).detach()
    p = student.exp()
    clipped_mass = (p.detach() * (advantage.abs() > clip)).sum(-1)
    return -(p * advantage.clamp(-clip, clip)).sum(-1), clipped_mass
