"""Shared prompts: the same logits and gradients as one row at a time.

Tolerances are those of float32: rotary positions and norms are computed in it whatever the model's type.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo.batch import to_batch
from sdpo.forward import completion_logits
from sdpo.types import Completion, Example, Grade, Rollout
from tests.conftest import tiny_model

CPU = torch.device("cpu")
PROMPTS = ((5, 6, 7), (9,), (20, 21, 22, 23, 24, 25))


def examples(rows: list[tuple[int, int]]) -> list[Example]:
    """(which prompt, completion length)."""
    return [
        Example(Rollout("t", i, PROMPTS[p], Completion("", tuple(range(30 + i, 30 + i + n))), Grade(1.0)), None, 0.0, p)
        for i, (p, n) in enumerate(rows)
    ]


def alone(model: Any, e: Example) -> torch.Tensor:
    prompt, ids = e.rollout.prompt_ids, e.rollout.completion.token_ids
    out: torch.Tensor = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return out


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=7))
@settings(max_examples=25, deadline=None)
def test_logits_and_gradients_equal_those_of_single_rows(rows: list[tuple[int, int]]) -> None:
    model = tiny_model(64).double().train()
    made = examples(rows)
    batch = to_batch(made, range(len(made)), pad=0, device=CPU)
    out = completion_logits(model, batch.student)
    assert out.shape[:2] == batch.mask.shape
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    (out * weights * batch.mask[..., None]).sum().backward()
    shared = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = torch.zeros((), dtype=out.dtype)
    for b, e in enumerate(made):
        n = len(e.rollout.completion.token_ids)
        single = alone(model, e)
        torch.testing.assert_close(out[b, :n], single, rtol=1e-5, atol=1e-6)
        total = total + (single * weights[b, :n]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    for a, p in zip(shared, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_changes_nothing(checkpointing: bool) -> None:
    model = tiny_model(64).double().train()
    batch = to_batch(examples([(0, 3), (0, 5), (1, 2)]), range(3), pad=0, device=CPU)
    expected = completion_logits(model, batch.student).detach()
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    out = completion_logits(model, batch.student)
    counted = batch.mask.bool()
    torch.testing.assert_close(out[counted], expected[counted])
    out.sum().backward()


def test_other_weights_take_the_place_of_the_modules_own() -> None:
    model, other = tiny_model(64, seed=0), tiny_model(64, seed=1)
    batch = to_batch(examples([(0, 3), (0, 5), (2, 2)]), range(3), pad=0, device=CPU)
    expected = completion_logits(other, batch.student)
    out = completion_logits(model, batch.student, dict(other.named_parameters()))
    torch.testing.assert_close(out[batch.mask.bool()], expected[batch.mask.bool()])
