"""Examples to tensors: token-budgeted micro-batches whose completions sit in the same columns on both sides.

    student row   [pad pad | prompt          | completion | pad]
    teacher row   [pad | teacher's prompt    | completion | pad]

Completion ids are copied verbatim from what was sampled; masks come from lengths, so a padding token that equals the end
token does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdpo.types import Batch, Example, Group, TeacherContext

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


def _lengths(example: Example) -> tuple[int, int]:
    """Tokens of the longer prompt, and of the completion."""
    prompt = max(len(example.rollout.prompt_ids), len(example.teacher_prompt_ids or ()))
    return prompt, len(example.rollout.completion.token_ids)


def micro_batches(examples: Sequence[Example], budget: int) -> list[list[int]]:
    """Positions of the examples, sorted by length and cut so that rows * padded width stays within `budget` tokens.

    A single row longer than the budget is a micro-batch of its own.
    """
    order = sorted(range(len(examples)), key=lambda i: (sum(_lengths(examples[i])), i))
    batches: list[list[int]] = []
    widest = (0, 0)
    for i in order:
        prompt, completion = _lengths(examples[i])
        widest = max(widest[0], prompt), max(widest[1], completion)
        if batches and (len(batches[-1]) + 1) * sum(widest) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
            widest = prompt, completion
    return batches


def padding_share(examples: Sequence[Example], batches: Sequence[Sequence[int]]) -> float:
    """Share of padded cells in the student's rows."""
    cells = used = 0
    for rows in batches:
        width = max(len(examples[i].rollout.prompt_ids) for i in rows)
        width += max(len(examples[i].rollout.completion.token_ids) for i in rows)
        cells += width * len(rows)
        used += sum(len(examples[i].rollout.prompt_ids) + len(examples[i].rollout.completion.token_ids) for i in rows)
    return 1 - used / cells if cells else 0.0


def row_masks(examples: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For counting, without any ids: mask [B, T], has_context [B], success [B]."""
    lengths = torch.tensor([len(e.rollout.completion.token_ids) for e in examples], device=device)
    width = int(lengths.max()) if len(examples) else 0
    mask = (torch.arange(width, device=device)[None] < lengths[:, None]).float()
    has_context = torch.tensor([e.teacher_prompt_ids is not None for e in examples], device=device, dtype=torch.bool)
    success = torch.tensor([e.rollout.success for e in examples], device=device, dtype=torch.bool)
    return mask, has_context, success


def _rows(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, ...]:
    """ids, mask, positions: [B, P + T], prompts padded on the left and completions on the right."""
    before, after = max(map(len, prompts)), max(map(len, completions))
    ids = torch.full((len(prompts), before + after), pad)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = before - len(prompt), before + len(completion)
        ids[row, start:end] = torch.tensor([*prompt, *completion])
        mask[row, start:end] = 1
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def to_batch(examples: Sequence[Example], rows: Sequence[int], pad: int, device: torch.device) -> Batch:
    """The micro-batch of the examples at `rows`.

    Args:
        pad: what padded cells hold.
    """
    chosen = [examples[i] for i in rows]
    completions = [e.rollout.completion.token_ids for e in chosen]
    student = _rows([e.rollout.prompt_ids for e in chosen], completions, pad)
    taught = [b for b, e in enumerate(chosen) if e.teacher_prompt_ids is not None]
    teacher: Sequence[Tensor | None] = (None, None, None)
    mask, has_context, success = row_masks(chosen, torch.device("cpu"))
    width = mask.shape[1]
    if taught:
        prompts = [chosen[b].teacher_prompt_ids or () for b in taught]
        ids, attend, positions = _rows(prompts, [completions[b] for b in taught], pad)
        missing = width - max(len(completions[b]) for b in taught)
        if missing:  # the longest completion of the micro-batch has no context: keep the columns aligned
            ids = torch.nn.functional.pad(ids, (0, missing), value=pad)
            attend = torch.nn.functional.pad(attend, (0, missing))
            positions = (attend.cumsum(1) - 1).clamp(min=0)
        teacher = (ids.to(device), attend.to(device), positions.to(device))
    sampled = [e.rollout.completion.logprobs for e in chosen]
    logprobs = None
    if all(values is not None for values in sampled):
        logprobs = torch.zeros(len(chosen), width)
        for row, values in enumerate(sampled):
            logprobs[row, : len(values or ())] = torch.tensor(values)
        logprobs = logprobs.to(device)
    completion_ids = student[0][:, -width:] * mask.long()
    return Batch(
        student_ids=student[0].to(device),
        student_mask=student[1].to(device),
        student_positions=student[2].to(device),
        teacher_ids=teacher[0],
        teacher_mask=teacher[1],
        teacher_positions=teacher[2],
        teacher_rows=torch.tensor(taught, dtype=torch.long, device=device),
        completion_ids=completion_ids.to(device),
        mask=mask.to(device),
        has_context=has_context.to(device),
        success=success.to(device),
        advantages=torch.tensor([e.advantage for e in chosen], device=device),
        sampler_logprobs=logprobs,
        rows=tuple(rows),
    )
