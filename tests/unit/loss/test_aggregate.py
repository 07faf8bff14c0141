"""Aggregation: formulas, and invariance to how rows are cut into micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo.loss import (
    aggregation_count,
    aggregation_weights,
    distillation_loss,
    policy_gradient_loss,
    token_logprobs,
)
from tests.unit.loss.test_divergence import gradient, logits

MODES = ("token_mean", "sequence_mean", "constant")
VALUES = torch.tensor([[1.0, 2.0, 3.0], [5.0, 7.0, 0.0], [0.0, 0.0, 0.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token_mean", (6 + 5) / 4), ("sequence_mean", (2 + 5) / 2), ("constant", (6 + 5) / (2 * 10))],
)
def test_hand_computed(mode: Any, expected: float) -> None:
    weights, count = aggregation_weights(MASK, mode, 10), aggregation_count(MASK, mode, 10)
    assert ((weights * VALUES).sum() / count).item() == pytest.approx(expected)
    assert torch.equal(weights[MASK == 0], torch.zeros(5))


def test_the_mask_says_which_rows_are_in_the_denominator() -> None:
    """Reference code: rows without a context stay in the denominator; the mean of sequence means over all n rows."""
    has_context = torch.tensor([True, False, True])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    values = torch.tensor([[3.0, 3.0, 6.0], [9.0, 9.0, 9.0], [2.0, 0.0, 0.0]])
    target = mask * has_context[:, None]
    weighted = (aggregation_weights(target, "sequence_mean") * values).sum()
    assert (weighted / aggregation_count(mask, "sequence_mean")).item() == pytest.approx((4 + 0 + 2) / 3)
    assert (weighted / aggregation_count(target, "sequence_mean")).item() == pytest.approx((4 + 2) / 2)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        aggregation_weights(MASK, "mean")  # type: ignore[arg-type]
    for function in (aggregation_weights, aggregation_count):
        with pytest.raises(ValueError, match="needs max_length"):
            function(MASK, "constant")


rows_and_cuts = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 4), min_size=n, max_size=n),
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
    )
)


@given(
    rows_and_cuts, st.sampled_from(MODES), st.sampled_from(("distillation", "sequence", "policy")), st.integers(0, 99)
)
@settings(max_examples=150, deadline=None)
def test_invariant_8_no_partition_into_micro_batches_changes_loss_or_gradient(
    drawn: tuple[list[int], list[int]], mode: Any, kind: str, seed: int
) -> None:
    """Row i has `lengths[i]` tokens and goes to micro-batch `places[i]`, cut to the longest completion there. Logits
    come from one shared parameter, whose gradient is accumulated."""
    lengths, places = drawn
    n, width, vocabulary = len(lengths), 4, 5
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).double()
    teacher = logits(n, width, vocabulary, seed=seed)
    features, ids = logits(n, width, 3, seed=seed + 1), torch.arange(n * width).view(n, width) % vocabulary
    head = logits(3, vocabulary, seed=seed + 2)
    advantages, old = logits(n, seed=seed + 3), -logits(n, width, seed=seed + 4).abs()
    total = aggregation_count(mask, mode, 8)

    def part(parameter: Tensor, rows: list[int]) -> Tensor:
        longest = max(1, int(mask[rows].sum(1).max()))
        at = (torch.tensor(rows)[:, None], torch.arange(longest)[None])
        z, weights = features[at] @ parameter, aggregation_weights(mask[at], mode, 8)
        if kind == "policy":
            logp = token_logprobs(z, ids[at])
            return policy_gradient_loss(
                logp, old[at], advantages[rows], mask[at], importance="sequence", weights=weights, normalizer=total
            ).loss
        extra: dict[str, Any] = {"top_k": 2}
        if kind == "sequence":
            extra = {"divergence": "reverse_kl", "granularity": "sequence"}
        return distillation_loss(
            z,
            teacher[at],
            mask[at],
            token_ids=ids[at],
            old_logprobs=old[at],
            is_clip=2.0,
            weights=weights,
            normalizer=total,
            **extra,
        ).loss

    whole = head.clone().requires_grad_()
    loss = part(whole, list(range(n)))
    expected = gradient(loss, whole)
    pieces = head.clone().requires_grad_()
    summed, counted = 0.0, 0.0
    for place in set(places):
        rows = [i for i in range(n) if places[i] == place]
        piece = part(pieces, rows)
        piece.backward()  # type: ignore[no-untyped-call]
        summed += piece.item()
        counted += aggregation_count(mask[rows], mode, 8).item()
    assert counted == total.item()
    assert summed == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    assert pieces.grad is not None
    torch.testing.assert_close(pieces.grad, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_invariant_4_a_row_without_a_token_changes_nothing(mode: Any) -> None:
    empty = torch.zeros(1, 3)
    assert aggregation_count(empty, mode, 10).item() == 0
    assert torch.equal(aggregation_weights(empty, mode, 10), empty)
    assert torch.isfinite(aggregation_weights(torch.zeros(2, 0), mode, 10)).all()
