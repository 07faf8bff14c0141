"""Sample routing, verifier-anchored re-weighting, and the mix of advantages, against their papers' formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo.loss import (
    anchored_advantages,
    distillation_loss,
    entropy_weights,
    policy_gradient_loss,
    route,
    token_logprobs,
)
from tests.unit.loss.test_divergence import gradient, logits


def test_routing_table() -> None:
    success = torch.tensor([True, True, False, False])
    has_context = torch.tensor([True, False, True, False])
    assert route(success, has_context).tolist() == [False, False, True, False]


def test_entropy_weights_are_the_exponential_of_minus_the_entropy() -> None:
    """Uniform over n tokens: 1 / n. Certain: 1."""
    assert entropy_weights(torch.zeros(2, 3, 8)).tolist() == [[pytest.approx(1 / 8)] * 3] * 2
    certain = torch.tensor([0.0, -math.inf, -math.inf])
    assert entropy_weights(certain).item() == pytest.approx(1.0)
    z = torch.tensor([0.7, 0.3]).log()
    assert entropy_weights(z).item() == pytest.approx(0.7**0.7 * 0.3**0.3, abs=1e-6)
    assert entropy_weights(z, temperature=0.5).item() > entropy_weights(z).item()


def test_routed_loss_reproduces_the_formula_by_hand() -> None:
    """Three rows of two tokens: one success, one failure with a context, one without; the last has one token.

    L = (sum over policy tokens of -A + sum over distilled tokens of w D) / 5
    w = exp(-H) / mean over the distilled tokens of exp(-H)
    """
    success, has_context = torch.tensor([True, False, False]), torch.tensor([True, True, False])
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    advantages = torch.tensor([0.75, -0.25, -0.25])
    teacher = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log().expand(3, 2, 2)
    student = torch.tensor([0.25, 0.75]).log().expand(3, 2, 2)
    logp = token_logprobs(student, torch.zeros(3, 2, dtype=torch.long))

    to_teacher = route(success, has_context)
    distilled, policy = mask * to_teacher[:, None], mask * ~to_teacher[:, None]
    raw = entropy_weights(teacher)
    weights = raw / ((raw * distilled).sum() / distilled.sum())
    routed = distilled.sum() + policy.sum()
    loss = (
        policy_gradient_loss(logp, logp, advantages, policy, normalizer=routed).loss
        + distillation_loss(
            student, teacher, distilled, divergence="forward_kl", weights=weights, normalizer=routed
        ).loss
    )

    exp_h = [0.5, 0.9**0.9 * 0.1**0.1]
    mean = sum(exp_h) / 2
    kl = [
        0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75),
        0.9 * math.log(0.9 / 0.25) + 0.1 * math.log(0.1 / 0.75),
    ]
    by_hand = (-2 * 0.75 + 0.25 + sum(h / mean * d for h, d in zip(exp_h, kl, strict=True))) / 5
    assert loss.item() == pytest.approx(by_hand, abs=1e-6)
    assert (weights * distilled).sum().item() == pytest.approx(2.0, abs=1e-6)


GAPS = torch.tensor([[0.0, math.log(1.1), math.log(0.9), 3.0, -3.0]])


@pytest.mark.parametrize(
    ("advantage", "mix", "factors"),
    [
        (2.0, 1.0, [1.0, 1.1, 0.9, 1.2, 0.8]),
        (-2.0, 1.0, [1.0, 1 / 1.1, 1 / 0.9, 0.8, 1.2]),
        (2.0, 0.5, [1.0, 1.05, 0.95, 1.1, 0.9]),
        (2.0, 0.0, [1.0] * 5),
        (0.0, 1.0, [1.0] * 5),
    ],
)
def test_anchored_advantages_by_hand(advantage: float, mix: float, factors: list[float]) -> None:
    """A larger teacher probability strengthens a reward and softens a penalty, within 1 +- .2."""
    logp = torch.full((1, 5), -2.0)
    got = anchored_advantages(torch.tensor([advantage]), logp, logp + GAPS, clip=0.2, mix=mix)
    torch.testing.assert_close(got, advantage * torch.tensor([factors]))


def test_anchored_loss_has_the_gradient_of_equation_17() -> None:
    """-A_t * grad log p_t on policy: a trainable log-probability, with the re-weighted advantage held fixed."""
    z, teacher = logits(2, 3, 5).requires_grad_(), logits(2, 3, 5, seed=1)
    ids = torch.tensor([[0, 1, 2], [3, 4, 0]])
    advantages = torch.tensor([0.5, -0.5], dtype=torch.float64)
    logp = token_logprobs(z, ids)
    a = anchored_advantages(advantages, logp, token_logprobs(teacher, ids), clip=0.2)
    assert not a.requires_grad
    assert not torch.equal(a, advantages[:, None].expand(2, 3))
    out = policy_gradient_loss(logp, logp.detach(), a, torch.ones(2, 3))
    expected = gradient(-(a * token_logprobs(z, ids)).mean(), z)
    torch.testing.assert_close(gradient(out.loss, z), expected)


@given(st.floats(-5, 5, allow_subnormal=False), st.floats(0, 0.99), st.floats(0, 1), st.integers(0, 9999))
@settings(max_examples=100, deadline=None)
def test_the_teacher_never_turns_the_verifiers_sign_nor_leaves_the_band(
    advantage: float, clip: float, mix: float, seed: int
) -> None:
    a = torch.tensor([advantage], dtype=torch.float64)
    got = anchored_advantages(a, logits(1, 6, seed=seed), logits(1, 6, seed=seed + 1), clip=clip, mix=mix)
    factor = (got / a[:, None]).nan_to_num(1.0)
    assert ((factor - 1).abs() <= mix * clip + 1e-9).all()
    assert (factor > 0).all()


@pytest.mark.parametrize("choice", [{"clip": 1.0}, {"clip": -0.1}, {"mix": 1.1}, {"mix": -0.1}])
def test_anchored_refusals(choice: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(choice))} = "):
        anchored_advantages(torch.ones(1), torch.zeros(1, 2), torch.zeros(1, 2), **choice)


def test_on_policy_mixing_losses_is_mixing_advantages_at_token_level() -> None:
    """A = .9 A_GRPO + .1 A_SDPO, A_SDPO = log T - log S of the sampled token (2601.20802, Sec. 4)."""
    student, teacher = logits(2, 3, 5), logits(2, 3, 5, seed=1)
    ids, mask = torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.ones(2, 3)
    grpo = torch.tensor([0.5, -0.5], dtype=torch.float64)
    mix = 0.9

    z = student.clone().requires_grad_()
    logp = token_logprobs(z, ids)
    mixed_losses = mix * policy_gradient_loss(logp, logp.detach(), grpo, mask).loss
    mixed_losses = (
        mixed_losses
        + (1 - mix)
        * distillation_loss(z, teacher, mask, divergence="reverse_kl", granularity="token", token_ids=ids).loss
    )
    of_losses = gradient(mixed_losses, z)

    z = student.clone().requires_grad_()
    logp = token_logprobs(z, ids)
    mixed = mix * grpo[:, None] + (1 - mix) * (token_logprobs(teacher, ids) - logp.detach())
    of_advantages = gradient(policy_gradient_loss(logp, logp.detach(), mixed, mask).loss, z)
    torch.testing.assert_close(of_losses, of_advantages)


def test_on_policy_mixing_losses_is_mixing_advantages_at_logit_level() -> None:
    """In expectation over the sampled token: sum_v p_v A(v) grad log p_v, A(v) = .9 R(v) + .1 (log T_v - log S_v), with
    a reward R(v) for each token."""
    student, teacher = logits(1, 1, 6), logits(1, 1, 6, seed=1)
    rewards, mask, mix = logits(6, seed=2), torch.ones(1, 1), 0.9

    z = student.clone().requires_grad_()
    p = student.softmax(-1)[0, 0]
    loss = (1 - mix) * distillation_loss(z, teacher, mask, divergence="reverse_kl").loss
    for v in range(6):
        logp = token_logprobs(z, torch.tensor([[v]]))
        loss = loss + mix * p[v] * policy_gradient_loss(logp, logp.detach(), rewards[v : v + 1], mask).loss
    of_losses = gradient(loss, z)

    z = student.clone().requires_grad_()
    logp = z.log_softmax(-1)
    advantages = mix * rewards + (1 - mix) * (teacher.log_softmax(-1) - logp.detach())
    of_advantages = gradient(-(p * advantages * logp).sum(), z)
    torch.testing.assert_close(of_losses, of_advantages)
