"""Log-probabilities, entropies and importance weights from logits."""

from __future__ import annotations

import math

import pytest
import torch

from sdpo.loss import LOGPROB_FLOOR, token_entropy, token_logprobs, truncated_importance_weights
from tests.unit.loss import twin
from tests.unit.loss.test_divergence import gradient, logits


def test_token_logprobs_equal_the_twin_at_any_temperature() -> None:
    z, ids = logits(2, 3, 7), torch.tensor([[0, 3, 6], [1, 1, 5]])
    for temperature in (1.0, 0.6, 2.5):
        got = token_logprobs(z, ids, temperature)
        for b in range(2):
            for t in range(3):
                assert got[b, t].item() == pytest.approx(twin.logprob(z[b, t], int(ids[b, t]), temperature))


def test_token_logprobs_gradient() -> None:
    z, ids = logits(1, 2, 4).requires_grad_(), torch.tensor([[2, 0]])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, 0.7), (z,))


def test_token_logprobs_of_half_precision_are_float32_and_sum_to_one() -> None:
    z = (20 * logits(1, 1, 64)).bfloat16()
    total = sum(token_logprobs(z, torch.tensor([[v]])).exp().item() for v in range(64))
    assert token_logprobs(z, torch.tensor([[0]])).dtype == torch.float32
    assert total == pytest.approx(1.0, abs=1e-5)


def test_an_excluded_token_has_the_floor_and_no_gradient() -> None:
    z = torch.tensor([[[0.0, -math.inf]]], requires_grad=True)
    value = token_logprobs(z, torch.tensor([[1]]))
    assert value.item() == LOGPROB_FLOOR
    assert torch.equal(gradient(value.sum(), z), torch.zeros(1, 1, 2))


def test_entropy_of_known_distributions() -> None:
    assert token_entropy(torch.zeros(2, 3, 8)).shape == (2, 3)
    assert token_entropy(torch.zeros(8)).item() == pytest.approx(math.log(8))
    z = torch.tensor([0.7, 0.3]).log()
    assert token_entropy(z).item() == pytest.approx(-(0.7 * math.log(0.7) + 0.3 * math.log(0.3)), abs=1e-6)
    squared = 0.49 / 0.58
    expected = -(squared * math.log(squared) + (1 - squared) * math.log(1 - squared))
    assert token_entropy(z, 0.5).item() == pytest.approx(expected, abs=1e-6)


def test_entropy_ignores_excluded_entries_and_is_detached() -> None:
    z = torch.tensor([0.0, 0.0, -math.inf, torch.finfo(torch.float32).min], requires_grad=True)
    entropy = token_entropy(z)
    assert entropy.item() == pytest.approx(math.log(2))
    assert not entropy.requires_grad


def test_entropy_does_not_touch_its_input() -> None:
    z = torch.tensor([[3.0, -math.inf, 1.0]])
    before = z.clone()
    token_entropy(z)
    assert torch.equal(z, before)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperatures_that_are_not_positive_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(1, 2), torch.tensor([0]), temperature)
    with pytest.raises(ValueError, match="temperature"):
        token_entropy(torch.zeros(2), temperature)


def test_truncated_importance_weights() -> None:
    """Ratios 1, .5, 4 and two that would overflow: truncated from above at 2, bounded in the exponent, detached."""
    train = torch.tensor([[0.0, math.log(0.5), math.log(4.0), 500.0, -500.0]], requires_grad=True)
    got = truncated_importance_weights(train, torch.zeros(1, 5), 2.0)
    torch.testing.assert_close(got, torch.tensor([[1.0, 0.5, 2.0, 2.0, math.exp(-20.0)]]))
    assert not got.requires_grad
    with pytest.raises(ValueError, match=r"clip = 0\.0"):
        truncated_importance_weights(train, train, 0.0)
