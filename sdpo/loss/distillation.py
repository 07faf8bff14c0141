"""Distillation of the self-teacher into the policy, token by token on the policy's own rollouts.

    L = sum_t r_t w_t D_t / normalizer

D_t compares the next-token distributions at position t (granularity "logit"), or only the sampled token ("token"), or
only that token's average over the sequence ("sequence"); r_t is the truncated importance ratio, w_t a detached weight.

Two bounds tame outliers, and they differ in what becomes of the outlier. `token_clip` bounds D_t from above
(2601.18734): a token beyond it has zero gradient, so the few style tokens with the largest divergence cannot take over
the update. `advantage_clip` bounds the policy-gradient advantage log T_v - log S_v (2601.20802, Table 12): a clipped
entry still pulls, with bounded force. It exists for the reverse KL, the only divergence here that is a policy gradient.

Not here: the sequence gradient's "future KL" term, which the paper found to bring nothing (App. A.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sdpo.loss.arguments import Granularity, Side, check_bounds, check_choices, check_needs, check_tensors
from sdpo.loss.divergence import Divergence, clipped_reverse_kl, token_divergence
from sdpo.loss.importance import importance_ratio
from sdpo.loss.logprobs import scaled, token_logprobs
from sdpo.loss.result import LossResult, over_normalizer
from sdpo.loss.support import Support, spaced, support

__all__ = ["DistillationLoss", "distillation_loss"]


@dataclass(frozen=True, slots=True)
class DistillationLoss(LossResult):
    """Names of `metrics` and `totals`, all means over counted tokens before weights and normaliser. Entropies and
    overlap are measured on at most 256 of them, evenly spaced.

    distillation/divergence           D_t before bounds, in nats; at token and sequence granularity the sampled
                                      log S - log T, whose expectation is the reverse KL
    distillation/teacher_gap          log T - log S of the sampled token, in nats; needs token_ids
    distillation/student_entropy      on the support, in nats; with top-k and tail a lower bound of the full one
    distillation/teacher_entropy      likewise
    distillation/student_topk_mass    probability of the k tokens
    distillation/teacher_topk_mass    likewise
    distillation/topk_overlap         share of the k tokens that both sides have among their k likeliest
    distillation/is_ratio             importance ratio before truncation
    distillation/is_clip_fraction     share of tokens whose ratio was truncated
    distillation/token_clip_fraction  share of tokens beyond token_clip
    distillation/advantage_clip_fraction   share of the student's probability mass beyond advantage_clip; of the tokens,
                                           at token and sequence granularity
    """


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence = "js",
    alpha: float = 0.5,
    top_k: int | None = None,
    tail: bool = True,
    top_k_from: Side = "student",
    token_ids: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    is_clip: float | None = None,
    granularity: Granularity = "logit",
    token_clip: float | None = None,
    advantage_clip: float | None = None,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
) -> DistillationLoss:
    """The SDPO and SDFT loss (2601.20802, Eq. 1 and App. A; 2601.19897).

    Only the student gets a gradient. Masked tokens are left out before anything is computed and may hold NaN; without a
    single token the loss is a differentiable 0. Log-probabilities are floored at `LOGPROB_FLOOR`, so a vocabulary entry
    of -inf never makes a NaN: on both sides it contributes 0, on one side a finite amount.

    Args:
        student_logits: [B, T, V]; position t predicts completion token t.
        teacher_logits: [B, T, V] under the teacher's context, at the same completion tokens.
        mask: [B, T], not 0 on completion tokens that count.
        divergence: "forward_kl" KL(teacher || student), "reverse_kl" KL(student || teacher), or "js", the generalised
            Jensen-Shannon divergence; see `token_divergence`.
        alpha: js: weight of the teacher in the mixture, in (0, 1).
        top_k: compare on the k likeliest tokens of `top_k_from`; None compares the full vocabulary.
        tail: with top_k: one more outcome holds the rest of the mass; otherwise both sides are renormalised.
        top_k_from: "student" or "teacher".
        token_ids: [B, T] sampled ids; needed by is_clip and by the granularities "token" and "sequence".
        old_logprobs: [B, T] of the sampled tokens under the policy before the step; needed by is_clip.
        is_clip: r_t = min(p / p_old, is_clip) of the sampled token, detached, not truncated from below; None: r_t = 1.
        granularity: "logit": D_t over the support. "token": D_t = stop_gradient(log S - log T) * log S of the sampled
            token, whose expected gradient is that of the full reverse KL. "sequence": the same with log S - log T
            replaced by its mean over the row's counted tokens. The last two need reverse_kl and no top_k, and only the
            gradient of their D_t has a meaning.
        token_clip: upper bound on D_t; beyond it the gradient is zero. At the other granularities, where D_t is no
            divergence, it bounds |log S - log T| instead, as advantage_clip does.
        advantage_clip: reverse_kl only: bound on |log T - log S|, per vocabulary entry, token or sequence, held fixed;
            see `clipped_reverse_kl`.
        weights: [B, T] detached factors: aggregation, rollout correction, routing.
        normalizer: what the sum is divided by; None: the number of counted tokens. Give that of the whole optimiser
            batch and the gradient does not depend on micro-batches.
        temperature: divides the student's logits first: the sampling temperature.
        teacher_temperature: divides the teacher's; None: as the student's.

    Raises:
        ConfigError: a ValueError for arguments that contradict each other or shapes that do not fit.
    """
    check_choices(divergence, alpha, granularity, top_k, top_k_from)
    check_bounds(divergence, is_clip=is_clip, token_clip=token_clip, advantage_clip=advantage_clip)
    check_needs(granularity, is_clip, token_ids, old_logprobs)
    check_tensors(student_logits, teacher_logits, mask, token_ids=token_ids, old_logprobs=old_logprobs, weights=weights)
    counted = mask != 0
    index = counted.flatten().nonzero().squeeze(-1)
    student = scaled(_rows(student_logits, index), temperature)
    teacher = scaled(
        _rows(teacher_logits.detach(), index), temperature if teacher_temperature is None else teacher_temperature
    )
    ids = None if token_ids is None else token_ids.flatten()[index]
    if granularity == "logit":
        pair = support(student, teacher, token_ids=ids, top_k=top_k, top_k_from=top_k_from, tail=tail)
        values, sums = _on_distributions(pair, divergence, alpha, token_clip, advantage_clip)
        sampled = pair.student_sampled
    else:
        assert ids is not None
        bound = min((c for c in (token_clip, advantage_clip) if c is not None), default=None)
        rows = index // mask.shape[1] if granularity == "sequence" else None
        values, sampled, sums = _on_samples(student, teacher, ids, rows, mask.shape[0], bound)
    if is_clip is not None:
        assert sampled is not None
        assert old_logprobs is not None
        ratio = importance_ratio(sampled - old_logprobs.detach().flatten()[index])
        values = values * ratio.clamp(max=is_clip)
        sums |= {"is_ratio": _total(ratio), "is_clip_fraction": _total(ratio > is_clip)}
    if weights is not None:
        values = values * weights.detach().flatten()[index]
    per_token = values.new_zeros(mask.numel()).index_copy(0, index, values).view(mask.shape)
    loss = over_normalizer(per_token, counted, normalizer)
    return DistillationLoss(loss, per_token, {f"distillation/{name}": pair for name, pair in sums.items()})


_Sums = dict[str, tuple[Tensor, Tensor]]


def _rows(logits: Tensor, index: Tensor) -> Tensor:
    """[B, T, V] to [N, V]; a view when every position counts."""
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if len(index) == len(flat) else flat.index_select(0, index)


def _total(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count of values that are one for each token."""
    values = values.detach().float()
    return values.sum(), values.new_tensor(float(values.numel()))


def _on_distributions(
    pair: Support, kind: Divergence, alpha: float, token_clip: float | None, advantage_clip: float | None
) -> tuple[Tensor, _Sums]:
    """D_t [N] from whole distributions."""
    student, teacher = pair.student, pair.teacher
    sums: _Sums = {}
    if advantage_clip is None:
        values = token_divergence(student, teacher, kind, alpha)
        sums["divergence"] = _total(values)
    else:
        values, clipped_mass = clipped_reverse_kl(student, teacher, advantage_clip)
        sums["divergence"] = _total(token_divergence(student.detach(), teacher, kind))
        sums["advantage_clip_fraction"] = _total(clipped_mass)
    if token_clip is not None:
        sums["token_clip_fraction"] = _total(values > token_clip)
        values = values.clamp(max=token_clip)
    measured = spaced(len(values), values.device)
    for side, logp in (("student", student.detach()[measured]), ("teacher", teacher[measured])):
        sums[f"{side}_entropy"] = _total(-torch.linalg.vecdot(logp.exp(), logp))
    if pair.student_mass is not None and pair.teacher_mass is not None and pair.overlap is not None:
        sums["student_topk_mass"], sums["teacher_topk_mass"] = _total(pair.student_mass), _total(pair.teacher_mass)
        sums["topk_overlap"] = _total(pair.overlap)
    if pair.student_sampled is not None and pair.teacher_sampled is not None:
        sums["teacher_gap"] = _total(pair.teacher_sampled - pair.student_sampled)
    return values, sums


def _on_samples(
    student: Tensor, teacher: Tensor, ids: Tensor, rows: Tensor | None, size: int, bound: float | None
) -> tuple[Tensor, Tensor, _Sums]:
    """D_t [N] from the sampled tokens, and their log-probabilities, detached.

    `rows` [N] says to which of `size` sequences each token belongs, for one advantage a sequence; None: one a token.
    """
    logp = token_logprobs(student, ids)
    advantage = token_logprobs(teacher, ids) - logp.detach()
    sums: _Sums = {"divergence": _total(-advantage), "teacher_gap": _total(advantage)}
    if rows is not None:
        total = advantage.new_zeros(size).index_add(0, rows, advantage)
        count = advantage.new_zeros(size).index_add(0, rows, torch.ones_like(advantage))
        advantage = (total / count.clamp(min=1))[rows]
    if bound is not None:
        sums["advantage_clip_fraction"] = _total(advantage.abs() > bound)
        advantage = advantage.clamp(-bound, bound)
    return -advantage * logp, logp.detach(), sums
