"""Naive float64 twins of the losses, written in the probability domain, position by position, with numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float64]]


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max())
    return np.asarray(e / e.sum())


def kl(p: Array, q: Array) -> float:
    return float(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


def outcomes(p: Array, q: Array, top_k: int | None, tail: bool, source: str) -> tuple[Array, Array]:
    """Student and teacher probabilities on the support."""
    if top_k is None:
        return p, q
    chosen = np.argsort(-(p if source == "student" else q), kind="stable")[:top_k]
    if not tail:
        return p[chosen] / p[chosen].sum(), q[chosen] / q[chosen].sum()
    ends = [np.append(x[chosen], max(1.0 - x[chosen].sum(), -np.expm1(-1e-7))) for x in (p, q)]
    return ends[0], ends[1]


def between(p: Array, q: Array, kind: str, alpha: float) -> float:
    if kind == "forward_kl":
        return kl(q, p)
    if kind == "reverse_kl":
        return kl(p, q)
    m = (1 - alpha) * p + alpha * q
    return (1 - alpha) * kl(p, m) + alpha * kl(q, m)


def distillation(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    divergence: str = "js",
    alpha: float = 0.5,
    top_k: int | None = None,
    tail: bool = True,
    top_k_from: str = "student",
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
) -> tuple[float, Array]:
    """Loss (mean over the mask) and per-token values at the granularity "logit"."""
    out = np.zeros(mask.shape)
    for b, t in np.ndindex(*mask.shape):
        if mask[b, t]:
            p = softmax(student[b, t].double().numpy() / temperature)
            q = softmax(teacher[b, t].double().numpy() / (teacher_temperature or temperature))
            out[b, t] = between(*outcomes(p, q, top_k, tail, top_k_from), divergence, alpha)
    return float(out.sum() / max(1, int((mask != 0).sum()))), out


def logprob(logits: Tensor, token: int, temperature: float = 1.0) -> float:
    return float(np.log(softmax(logits.double().numpy() / temperature)[token]))
