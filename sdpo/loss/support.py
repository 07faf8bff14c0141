"""The outcomes on which two next-token distributions are compared (2601.20802, App. A.3).

    full            all V tokens
    top-k + tail    the k likeliest tokens of one side, and one outcome for the rest of the vocabulary
    top-k alone     the same k tokens, both sides renormalised over them (2603.25562)

Which tokens are chosen is not differentiated. Merging outcomes can only lower a divergence, so with the tail the loss
is a lower bound of the full one; the renormalised form is not a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sdpo.loss.arguments import Side
from sdpo.loss.logprobs import LOGPROB_FLOOR

__all__ = ["Support", "spaced", "support"]

_TAIL_EPSILON = 1e-7
_MEASURED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Support:
    """Log-probabilities of both sides on the chosen outcomes, K = V, k or k + 1 of them, all at least `LOGPROB_FLOOR`.

    Attributes:
        student: [N, K], differentiable.
        teacher: [N, K], detached.
        student_mass: [N] probability of the k tokens, detached; None on the full vocabulary.
        teacher_mass: [N] likewise.
        overlap: [n] share of the k tokens that are among the k likeliest of the other side too, on n <= 256 `spaced`
            tokens; None on the full vocabulary.
        student_sampled: [N] log-probability of the sampled tokens, detached; None without their ids.
        teacher_sampled: [N] likewise.
    """

    student: Tensor
    teacher: Tensor
    student_mass: Tensor | None
    teacher_mass: Tensor | None
    overlap: Tensor | None
    student_sampled: Tensor | None
    teacher_sampled: Tensor | None


def support(
    student: Tensor,
    teacher: Tensor,
    *,
    token_ids: Tensor | None,
    top_k: int | None,
    top_k_from: Side,
    tail: bool,
) -> Support:
    """Reduce logits to log-probabilities on the support.

    Args:
        student: [N, V] logits at their temperature, float32 or better.
        teacher: [N, V] likewise, detached.
        token_ids: [N] the sampled tokens, or None.
        top_k: k, cut to V; None for the full vocabulary.
        top_k_from: whose likeliest tokens.
        tail: add the outcome for the rest, rather than renormalise.
    """
    if top_k is None:
        s, t = _floored(student.log_softmax(-1)), _floored(teacher.log_softmax(-1))
        return Support(s, t, None, None, None, _at(s, token_ids), _at(t, token_ids))
    k = min(top_k, student.shape[-1])
    chooser, other = (student, teacher) if top_k_from == "student" else (teacher, student)
    indices = chooser.detach().topk(k, dim=-1).indices
    s_norm, t_norm = student.logsumexp(-1, keepdim=True), teacher.logsumexp(-1, keepdim=True)
    s = _floored(student.gather(-1, indices) - s_norm)
    t = _floored(teacher.gather(-1, indices) - t_norm)
    close = _with_tail if tail else _renormalised
    return Support(
        close(s),
        close(t),
        s.detach().exp().sum(-1),
        t.exp().sum(-1),
        _overlap(other.detach(), indices),
        _at(student, token_ids, s_norm),
        _at(teacher, token_ids, t_norm),
    )


def spaced(n: int, device: torch.device) -> Tensor:
    """Up to 256 evenly spaced numbers of 0..n-1: tokens for measurements that would cost as much as the loss itself."""
    return torch.arange(0, n, max(1, -(-n // _MEASURED_TOKENS)), device=device)


def _floored(logp: Tensor) -> Tensor:
    """At least the floor. Looking first is far cheaper than a copy of the whole, which is hardly ever needed."""
    if logp.numel() and logp.detach().amin() >= LOGPROB_FLOOR:
        return logp
    return logp.clamp(min=LOGPROB_FLOOR)


def _with_tail(logp: Tensor) -> Tensor:
    """[N, k] to [N, k + 1]. The mass that is left is at least 1e-7: where less is left, the tail stays finite, at
    log 1e-7, and has no gradient."""
    inside = logp.logsumexp(-1, keepdim=True).clamp(max=-_TAIL_EPSILON)
    return torch.cat([logp, (-torch.expm1(inside)).log()], dim=-1)


def _renormalised(logp: Tensor) -> Tensor:
    return logp - logp.logsumexp(-1, keepdim=True)


def _at(logits: Tensor, ids: Tensor | None, normalizer: Tensor | None = None) -> Tensor | None:
    if ids is None:
        return None
    chosen = logits.detach().gather(-1, ids[:, None])
    return _floored(chosen if normalizer is None else chosen - normalizer.detach()).squeeze(-1)


def _overlap(other: Tensor, indices: Tensor) -> Tensor:
    rows = spaced(len(indices), other.device)
    other, indices = other[rows], indices[rows]
    bar = other.topk(indices.shape[-1], dim=-1).values[:, -1:]
    return (other.gather(-1, indices) >= bar).float().mean(-1)
