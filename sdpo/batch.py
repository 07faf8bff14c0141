"""Examples to tensors: token-budgeted micro-batches in which each distinct prompt stands once.

A group's rollouts share the student's prompt, and siblings with the same demonstration share the teacher's, so a prompt
is encoded once for all of them (sdpo.forward). Completion ids are copied verbatim from what was sampled; masks come from
lengths, so a padding token that equals the end token does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdpo.types import Batch, Example, Group, Rows, TeacherContext

__all__ = ["make_examples", "micro_batches", "padding_share", "row_masks", "to_batch"]


def make_examples(
    groups: Sequence[Group],
    contexts: Sequence[Sequence[TeacherContext | None]],
    advantages: Sequence[Sequence[float]],
) -> list[Example]:
    """The graded rollouts of a step with a non-empty completion, as examples."""
    return [
        Example(rollout, None if context is None else context.prompt_ids, advantage, position)
        for position, (group, row, values) in enumerate(zip(groups, contexts, advantages, strict=True))
        for rollout, context, advantage in zip(group.rollouts, row, values, strict=True)
        if rollout.grade is not None and rollout.completion.token_ids
    ]


class _Cells:
    """Padded tokens of a micro-batch while it grows."""

    def __init__(self) -> None:
        self.rows = 0
        self.completion = 0
        self.prompts: tuple[set[tuple[int, ...]], set[tuple[int, ...]]] = (set(), set())

    def add(self, example: Example) -> None:
        self.rows += 1
        self.completion = max(self.completion, len(example.rollout.completion.token_ids))
        self.prompts[0].add(example.rollout.prompt_ids)
        if example.teacher_prompt_ids is not None:
            self.prompts[1].add(example.teacher_prompt_ids)

    def after(self, example: Example) -> int:
        """Cells of the longer side if `example` were added."""
        grown = _Cells()
        grown.rows, grown.completion = self.rows, self.completion
        grown.prompts = (set(self.prompts[0]), set(self.prompts[1]))
        grown.add(example)
        return max(grown.side(0), grown.side(1))

    def side(self, side: int) -> int:
        prompts = self.prompts[side]
        return len(prompts) * max(map(len, prompts), default=0) + self.rows * self.completion


def micro_batches(examples: Sequence[Example], budget: int) -> list[list[int]]:
    """Positions of the examples, ordered so that like lengths meet, cut so that the padded tokens of the longer side stay
    within `budget`.

    Where prompts are longer than completions, groups stay together, for the shared prompt saves more than the padding
    costs. A single row longer than the budget is a micro-batch of its own.
    """
    prompts = sum(len(e.rollout.prompt_ids) for e in examples)
    together = prompts > sum(len(e.rollout.completion.token_ids) for e in examples)

    def key(i: int) -> tuple[int, ...]:
        e = examples[i]
        prompt, completion = len(e.rollout.prompt_ids), len(e.rollout.completion.token_ids)
        return (prompt, e.group, completion, i) if together else (prompt + completion, i)

    batches: list[list[int]] = []
    cells = _Cells()
    for i in sorted(range(len(examples)), key=key):
        if not batches or cells.after(examples[i]) > budget:
            batches.append([])
            cells = _Cells()
        batches[-1].append(i)
        cells.add(examples[i])
    return batches


def padding_share(examples: Sequence[Example], batches: Sequence[Sequence[int]]) -> float:
    """Share of padded cells in the student's rows."""
    cells = used = 0
    for rows in batches:
        count = _Cells()
        for i in rows:
            count.add(examples[i])
            used += len(examples[i].rollout.completion.token_ids)
        cells += count.side(0)
        used += sum(map(len, count.prompts[0]))
    return 1 - used / cells if cells else 0.0


def row_masks(examples: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For counting, without any ids: mask [B, T], has_context [B], success [B]."""
    lengths = torch.tensor([len(e.rollout.completion.token_ids) for e in examples], device=device)
    width = int(lengths.max()) if len(examples) else 0
    mask = (torch.arange(width, device=device)[None] < lengths[:, None]).float()
    has_context = torch.tensor([e.teacher_prompt_ids is not None for e in examples], device=device, dtype=torch.bool)
    success = torch.tensor([e.rollout.success for e in examples], device=device, dtype=torch.bool)
    return mask, has_context, success


def _padded(rows: Sequence[Sequence[int]], width: int, pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, where] = torch.tensor(list(row), dtype=torch.long)
        mask[i, where] = 1
    return ids, mask


def _rows(
    prompts: Sequence[tuple[int, ...]], completions: Sequence[Sequence[int]], width: int, pad: int, device: torch.device
) -> Rows:
    distinct = {prompt: u for u, prompt in enumerate(dict.fromkeys(prompts))}
    prompt_ids, prompt_mask = _padded(list(distinct), max(map(len, distinct)), pad, left=True)
    completion_ids, completion_mask = _padded(completions, width, pad, left=False)
    which = torch.tensor([distinct[prompt] for prompt in prompts])
    return Rows(*(t.to(device) for t in (prompt_ids, prompt_mask, which, completion_ids, completion_mask)))


def to_batch(examples: Sequence[Example], rows: Sequence[int], pad: int, device: torch.device) -> Batch:
    """The micro-batch of the examples at `rows`.

    Args:
        pad: what padded cells hold.
    """
    chosen = [examples[i] for i in rows]
    completions = [e.rollout.completion.token_ids for e in chosen]
    width = max(map(len, completions))
    taught = [b for b, e in enumerate(chosen) if e.teacher_prompt_ids is not None]
    teacher = None
    if taught:
        prompts = [chosen[b].teacher_prompt_ids or () for b in taught]
        teacher = _rows(prompts, [completions[b] for b in taught], width, pad, device)
    mask, has_context, success = row_masks(chosen, device)
    sampled = [e.rollout.completion.logprobs for e in chosen]
    logprobs = None
    if all(values is not None for values in sampled):
        logprobs = torch.zeros(len(chosen), width)
        for row, values in enumerate(sampled):
            logprobs[row, : len(values or ())] = torch.tensor(values)
        logprobs = logprobs.to(device)
    return Batch(
        student=_rows([e.rollout.prompt_ids for e in chosen], completions, width, pad, device),
        teacher=teacher,
        teacher_rows=torch.tensor(taught, dtype=torch.long, device=device),
        mask=mask,
        has_context=has_context,
        success=success,
        advantages=torch.tensor([e.advantage for e in chosen], device=device),
        sampler_logprobs=logprobs,
    )
