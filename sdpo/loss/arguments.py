"""What `distillation_loss` refuses: arguments that contradict each other and tensors that do not fit.

Each refusal is a `ConfigError` (a `ValueError`) of one line, raised before anything is computed.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from sdpo.errors import ConfigError, did_you_mean
from sdpo.loss.divergence import check_divergence

__all__ = ["Granularity", "Side", "check_bounds", "check_choices", "check_needs", "check_tensors"]

Granularity = Literal["logit", "token", "sequence"]
Side = Literal["student", "teacher"]


def check_choices(kind: str, alpha: float, granularity: str, top_k: int | None, top_k_from: str) -> None:
    """Refuse names that do not exist and choices that contradict each other."""
    check_divergence(kind, alpha)
    for name, value, known in (
        ("granularity", granularity, get_args(Granularity)),
        ("top_k_from", top_k_from, get_args(Side)),
    ):
        if value not in known:
            raise ConfigError(f"unknown {name} {value!r}", hint=did_you_mean(value, known))
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k = {top_k} is not positive", hint="None compares the full vocabulary")
    if granularity == "logit":
        return
    if kind != "reverse_kl":
        raise ConfigError(
            f'granularity "{granularity}" estimates the reverse KL, not divergence = "{kind}"',
            hint='set divergence="reverse_kl"',
        )
    if top_k is not None:
        raise ConfigError(
            f'top_k = {top_k} has no meaning at granularity "{granularity}"', hint='leave it out, or use "logit"'
        )


def check_bounds(kind: str, **bounds: float | None) -> None:
    """Refuse bounds that are not positive, and an advantage clip without advantages."""
    for name, value in bounds.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name} = {value} is not positive", hint="None switches it off")
    if bounds["advantage_clip"] is not None and kind != "reverse_kl":
        raise ConfigError(
            f'advantage_clip needs divergence = "reverse_kl", not "{kind}"',
            hint="token_clip bounds every divergence",
        )


def check_needs(granularity: str, is_clip: float | None, ids: Tensor | None, old: Tensor | None) -> None:
    """Refuse a choice without the tensors that it reads."""
    if granularity != "logit" and ids is None:
        raise ConfigError(f'granularity "{granularity}" needs token_ids', hint="pass the sampled ids, [B, T]")
    if is_clip is not None and (ids is None or old is None):
        raise ConfigError(
            f"is_clip = {is_clip} needs token_ids and old_logprobs", hint="pass both, [B, T], or is_clip=None"
        )


def check_tensors(student: Tensor, teacher: Tensor, mask: Tensor, **others: Tensor | None) -> None:
    """Refuse vocabularies and shapes that do not fit."""
    if student.shape[-1] != teacher.shape[-1]:
        raise ConfigError(
            f"student and teacher have vocabularies of {student.shape[-1]} and {teacher.shape[-1]}",
            hint="cut the padded entries off the larger one",
        )
    shapes = {"teacher_logits": teacher.shape[:-1], "mask": mask.shape}
    shapes |= {name: tensor.shape for name, tensor in others.items() if tensor is not None}
    for name, shape in shapes.items():
        if student.dim() != 3 or shape != student.shape[:-1]:
            raise ConfigError(
                f"{name} of shape {tuple(shape)} does not fit student_logits {tuple(student.shape)}",
                hint="logits are [B, T, V], everything else is [B, T]",
            )
