"""Masks, -inf, NaN, half precision: what must not break a loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpo.loss import LOGPROB_FLOOR, distillation_loss
from tests.unit.loss.test_divergence import EACH, KINDS, gradient, logits

INF = math.inf
IDS = torch.tensor([[0, 1, 2], [3, 0, 1]])
SAMPLED: tuple[dict[str, Any], ...] = tuple(
    {"divergence": "reverse_kl", "granularity": g, "token_ids": IDS} for g in ("token", "sequence")
)
ALL_FORMS: list[dict[str, Any]] = [
    *({"divergence": kind, **support} for kind, support in EACH),
    {"divergence": "reverse_kl", "advantage_clip": 5.0, "top_k": 3},
    {"divergence": "reverse_kl", "advantage_clip": 5.0},
    *SAMPLED,
]


def named(form: dict[str, Any]) -> str:
    return "-".join(str(v) for k, v in form.items() if k != "token_ids")


@pytest.mark.parametrize("form", ALL_FORMS, ids=named)
def test_invariant_4_without_a_token_the_loss_is_a_differentiable_zero(form: dict[str, Any]) -> None:
    student = logits(2, 3, 5).requires_grad_()
    out = distillation_loss(
        student,
        torch.full((2, 3, 5), math.nan),
        torch.zeros(2, 3),
        **{**form, "token_ids": IDS},
        old_logprobs=torch.zeros(2, 3),
        is_clip=2.0,
        weights=torch.full((2, 3), math.nan),
    )
    assert out.loss.item() == 0
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert torch.equal(student.grad, torch.zeros_like(student))
    assert all(math.isfinite(value.item()) for value in out.metrics.values())
    assert all(pair == (0.0, 0.0) for pair in out.totals.values())


def test_invariant_4_a_normaliser_of_zero_counts_as_one_and_others_are_kept() -> None:
    student, teacher = logits(1, 2, 5), logits(1, 2, 5, seed=1)
    empty = distillation_loss(student, teacher, torch.zeros(1, 2), normalizer=torch.tensor(0.0))
    assert empty.loss.item() == 0
    total = distillation_loss(student, teacher, torch.ones(1, 2), normalizer=1).loss
    half = distillation_loss(student, teacher, torch.ones(1, 2), normalizer=0.5).loss
    assert half.item() == pytest.approx(2 * total.item())


@pytest.mark.parametrize("form", ALL_FORMS, ids=named)
def test_invariant_4_masked_tokens_leave_loss_normaliser_and_gradient_whatever_they_hold(form: dict[str, Any]) -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    old, weights = logits(2, 3, seed=2, scale=0.1) - 1, logits(2, 3, seed=3).abs()
    form = {**form, "token_ids": IDS}

    def run(rows: slice, columns: slice, *, poison: bool) -> tuple[Any, Tensor]:
        z, t, o, w = student.clone(), teacher.clone(), old.clone(), weights.clone()
        ids = IDS.clone()
        if poison:
            out_of_mask = mask == 0
            z[out_of_mask], t[out_of_mask], o[out_of_mask], w[out_of_mask] = math.nan, INF, math.nan, math.nan
            ids[out_of_mask] = -100
        z = z[rows, columns].clone().requires_grad_()
        args = {**form, "token_ids": ids[rows, columns]}
        out = distillation_loss(
            z,
            t[rows, columns],
            mask[rows, columns],
            **args,
            old_logprobs=o[rows, columns],
            is_clip=1.5,
            weights=w[rows, columns],
        )
        return out, gradient(out.loss, z)

    everything, all_gradients = run(slice(None), slice(None), poison=True)
    alone, gradients = run(slice(0, 1), slice(0, 2), poison=False)
    assert everything.loss.item() == pytest.approx(alone.loss.item(), rel=1e-12)
    torch.testing.assert_close(all_gradients[:1, :2], gradients)
    assert torch.equal(all_gradients[mask == 0], torch.zeros(4, 5, dtype=torch.float64))
    assert torch.equal(everything.per_token[mask == 0], torch.zeros(4, dtype=torch.float64))
    assert everything.totals.keys() == alone.totals.keys()
    for name, pair in alone.totals.items():
        assert everything.totals[name] == pytest.approx(pair), name


@pytest.mark.parametrize("form", ALL_FORMS, ids=named)
@pytest.mark.parametrize("sides", ["both", "teacher", "student", "lowest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_excluded_vocabulary_entries_give_finite_losses_and_gradients(
    form: dict[str, Any], sides: str, dtype: torch.dtype
) -> None:
    student, teacher = logits(2, 3, 5).to(dtype), logits(2, 3, 5, seed=1).to(dtype)
    hole = torch.finfo(dtype).min if sides == "lowest" else -INF
    if sides != "student":
        teacher[..., 3] = hole
    if sides != "teacher":
        student[..., 3] = hole
    student.requires_grad_()
    out = distillation_loss(student, teacher, torch.ones(2, 3), **form)
    assert torch.isfinite(out.per_token).all()
    assert torch.isfinite(gradient(out.loss, student)).all()
    assert all(torch.isfinite(value) for value in out.metrics.values())


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_excluded_on_both_sides_contributes_nothing(kind: Any) -> None:
    student, teacher, mask = logits(1, 2, 5), logits(1, 2, 5, seed=1), torch.ones(1, 2)
    expected = distillation_loss(student[..., :4], teacher[..., :4], mask, divergence=kind).loss
    student[..., 4] = teacher[..., 4] = -INF
    for k in (None, 4):
        got = distillation_loss(student, teacher, mask, divergence=kind, top_k=k).loss
        assert got.item() == pytest.approx(expected.item(), abs=1e-7)


def test_reverse_kl_to_a_teacher_that_excludes_a_token_is_large_and_bounded() -> None:
    student, teacher = torch.zeros(1, 1, 2), torch.tensor([[[0.0, -INF]]])
    loss = distillation_loss(student, teacher, torch.ones(1, 1), divergence="reverse_kl").loss
    assert loss.item() == pytest.approx(0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - LOGPROB_FLOOR))
    js = distillation_loss(student, teacher, torch.ones(1, 1)).loss
    assert 0 < js.item() < math.log(2)


def test_a_wide_but_finite_gap_is_not_cut() -> None:
    """Student uniform over 4 tokens, teacher -200 at one of them: 1/4 * 200 + log(1/4) + log(3), nearly."""
    teacher = torch.tensor([[[0.0, 0.0, 0.0, -200.0]]])
    loss = distillation_loss(torch.zeros(1, 1, 4), teacher, torch.ones(1, 1), divergence="reverse_kl").loss
    assert loss.item() == pytest.approx(50 + math.log(3 / 4), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tail_is_floored_at_log_1e_7_and_has_no_gradient_there(dtype: torch.dtype) -> None:
    """The student is sure of token 0, whose top-1 leaves less than 1e-7; the teacher gives it one half."""
    student = torch.tensor([[[60.0, 0.0, 0.0]]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[[math.log(2.0), 0.0, 0.0]]], dtype=dtype)
    out = distillation_loss(student, teacher, torch.ones(1, 1), divergence="forward_kl", top_k=1)
    expected = 0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - math.log(1e-7))
    assert out.loss.item() == pytest.approx(expected, abs=1e-5)
    assert gradient(out.loss, student).abs().max().item() < 1e-7


@pytest.mark.parametrize("form", ALL_FORMS, ids=named)
def test_half_precision_is_widened_before_anything_is_computed(form: dict[str, Any]) -> None:
    student = (8 * logits(2, 3, 5)).bfloat16().requires_grad_()
    teacher = (8 * logits(2, 3, 5, seed=1)).bfloat16()
    out = distillation_loss(student, teacher, torch.ones(2, 3), temperature=0.7, **form)
    wide = distillation_loss(student.float(), teacher.float(), torch.ones(2, 3), temperature=0.7, **form)
    assert out.loss.dtype == out.per_token.dtype == torch.float32
    assert torch.equal(out.loss, wide.loss)
    assert gradient(out.loss, student).dtype == torch.bfloat16


def test_large_logits_do_not_overflow() -> None:
    choices: list[dict[str, Any]] = [{"divergence": d, "top_k": k} for d in KINDS for k in (None, 2)]
    for choice in choices:
        student = (1e4 * torch.tensor([[[1.0, -1.0, 0.5]]])).requires_grad_()
        out = distillation_loss(student, -student.detach(), torch.ones(1, 1), **choice)
        assert torch.isfinite(out.loss)
        assert torch.isfinite(gradient(out.loss, student)).all()


def test_the_mask_may_be_of_any_type() -> None:
    student, teacher = logits(1, 3, 5), logits(1, 3, 5, seed=1)
    mask = torch.tensor([[1, 0, 1]])
    losses = {
        distillation_loss(student, teacher, mask.to(d)).loss.item() for d in (torch.bool, torch.long, torch.float)
    }
    assert len(losses) == 1


def test_logits_need_not_be_contiguous() -> None:
    student, teacher = logits(2, 6, 5), logits(2, 6, 5, seed=1)
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
    got = distillation_loss(student[:, -4:-1], teacher[:, 2:5], mask).loss
    expected = distillation_loss(student[:, 2:5].contiguous(), teacher[:, 2:5].contiguous(), mask).loss
    assert torch.equal(got, expected)
