"""Examples to tensors: invariant 1, alignment, micro-batches."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo.batch import make_examples, micro_batches, padding_share, to_batch
from sdpo.types import Completion, Example, Failure, Grade, Group, Message, Rollout, Rows, Task, TeacherContext

CPU = torch.device("cpu")


def example(prompt: int, completion: int, teacher: int | None, group: int = 0, base: int = 10) -> Example:
    ids = tuple(range(base, base + completion))
    rollout = Rollout(
        "t",
        0,
        tuple(range(100, 100 + prompt)),
        Completion("x", ids, tuple(-0.1 * (i + 1) for i in range(completion))),
        Grade(1.0, success=True),
    )
    taught = None if teacher is None else tuple(range(200, 200 + teacher))
    return Example(rollout, taught, 0.5, group)


shapes = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.none() | st.integers(1, 20)), min_size=1, max_size=12
)


@given(shapes, st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_invariant_1_completion_ids_are_those_sampled_on_both_sides(
    rows: list[tuple[int, int, int | None]], budget: int
) -> None:
    examples = [example(p, c, t, base=10 + i) for i, (p, c, t) in enumerate(rows)]
    cuts = micro_batches(examples, budget)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(examples)))
    for cut in cuts:
        batch = to_batch(examples, cut, pad=0, device=CPU)
        width = batch.mask.shape[1]
        chosen = [examples[i] for i in cut]
        check(batch.student, [e.rollout.prompt_ids for e in chosen], chosen, width)
        taught = [e for e in chosen if e.teacher_prompt_ids is not None]
        assert batch.teacher_rows.tolist() == [b for b, e in enumerate(chosen) if e.teacher_prompt_ids is not None]
        if batch.teacher is None:
            assert not taught
        else:
            check(batch.teacher, [e.teacher_prompt_ids or () for e in taught], taught, width)
        for b, e in enumerate(chosen):
            n = len(e.rollout.completion.token_ids)
            assert batch.mask[b].tolist() == [1.0] * n + [0.0] * (width - n)


def check(rows: Rows, prompts: list[tuple[int, ...]], examples: list[Example], width: int) -> None:
    """Every row, prompt and completion joined by its masks, is exactly what was sampled."""
    assert rows.completion_ids.shape[1] == width
    assert len(rows.prompt_ids) == len(set(prompts)), "each distinct prompt stands once"
    for r, (prompt, e) in enumerate(zip(prompts, examples, strict=True)):
        u = rows.which[r]
        assert rows.prompt_ids[u][rows.prompt_mask[u].bool()].tolist() == list(prompt)
        assert rows.prompt_mask[u].tolist() == sorted(rows.prompt_mask[u].tolist()), "padded on the left"
        ids = rows.completion_ids[r][rows.completion_mask[r].bool()].tolist()
        assert ids == list(e.rollout.completion.token_ids)
        n = len(ids)
        assert rows.completion_mask[r].tolist() == [1] * n + [0] * (width - n), "padded on the right"


@given(shapes, st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_micro_batches_stay_within_the_budget_by_the_longer_row(
    rows: list[tuple[int, int, int | None]], budget: int
) -> None:
    examples = [example(*row) for row in rows]
    for cut in micro_batches(examples, budget):
        batch = to_batch(examples, cut, pad=0, device=CPU)
        sides = [batch.student] + ([batch.teacher] if batch.teacher is not None else [])
        cells = max(s.prompt_ids.numel() + s.completion_ids.numel() for s in sides)
        assert cells <= budget or len(cut) == 1


def test_padding_share_is_counted_exactly() -> None:
    examples = [example(2, 2, None), example(4, 4, None)]
    assert padding_share(examples, [[0, 1]]) == 1 - 12 / 16
    assert padding_share([example(4, 4, None), example(4, 2, None)], [[0, 1]]) == 1 - 10 / 12, "one prompt for both"
    assert padding_share(examples, [[0], [1]]) == 0


def test_padding_token_equal_to_the_end_token_masks_nothing() -> None:
    end = 13
    batch = to_batch([example(3, 4, 5), example(3, 2, 5)], [0, 1], pad=end, device=CPU)
    assert batch.student.completion_ids[0].tolist() == [10, 11, 12, end]
    assert batch.mask.sum() == 6


def test_missing_logprobs_of_one_rollout_leave_none_for_the_batch() -> None:
    silent = Rollout("t", 1, (1,), Completion("x", (5,)), Grade(0.0, success=False))
    assert to_batch([example(1, 2, None)], [0], 0, CPU).sampler_logprobs is not None
    assert to_batch([example(1, 2, None), Example(silent, None, 0.0, 0)], [0, 1], 0, CPU).sampler_logprobs is None


def test_ungraded_and_empty_rollouts_are_no_examples() -> None:
    task = Task("t", (Message(role="user", content="q"),))
    rollouts = (
        Rollout("t", 0, (1,), Completion("x", (5,)), Grade(0.0, success=False)),
        Rollout("t", 1, (1,), Completion("x", (5,)), failure=Failure("sandbox", "down")),
        Rollout("t", 2, (1,), Completion("", ()), Grade(0.0, success=False)),
    )
    context = TeacherContext((), (7, 8), None, True)
    examples = make_examples([Group(task, rollouts)], [[context, context, context]], [[0.1, 0.2, 0.3]])
    assert [(e.rollout.index, e.teacher_prompt_ids, e.advantage) for e in examples] == [(0, (7, 8), 0.1)]
