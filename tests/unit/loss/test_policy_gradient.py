"""GRPO's clipped loss, GSPO's ratio, dual clip, KL to the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo.loss import aggregation_count, aggregation_weights, policy_gradient_loss
from tests.unit.loss.test_divergence import gradient, logits


def naive(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    sequence: bool,
    dual: float | None,
    ref: Tensor | None,
    kl: float,
) -> float:
    """Token mean, token by token."""
    total, count = 0.0, 0
    for b in range(mask.shape[0]):
        at = [t for t in range(mask.shape[1]) if mask[b, t]]
        log_ratios = [(logp[b, t] - old[b, t]).item() for t in at]
        for t, log_ratio in zip(at, log_ratios, strict=True):
            r = math.exp(sum(log_ratios) / len(at) if sequence else log_ratio)
            a = advantages[b, t].item()
            gain = min(r * a, min(max(r, 1 - low), 1 + high) * a)
            if dual is not None and a < 0:
                gain = max(gain, dual * a)
            total -= gain
            if ref is not None:
                d = (ref[b, t] - logp[b, t]).item()
                total += kl * (math.exp(d) - d - 1)
            count += 1
    return total / max(1, count)


@given(
    st.booleans(),
    st.none() | st.floats(1.01, 4),
    st.floats(0, 0.9),
    st.floats(0, 3),
    st.floats(0, 1),
    st.booleans(),
    st.integers(0, 9999),
)
@settings(max_examples=150, deadline=None)
def test_equals_the_naive_twin(
    sequence: bool, dual: float | None, low: float, high: float, kl: float, by_token: bool, seed: int
) -> None:
    logp, old, ref = (-logits(3, 4, seed=seed + i, scale=1.0).abs() for i in range(3))
    mask = (logits(3, 4, seed=seed + 3) > -0.5).float()
    advantages = logits(3, 4, seed=seed + 4) if by_token else logits(3, seed=seed + 4)
    out = policy_gradient_loss(
        logp,
        old,
        advantages,
        mask,
        clip_low=low,
        clip_high=high,
        importance="sequence" if sequence else "token",
        dual_clip=dual,
        ref_logprobs=ref,
        kl_coef=kl,
    )
    per_token = advantages if by_token else advantages[:, None].expand(3, 4)
    expected = naive(logp, old, per_token, mask, low=low, high=high, sequence=sequence, dual=dual, ref=ref, kl=kl)
    assert out.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


RATIOS = torch.tensor([[1.0, 1.2, 1.5, 0.9, 0.5]])
CLIPPED_UP = [1.0, 1.2, 1.28, 0.9, 0.5]
CLIPPED_DOWN = [1.0, 1.2, 1.5, 0.9, 0.8]


@pytest.mark.parametrize(("advantage", "factors"), [(2.0, CLIPPED_UP), (-2.0, CLIPPED_DOWN)])
def test_hand_computed_clipping_and_where_the_gradient_stops(advantage: float, factors: list[float]) -> None:
    """Clip .2/.28. A held token has no gradient; elsewhere it is -ratio * A."""
    logp = RATIOS.log().requires_grad_()
    out = policy_gradient_loss(logp, torch.zeros(1, 5), torch.tensor([advantage]), torch.ones(1, 5))
    torch.testing.assert_close(out.per_token, -advantage * torch.tensor([factors]))
    held = torch.tensor([factors]) != RATIOS
    expected = torch.where(held, 0.0, -advantage * RATIOS / 5)
    torch.testing.assert_close(gradient(out.loss, logp), expected)
    side = "policy/clip_high_fraction" if advantage > 0 else "policy/clip_low_fraction"
    for name in ("policy/clip_high_fraction", "policy/clip_low_fraction"):
        assert out.metrics[name].item() == pytest.approx(0.2 if name == side else 0.0)


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    logp = -logits(2, 3).abs()
    z = logp.clone().requires_grad_()
    out = policy_gradient_loss(z, logp, torch.tensor([1.0, -0.5]), torch.ones(2, 3), clip_low=0.0, clip_high=0.0)
    expected = -torch.tensor([[1.0] * 3, [-0.5] * 3], dtype=torch.float64) / 6
    torch.testing.assert_close(gradient(out.loss, z), expected)
    assert out.metrics["policy/ratio"].item() == 1
    assert out.metrics["policy/approx_kl"].item() == pytest.approx(0)
    assert out.metrics["policy/active_fraction"].item() == 1


def test_dual_clip_bounds_the_loss_of_bad_tokens_whose_ratio_explodes() -> None:
    logp = torch.tensor([[math.log(10.0), math.log(2.0)]]).requires_grad_()
    args = (torch.zeros(1, 2), torch.tensor([-1.0]), torch.ones(1, 2))
    out = policy_gradient_loss(logp, *args, dual_clip=3.0)
    torch.testing.assert_close(out.per_token, torch.tensor([[3.0, 2.0]]))
    torch.testing.assert_close(gradient(out.loss, logp), torch.tensor([[0.0, 1.0]]))
    assert out.metrics["policy/dual_clip_fraction"].item() == 0.5
    torch.testing.assert_close(policy_gradient_loss(logp, *args).per_token, torch.tensor([[10.0, 2.0]]))


def test_sequence_importance_has_the_gradient_of_gspo() -> None:
    """-1/n sum_i min(s_i A_i, clip(s_i) A_i), s_i = exp(mean of the row's log-ratios), differentiated directly."""
    logp, old = -logits(3, 4, scale=0.3).abs(), -logits(3, 4, seed=1, scale=0.3).abs()
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    z = logp.clone().requires_grad_()
    s = (((z - old) * mask).sum(1) / mask.sum(1)).exp()
    direct = -torch.minimum(s * advantages, s.clamp(0.8, 1.28) * advantages).mean()
    expected = gradient(direct, z)
    z = logp.clone().requires_grad_()
    out = policy_gradient_loss(
        z,
        old,
        advantages,
        mask,
        importance="sequence",
        weights=aggregation_weights(mask, "sequence_mean"),
        normalizer=aggregation_count(mask, "sequence_mean"),
    )
    assert out.loss.item() == pytest.approx(direct.item(), rel=1e-6)
    torch.testing.assert_close(gradient(out.loss, z), expected, rtol=1e-6, atol=1e-9)
    assert expected.abs().max() > 0.01


def test_kl_to_the_reference_is_k3_with_its_exact_gradient() -> None:
    logp, ref = -logits(2, 3).abs(), -logits(2, 3, seed=1).abs()
    z = logp.clone().requires_grad_()
    out = policy_gradient_loss(z, logp, torch.zeros(2), torch.ones(2, 3), ref_logprobs=ref, kl_coef=0.1)
    d = ref - logp
    assert out.loss.item() == pytest.approx(0.1 * (d.exp() - d - 1).mean().item())
    torch.testing.assert_close(gradient(out.loss, z), 0.1 * (1 - d.exp()) / 6)
    assert out.metrics["policy/reference_kl"].item() == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-6)
    assert out.metrics["policy/active_fraction"].item() == 0


def test_weights_and_normaliser() -> None:
    logp, weights = -logits(2, 3).abs(), logits(2, 3, seed=1).abs()
    plain = policy_gradient_loss(logp, logp, torch.ones(2), torch.ones(2, 3))
    out = policy_gradient_loss(logp, logp, torch.ones(2), torch.ones(2, 3), weights=weights, normalizer=4)
    torch.testing.assert_close(out.per_token, plain.per_token * weights)
    assert out.loss.item() == pytest.approx((plain.per_token * weights).sum().item() / 4)


def test_only_the_policy_gets_a_gradient() -> None:
    logp, old, ref, weights, advantages = (logits(2, 3, seed=i, scale=0.1).requires_grad_() for i in range(5))
    out = policy_gradient_loss(
        logp, old, advantages, torch.ones(2, 3), ref_logprobs=ref, kl_coef=0.1, weights=weights, dual_clip=3.0
    )
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert [t.grad for t in (old, ref, weights, advantages)] == [None] * 4


@pytest.mark.parametrize("importance", ["token", "sequence"])
def test_invariant_4_masked_tokens_do_not_count_whatever_they_hold(importance: Any) -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    tensors = [-logits(2, 3, seed=i).abs() for i in range(5)]

    def run(rows: slice, columns: slice, poison: float | None) -> tuple[Any, Tensor]:
        logp, old, advantages, ref, weights = (t.clone() for t in tensors)
        if poison is not None:
            for t in (logp, old, advantages, ref, weights):
                t[mask == 0] = poison
        z = logp[rows, columns].clone().requires_grad_()
        out = policy_gradient_loss(
            z,
            old[rows, columns],
            advantages[rows, columns],
            mask[rows, columns],
            importance=importance,
            dual_clip=3.0,
            ref_logprobs=ref[rows, columns],
            kl_coef=0.1,
            weights=weights[rows, columns],
        )
        return out, gradient(out.loss, z)

    alone, expected = run(slice(0, 1), slice(0, 2), None)
    for poison in (math.nan, math.inf, -math.inf):
        out, got = run(slice(None), slice(None), poison)
        assert out.loss.item() == pytest.approx(alone.loss.item(), rel=1e-12)
        torch.testing.assert_close(got[:1, :2], expected)
        assert torch.equal(got[mask == 0], torch.zeros(4, dtype=torch.float64))
        for name, pair in alone.totals.items():
            assert out.totals[name] == pytest.approx(pair), name


def test_invariant_4_without_a_token_the_loss_is_a_differentiable_zero() -> None:
    logp = torch.full((2, 3), math.nan, requires_grad=True)
    for importance in ("token", "sequence"):
        out = policy_gradient_loss(logp, logp, torch.ones(2), torch.zeros(2, 3), importance=importance)
        assert out.loss.item() == 0
        assert torch.equal(gradient(out.loss, logp), torch.zeros(2, 3))
        assert all(value.item() == 0 for value in out.metrics.values())


def test_exploding_ratios_stay_finite() -> None:
    logp = torch.tensor([[0.0, -2000.0]]).requires_grad_()
    old = torch.tensor([[-2000.0, 0.0]])
    for advantage in (1.0, -1.0):
        out = policy_gradient_loss(logp, old, torch.tensor([advantage]), torch.ones(1, 2))
        assert torch.isfinite(out.loss)
        assert torch.isfinite(gradient(out.loss, logp)).all()


def test_half_precision_is_widened() -> None:
    logp = -logits(1, 3).abs().bfloat16()
    out = policy_gradient_loss(logp, logp, torch.ones(1), torch.ones(1, 3))
    assert out.loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"importance": "row"}, "unknown importance 'row'"),
        ({"clip_low": 1.5}, "clip_low = 1.5"),
        ({"clip_high": -0.1}, "clip_high = -0.1"),
        ({"dual_clip": 1.0}, "dual_clip = 1.0"),
        ({"kl_coef": 0.1}, "needs ref_logprobs"),
    ],
)
def test_refusals(choice: dict[str, Any], named: str) -> None:
    z = torch.zeros(1, 2)
    with pytest.raises(ValueError) as caught:
        policy_gradient_loss(z, z, torch.ones(1), torch.ones(1, 2), **choice)
    assert named in str(caught.value)


def test_advantages_of_the_wrong_shape_are_refused() -> None:
    z = torch.zeros(2, 3)
    for shape in ((3,), (1, 3), (2, 1)):
        with pytest.raises(ValueError, match="do not fit"):
            policy_gradient_loss(z, z, torch.ones(shape), torch.ones(2, 3))
