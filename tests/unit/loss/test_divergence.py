"""Values and gradients of the divergences on every support."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo.loss import distillation_loss, token_divergence
from tests.unit.loss import twin

KINDS = ("forward_kl", "reverse_kl", "js")
SUPPORTS: tuple[dict[str, Any], ...] = (
    {"top_k": None},
    *(
        {"top_k": k, "tail": tail, "top_k_from": side}
        for k, tail, side in itertools.product((1, 3), (True, False), ("student", "teacher"))
    ),
)
EACH = [(kind, support) for kind in KINDS for support in SUPPORTS]


def logits(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of)[0]


def test_hand_computed_values() -> None:
    """Teacher p = [.7, .3], student q = [.4, .6]."""
    teacher, student = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.4, 0.6]).log()
    forward = 0.7 * math.log(7 / 4) + 0.3 * math.log(1 / 2)
    reverse = 0.4 * math.log(4 / 7) + 0.6 * math.log(2)
    assert forward == pytest.approx(0.183787, abs=1e-6)
    assert reverse == pytest.approx(0.192042, abs=1e-6)
    middle = 0.5 * (0.4 * math.log(0.4 / 0.55) + 0.6 * math.log(0.6 / 0.45))
    middle += 0.5 * (0.7 * math.log(0.7 / 0.55) + 0.3 * math.log(0.3 / 0.45))
    assert token_divergence(student, teacher, "forward_kl").item() == pytest.approx(forward, abs=1e-6)
    assert token_divergence(student, teacher, "reverse_kl").item() == pytest.approx(reverse, abs=1e-6)
    assert token_divergence(student, teacher, "js", 0.5).item() == pytest.approx(middle, abs=1e-6)
    # alpha weighs the teacher: mixture .75 * [.4, .6] + .25 * [.7, .3] = [.475, .525]
    quarter = 0.75 * (0.4 * math.log(0.4 / 0.475) + 0.6 * math.log(0.6 / 0.525))
    quarter += 0.25 * (0.7 * math.log(0.7 / 0.475) + 0.3 * math.log(0.3 / 0.525))
    assert token_divergence(student, teacher, "js", 0.25).item() == pytest.approx(quarter, abs=1e-6)


def test_js_vanishes_at_its_ends_in_proportion_to_the_kls() -> None:
    student, teacher = logits(50, 6, scale=1.0).log_softmax(-1), logits(50, 6, seed=1, scale=1.0).log_softmax(-1)
    near_zero = token_divergence(student, teacher, "js", 0.001)
    near_one = token_divergence(student, teacher, "js", 0.999)
    torch.testing.assert_close(near_zero / 0.001, token_divergence(student, teacher, "forward_kl"), rtol=0.02, atol=0)
    torch.testing.assert_close(near_one / 0.001, token_divergence(student, teacher, "reverse_kl"), rtol=0.02, atol=0)


@pytest.mark.parametrize(("kind", "support"), EACH)
def test_invariant_9_equals_the_naive_float64_form(kind: str, support: dict[str, Any]) -> None:
    student, teacher = logits(3, 5, 11), logits(3, 5, 11, seed=1)
    mask = (logits(3, 5, seed=2) > -1).float()
    choice = {"divergence": kind, "alpha": 0.3, **support}
    expected, per_token = twin.distillation(student, teacher, mask, **choice)
    out = distillation_loss(student, teacher, mask, **choice)
    assert out.loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(out.per_token, torch.from_numpy(per_token), rtol=1e-9, atol=1e-12)
    single = distillation_loss(student.float(), teacher.float(), mask, **choice)
    assert single.loss.item() == pytest.approx(expected, rel=2e-5, abs=1e-7)


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(2, 9),
    st.none() | st.integers(1, 12),
    st.booleans(),
    st.sampled_from(("student", "teacher")),
    st.sampled_from(KINDS),
    st.floats(0.02, 0.98),
    st.floats(0.3, 3.0),
    st.none() | st.floats(0.3, 3.0),
    st.integers(0, 10_000),
)
@settings(max_examples=150, deadline=None)
def test_invariant_9_equals_the_naive_float64_form_for_any_shape(
    b: int,
    t: int,
    v: int,
    k: int | None,
    tail: bool,
    side: Any,
    kind: Any,
    alpha: float,
    temperature: float,
    teacher_temperature: float | None,
    seed: int,
) -> None:
    student, teacher = logits(b, t, v, seed=seed), logits(b, t, v, seed=seed + 1)
    mask = (logits(b, t, seed=seed + 2) > 0).long()
    choice: dict[str, Any] = {
        "divergence": kind,
        "alpha": alpha,
        "top_k": k,
        "tail": tail,
        "top_k_from": side,
        "temperature": temperature,
        "teacher_temperature": teacher_temperature,
    }
    expected, _ = twin.distillation(student, teacher, mask, **choice)
    out = distillation_loss(student, teacher, mask, **choice)
    assert out.loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("kind", "support"), EACH)
def test_gradient_equals_finite_differences(kind: Any, support: dict[str, Any]) -> None:
    student, teacher = logits(1, 2, 5).requires_grad_(), logits(1, 2, 5, seed=1)
    mask = torch.ones(1, 2)

    def loss(z: Tensor) -> Tensor:
        return distillation_loss(
            z, teacher, mask, divergence=kind, alpha=0.3, temperature=0.7, teacher_temperature=1.3, **support
        ).loss

    assert torch.autograd.gradcheck(loss, (student,))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_three_tokens_at_two_positions_by_central_differences(kind: Any) -> None:
    student, teacher, mask = logits(1, 2, 3), logits(1, 2, 3, seed=1), torch.ones(1, 2)
    z = student.clone().requires_grad_()
    exact = gradient(distillation_loss(z, teacher, mask, divergence=kind).loss, z)
    for i in range(student.numel()):
        step = torch.zeros(student.numel(), dtype=torch.float64)
        step[i] = 1e-5
        up, down = (
            twin.distillation(student + s * step.view_as(student), teacher, mask, divergence=kind)[0] for s in (1, -1)
        )
        assert exact.flatten()[i].item() == pytest.approx((up - down) / 2e-5, abs=1e-8)


def test_gradient_of_the_forward_kl_is_student_minus_teacher() -> None:
    student, teacher = logits(2, 3, 7).requires_grad_(), logits(2, 3, 7, seed=1)
    mask = torch.ones(2, 3)
    got = gradient(distillation_loss(student, teacher, mask, divergence="forward_kl").loss, student)
    torch.testing.assert_close(got, (student.softmax(-1) - teacher.softmax(-1)).detach() / 6)


def test_top_k_gradient_reaches_tokens_outside_through_the_tail_only_when_there_is_one() -> None:
    student, teacher, mask = logits(1, 1, 8).requires_grad_(), logits(1, 1, 8, seed=1), torch.ones(1, 1)
    outside = student[0, 0].argsort(descending=True)[3:]
    with_tail = gradient(distillation_loss(student, teacher, mask, top_k=3).loss, student)
    without = gradient(distillation_loss(student, teacher, mask, top_k=3, tail=False).loss, student)
    assert with_tail[0, 0, outside].abs().min() > 1e-4
    assert without[0, 0, outside].abs().max() < 1e-12


@pytest.mark.parametrize(("kind", "support"), EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_invariant_5_equal_logits_give_no_loss_and_no_gradient(
    kind: Any, support: dict[str, Any], dtype: torch.dtype
) -> None:
    student = logits(2, 4, 50).to(dtype).requires_grad_()
    out = distillation_loss(student, student, torch.ones(2, 4), divergence=kind, temperature=0.8, **support)
    assert out.loss.abs().item() < 1e-7
    assert gradient(out.loss, student).abs().max().item() < 1e-7


def test_invariant_5_equal_logits_give_no_gradient_from_the_sampled_token() -> None:
    student, ids = logits(2, 4, 50).requires_grad_(), torch.arange(8).view(2, 4)
    for granularity in ("token", "sequence"):
        out = distillation_loss(
            student, student, torch.ones(2, 4), divergence="reverse_kl", granularity=granularity, token_ids=ids
        )
        assert torch.equal(gradient(out.loss, student), torch.zeros_like(student))


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = logits(1, 2, 5).requires_grad_(), logits(1, 2, 5, seed=1).requires_grad_()
    distillation_loss(student, teacher, torch.ones(1, 2), top_k=2).loss.backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert teacher.grad is None
    for kind in ("forward_kl", "reverse_kl", "js"):
        token_divergence(student, teacher, kind).sum().backward()  # type: ignore[no-untyped-call]
        assert teacher.grad is None


@given(st.integers(1, 20), st.sampled_from(KINDS), st.floats(0.05, 0.95), st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_merging_the_rest_into_a_tail_never_raises_the_divergence(k: int, kind: Any, alpha: float, seed: int) -> None:
    student, teacher = logits(1, 6, 20, seed=seed), logits(1, 6, 20, seed=seed + 1)
    mask = torch.ones(1, 6)
    full = distillation_loss(student, teacher, mask, divergence=kind, alpha=alpha).per_token
    cut = distillation_loss(student, teacher, mask, divergence=kind, alpha=alpha, top_k=k).per_token
    assert (cut <= full + 1e-6).all()
    assert (cut >= -1e-9).all()


def test_js_of_close_distributions_keeps_its_precision_in_float32() -> None:
    """Values near 1e-9, far below the rounding of the log-probabilities that go in."""
    student = logits(20, 50).log_softmax(-1).float()
    teacher = (student + 1e-4 * logits(20, 50, seed=1)).log_softmax(-1).float()
    exact = token_divergence(student.double(), teacher.double(), "js", 0.3)
    assert 0 < exact.max() < 1e-8
    torch.testing.assert_close(token_divergence(student, teacher, "js", 0.3).double(), exact, rtol=1e-3, atol=0)


def test_js_is_bounded_by_log_2() -> None:
    student = torch.tensor([[[40.0, 0.0, 0.0]]])
    teacher = torch.tensor([[[0.0, 0.0, 40.0]]])
    out = distillation_loss(student, teacher, torch.ones(1, 1))
    assert out.loss.item() == pytest.approx(math.log(2), abs=1e-6)


def test_top_k_beyond_the_vocabulary_is_the_vocabulary_and_a_tail_of_1e_7() -> None:
    student, teacher, mask = logits(1, 3, 6), logits(1, 3, 6, seed=1), torch.ones(1, 3)
    full = distillation_loss(student, teacher, mask, divergence="reverse_kl").loss
    for k in (6, 100):
        cut = distillation_loss(student, teacher, mask, divergence="reverse_kl", top_k=k).loss
        assert cut.item() == pytest.approx(full.item(), abs=1e-8)


def test_metrics_of_the_support() -> None:
    """Student [.5, .3, .2], teacher [.2, .1, .7]: the two likeliest tokens are {0, 1} and {2, 0}."""
    student, teacher = torch.tensor([[[0.5, 0.3, 0.2]]]).log(), torch.tensor([[[0.2, 0.1, 0.7]]]).log()
    ids = torch.tensor([[2]])
    metrics = distillation_loss(student, teacher, torch.ones(1, 1), top_k=2, token_ids=ids).metrics
    entropy = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    teacher_entropy = -(0.2 * math.log(0.2) + 0.1 * math.log(0.1) + 0.7 * math.log(0.7))
    expected = {
        "distillation/student_topk_mass": 0.8,
        "distillation/teacher_topk_mass": 0.3,
        "distillation/topk_overlap": 0.5,
        "distillation/student_entropy": entropy,
        "distillation/teacher_entropy": teacher_entropy,
        "distillation/teacher_gap": math.log(0.7 / 0.2),
    }
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, abs=1e-6), name
        assert not metrics[name].requires_grad
    from_teacher = distillation_loss(student, teacher, torch.ones(1, 1), top_k=2, top_k_from="teacher").metrics
    assert from_teacher["distillation/student_topk_mass"].item() == pytest.approx(0.7, abs=1e-6)
    assert from_teacher["distillation/topk_overlap"].item() == pytest.approx(0.5)
    assert "distillation/teacher_gap" not in from_teacher


def test_overlap_is_measured_on_evenly_spaced_tokens_when_there_are_many() -> None:
    student = logits(1, 700, 9)
    out = distillation_loss(student, student, torch.ones(1, 700), top_k=4)
    overlap, count = out.totals["distillation/topk_overlap"]
    assert overlap == count
    assert 200 <= count <= 256


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"divergence": "kl"}, "unknown divergence 'kl'"),
        ({"alpha": 0.0}, "alpha = 0.0"),
        ({"alpha": 1.0}, "alpha = 1.0"),
        ({"alpha": 1.5}, "alpha = 1.5"),
        ({"alpha": math.nan}, "alpha = nan"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_k_from": "both"}, "unknown top_k_from 'both'"),
        ({"granularity": "word"}, "unknown granularity 'word'"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"teacher_temperature": -1.0}, "temperature = -1.0"),
        ({"granularity": "token"}, 'not divergence = "js"'),
        ({"granularity": "sequence", "divergence": "forward_kl"}, 'not divergence = "forward_kl"'),
        ({"granularity": "token", "divergence": "reverse_kl"}, "needs token_ids"),
        ({"granularity": "token", "divergence": "reverse_kl", "top_k": 2}, "top_k = 2"),
        ({"is_clip": 2.0}, "needs token_ids and old_logprobs"),
        ({"is_clip": 0.0}, "is_clip = 0.0"),
        ({"token_clip": -1.0}, "token_clip = -1.0"),
        ({"advantage_clip": 5.0}, "advantage_clip needs"),
        ({"weights": torch.ones(3)}, "weights of shape (3,)"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused_in_one_line(choice: dict[str, Any], named: str) -> None:
    student = logits(1, 2, 4)
    with pytest.raises(ValueError) as caught:
        distillation_loss(student, student, torch.ones(1, 2), **choice)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_alpha_is_not_read_outside_js() -> None:
    student = logits(1, 2, 4)
    for kind in ("forward_kl", "reverse_kl"):
        distillation_loss(student, student, torch.ones(1, 2), divergence=kind, alpha=1.0)


def test_vocabularies_of_different_size_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabularies of 100 and 104"):
        distillation_loss(logits(1, 2, 100), logits(1, 2, 104), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"mask of shape \(1, 3\)"):
        distillation_loss(logits(1, 2, 4), logits(1, 2, 4), torch.ones(1, 3))
