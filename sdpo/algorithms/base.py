"""What an algorithm is: a preset, two numbers of the batch, and a loss of per-token signals.

The step (sdpo.step) does the forward passes and hands each micro-batch's signals over; the algorithm turns them into one
scalar. Losses are sums over micro-batches of sums over tokens, divided by counts of the *whole* optimiser batch, so that
micro-batching cannot change the gradient. Modules here import torch inside functions: the names and presets are
needed by the command line, which must start without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from sdpo.config import Config
    from sdpo.types import Example

__all__ = ["Algorithm", "Objective", "Signals"]


@dataclass(frozen=True, slots=True)
class Signals:
    """Per-token signals of one micro-batch: B rows, T completion columns, R <= B rows with a teacher context.

    Attributes:
        mask: [B, T] float, 1 on completion tokens.
        token_ids: [B, T] the sampled tokens.
        logprobs: [B, T] of the sampled tokens under the policy at the sampling temperature; carries the gradient.
        old_logprobs: [B, T] the same under the policy that started the step; detached.
        sampler_weights: [B, T] truncated ratio of trainer and sampler probabilities; detached, 1 without correction.
        ref_logprobs: [B, T] under the initial model, or None.
        advantages: [B].
        success: [B] bool.
        has_context: [B] bool.
        rows: [R] which of the B rows the teacher scored.
        student_logits: [R, T, V] of those rows, with gradient; None when R = 0 or no teacher is needed.
        teacher_logits: [R, T, V], detached; None likewise.
    """

    mask: Tensor
    token_ids: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    sampler_weights: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    success: Tensor
    has_context: Tensor
    rows: Tensor
    student_logits: Tensor | None
    teacher_logits: Tensor | None


@dataclass(frozen=True, slots=True)
class Objective:
    """A micro-batch's share of the loss (0-d, with gradient) and of the metrics.

    `metrics` maps a name to (sum, count), both floats, so that shares add up over micro-batches.
    """

    loss: Tensor
    metrics: Mapping[str, tuple[float, float]]


class Algorithm(ABC):
    """One algorithm.

    Class attributes:
        name: what `algo.name` says.
        summary: one line for the documentation.
        preset: defaults of the configuration's sections, as published.
        sections: which of context, teacher, loss and policy it reads.
        options: which keys of [algo] it reads besides the name.
        needs_teacher: a teacher scores rollouts.
        needs_advantages: group advantages enter the loss.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    preset: ClassVar[Mapping[str, Any]]
    sections: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]] = ()
    needs_teacher: ClassVar[bool]
    needs_advantages: ClassVar[bool]

    @abstractmethod
    def counts(self, mask: Tensor, has_context: Tensor, success: Tensor, config: Config) -> dict[str, Tensor]:
        """Denominators of one micro-batch, as 0-d tensors that add up over micro-batches.

        Args:
            mask: [B, T] completion tokens.
            has_context: [B] bool.
            success: [B] bool.
        """

    @abstractmethod
    def objective(self, signals: Signals, totals: Mapping[str, Tensor], config: Config) -> Objective:
        """The micro-batch's share of the loss; `totals` are the summed counts of the optimiser batch."""

    def needs_teacher_entropy(self, config: Config) -> bool:
        """Whether `totals` must hold `teacher_entropy_weight`: the sum of exp(-teacher entropy) over distilled tokens,
        which costs one more teacher pass over the optimiser batch."""
        return False

    def distilled(self, mask: Tensor, has_context: Tensor, success: Tensor, config: Config) -> Tensor:
        """[B, T] float: the tokens that the teacher's distribution is distilled on; used with `needs_teacher_entropy`."""
        return mask.new_zeros(mask.shape)

    def needs_row(self, example: Example, config: Config) -> bool:
        """Whether a row can contribute to the gradient; the others enter no forward pass."""
        taught = self.needs_teacher and "loss" in self.sections and example.teacher_prompt_ids is not None
        moved = self.needs_advantages and (example.advantage != 0 or config.policy.kl_coef > 0)
        return taught or moved
