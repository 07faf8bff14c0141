"""Sampled-token and sequence estimators, importance clip, token clip, advantage clip."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpo.loss import distillation_loss, token_logprobs
from tests.unit.loss import twin
from tests.unit.loss.test_divergence import gradient, logits

ONES = torch.ones(2, 3)
IDS = torch.tensor([[0, 1, 2], [3, 0, 1]])
REVERSE: dict[str, Any] = {"divergence": "reverse_kl"}


def grad_of(student: Tensor, teacher: Tensor, mask: Tensor = ONES, **choice: Any) -> Tensor:
    z = student.clone().requires_grad_()
    return gradient(distillation_loss(z, teacher, mask, **choice).loss, z)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_invariant_6_the_sampled_token_gradient_has_the_expectation_of_the_reverse_kl(temperature: float) -> None:
    """Exactly: the average over the whole vocabulary, each token weighted by the probability of sampling it."""
    student, teacher = logits(2, 3, 7), logits(2, 3, 7, seed=1)
    expected = torch.zeros_like(student)
    for token in range(7):
        ids = torch.full((2, 3), token)
        p = (student / temperature).softmax(-1)[..., token]
        # p is constant: it weighs each position's own gradient
        expected += grad_of(
            student,
            teacher,
            **REVERSE,
            granularity="token",
            token_ids=ids,
            temperature=temperature,
            weights=p,
        )
    torch.testing.assert_close(expected, grad_of(student, teacher, **REVERSE, temperature=temperature))


def test_token_form_equals_its_formula() -> None:
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    out = distillation_loss(student, teacher, ONES, **REVERSE, granularity="token", token_ids=IDS)
    gaps = []
    for b in range(2):
        for t in range(3):
            s, q = (twin.logprob(z[b, t], int(IDS[b, t])) for z in (student, teacher))
            assert out.per_token[b, t].item() == pytest.approx((s - q) * s)
            gaps.append(q - s)
    assert out.metrics["distillation/teacher_gap"].item() == pytest.approx(sum(gaps) / 6, abs=1e-6)
    assert out.metrics["distillation/divergence"].item() == pytest.approx(-sum(gaps) / 6, abs=1e-6)


def test_token_gradient_raises_what_the_teacher_prefers() -> None:
    student = torch.zeros(1, 1, 3)
    teacher = torch.tensor([[[2.0, 0.0, 0.0]]])
    got = grad_of(student, teacher, torch.ones(1, 1), **REVERSE, granularity="token", token_ids=torch.tensor([[0]]))
    assert got[0, 0, 0] < 0 < got[0, 0, 1]


def test_sequence_form_gives_every_token_of_a_row_the_mean_advantage_of_its_counted_tokens() -> None:
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    z = student.clone().requires_grad_()
    out = distillation_loss(z, teacher, mask, **REVERSE, granularity="sequence", token_ids=IDS)
    got = gradient(out.loss, z)
    z = student.clone().requires_grad_()
    s, q = z.log_softmax(-1), teacher.log_softmax(-1)
    expected = torch.zeros((), dtype=torch.float64)
    for row, columns in ((0, (0, 1)), (1, (2,))):
        gaps = [(q[row, t, IDS[row, t]] - s[row, t, IDS[row, t]]).item() for t in columns]
        for t in columns:
            expected = expected - sum(gaps) / len(gaps) * s[row, t, IDS[row, t]] / 3
    assert out.loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(got, gradient(expected, z))


def test_on_rows_of_one_token_sequence_and_token_agree() -> None:
    student, teacher, ids = logits(4, 1, 5), logits(4, 1, 5, seed=1), torch.tensor([[0], [1], [2], [3]])
    mask = torch.ones(4, 1)
    token, sequence = (
        grad_of(student, teacher, mask, **REVERSE, granularity=g, token_ids=ids) for g in ("token", "sequence")
    )
    torch.testing.assert_close(token, sequence)


@pytest.mark.parametrize("granularity", ["logit", "token", "sequence"])
def test_importance_ratio_is_truncated_from_above_only_and_detached(granularity: Any) -> None:
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    now = token_logprobs(student, IDS)
    log_ratio = torch.tensor([[0.0, math.log(1.5), math.log(3.0)], [math.log(0.1), 50.0, -50.0]])
    choice: dict[str, Any] = {**REVERSE, "granularity": granularity, "token_ids": IDS}
    plain = distillation_loss(student, teacher, ONES, **choice).per_token
    z = student.clone().requires_grad_()
    out = distillation_loss(z, teacher, ONES, **choice, old_logprobs=now - log_ratio, is_clip=2.0)
    factors = torch.tensor([[1.0, 1.5, 2.0], [0.1, 2.0, math.exp(-20.0)]], dtype=torch.float64)
    torch.testing.assert_close(out.per_token, plain * factors, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(
        gradient(out.loss, z), grad_of(student, teacher, **choice, weights=factors), rtol=1e-6, atol=1e-12
    )
    assert out.totals["distillation/is_clip_fraction"] == (2.0, 6.0)


def test_temperature_enters_the_importance_ratio_on_both_sides() -> None:
    """Temperature .6 and the same weights: every ratio is 1."""
    student, teacher = logits(2, 3, 5).float(), logits(2, 3, 5, seed=1).float()
    for k in (None, 2):
        out = distillation_loss(
            student,
            teacher,
            ONES,
            top_k=k,
            token_ids=IDS,
            old_logprobs=token_logprobs(student, IDS, 0.6),
            is_clip=1.0001,
            temperature=0.6,
        )
        assert out.metrics["distillation/is_ratio"].item() == pytest.approx(1.0, abs=1e-5)
        assert out.metrics["distillation/is_clip_fraction"].item() == 0


def test_weights_multiply_and_are_detached() -> None:
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    weights = logits(2, 3, seed=2).abs().requires_grad_()
    plain = distillation_loss(student, teacher, ONES)
    z = student.clone().requires_grad_()
    out = distillation_loss(z, teacher, ONES, weights=weights)
    torch.testing.assert_close(out.per_token, plain.per_token * weights.detach())
    assert out.metrics["distillation/divergence"].item() == pytest.approx(
        plain.metrics["distillation/divergence"].item()
    )
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert weights.grad is None


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "js"])
def test_token_clip_bounds_the_divergence_and_stops_the_gradient_beyond(kind: Any) -> None:
    student, teacher = logits(1, 6, 5), logits(1, 6, 5, seed=1)
    mask = torch.ones(1, 6)
    plain = distillation_loss(student, teacher, mask, divergence=kind).per_token
    bound = plain.median().item()
    z = student.clone().requires_grad_()
    out = distillation_loss(z, teacher, mask, divergence=kind, token_clip=bound)
    torch.testing.assert_close(out.per_token, plain.clamp(max=bound))
    got = gradient(out.loss, z)
    beyond = plain > bound
    assert beyond.sum() == 3
    assert torch.equal(got[beyond], torch.zeros(3, 5, dtype=torch.float64))
    torch.testing.assert_close(got[~beyond], grad_of(student, teacher, mask, divergence=kind)[~beyond])
    assert out.metrics["distillation/token_clip_fraction"].item() == 0.5
    assert out.metrics["distillation/divergence"].item() == pytest.approx(plain.mean().item(), rel=1e-6)


@pytest.mark.parametrize("name", ["token_clip", "advantage_clip"])
@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_at_the_other_granularities_both_clips_bound_the_advantage(name: str, granularity: Any) -> None:
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    choice: dict[str, Any] = {**REVERSE, "granularity": granularity, "token_ids": IDS}
    s, q = token_logprobs(student, IDS), token_logprobs(teacher, IDS)
    gap = q - s if granularity == "token" else (q - s).mean(1, keepdim=True).expand(2, 3)
    bound = gap.abs().min().item() * 1.01
    out = distillation_loss(student, teacher, ONES, **{**choice, name: bound})
    torch.testing.assert_close(out.per_token, -gap.clamp(-bound, bound) * s)
    assert out.totals["distillation/advantage_clip_fraction"][0] == (gap.abs() > bound).sum().item()
    tighter = distillation_loss(student, teacher, ONES, **choice, token_clip=bound, advantage_clip=bound / 2)
    torch.testing.assert_close(tighter.per_token, -gap.clamp(-bound / 2, bound / 2) * s)


@pytest.mark.parametrize(
    "support", [{}, {"top_k": 3}, {"top_k": 3, "tail": False}, {"top_k": 3, "top_k_from": "teacher"}]
)
def test_an_advantage_clip_that_clips_nothing_leaves_value_and_gradient_of_the_reverse_kl(
    support: dict[str, Any],
) -> None:
    student, teacher = logits(2, 3, 7), logits(2, 3, 7, seed=1)
    plain = distillation_loss(student, teacher, ONES, **REVERSE, **support)
    out = distillation_loss(student, teacher, ONES, **REVERSE, **support, advantage_clip=100.0)
    assert out.loss.item() == pytest.approx(plain.loss.item())
    torch.testing.assert_close(
        grad_of(student, teacher, **REVERSE, **support, advantage_clip=100.0),
        grad_of(student, teacher, **REVERSE, **support),
    )
    assert out.metrics["distillation/advantage_clip_fraction"].item() == 0


def test_a_clipped_advantage_is_the_policy_gradient_with_bounded_advantages() -> None:
    student, teacher, mask = logits(1, 1, 6), logits(1, 1, 6, seed=1), torch.ones(1, 1)
    p = student.softmax(-1)
    advantage = teacher.log_softmax(-1) - student.log_softmax(-1)
    bound = advantage.abs().median().item()
    assert 0 < (advantage.abs() > bound).sum() < 5
    bounded = advantage.clamp(-bound, bound)
    z = student.clone().requires_grad_()
    out = distillation_loss(z, teacher, mask, **REVERSE, advantage_clip=bound)
    torch.testing.assert_close(gradient(out.loss, z), -p * (bounded - (p * bounded).sum(-1, keepdim=True)))
    assert out.loss.item() == pytest.approx(-(p * bounded).sum().item())
    clipped_mass = p[advantage.abs() > bound].sum().item()
    assert out.metrics["distillation/advantage_clip_fraction"].item() == pytest.approx(clipped_mass, rel=1e-6)
    full = distillation_loss(student, teacher, mask, **REVERSE)
    assert out.metrics["distillation/divergence"].item() == pytest.approx(full.loss.item(), rel=1e-6)


def test_totals_add_up_over_micro_batches() -> None:
    student, teacher = logits(4, 3, 9), logits(4, 3, 9, seed=1)
    mask, ids = (logits(4, 3, seed=2) > -1).float(), torch.arange(12).view(4, 3) % 9
    choice: dict[str, Any] = {**REVERSE, "top_k": 3, "advantage_clip": 0.5, "token_clip": 1.0, "is_clip": 1.2}
    old = token_logprobs(student, ids) + logits(4, 3, seed=3, scale=0.3)

    def totals(rows: slice) -> dict[str, tuple[float, float]]:
        return distillation_loss(
            student[rows], teacher[rows], mask[rows], **choice, token_ids=ids[rows], old_logprobs=old[rows]
        ).totals

    whole, parts = totals(slice(None)), [totals(slice(0, 1)), totals(slice(1, 4))]
    assert len(whole) == 11
    for name, (total, count) in whole.items():
        assert total == pytest.approx(sum(part[name][0] for part in parts), rel=1e-5), name
        assert count == sum(part[name][1] for part in parts) == mask.sum().item(), name
