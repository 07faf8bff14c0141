"""Sample routing (SRPO, 2604.02288): each rollout gets the one signal that suits it.

    wrong, and with a teacher context     distillation, each token weighted by exp(-H_teacher) over the mean of that
    everything else                       policy gradient

Both losses are divided by all routed tokens of the batch. The weights ask more of a token where the teacher is sure;
their mean over the distilled tokens is 1, so they move emphasis and not the step size.
"""

from __future__ import annotations

from torch import Tensor

from sdpo.loss.logprobs import token_entropy

__all__ = ["entropy_weights", "route"]


def route(success: Tensor, has_context: Tensor) -> Tensor:
    """Which rows are distilled; the others get the policy gradient.

    Args:
        success: [B] bool.
        has_context: [B] bool.

    Returns:
        [B] bool.
    """
    return has_context.bool() & ~success.bool()


def entropy_weights(teacher_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """exp(-H) of the teacher's full next-token distribution, detached, in (0, 1].

    To be divided by its mean over all distilled tokens of the optimiser batch, which no micro-batch knows alone.

    Args:
        teacher_logits: [..., V].
        temperature: divides the logits first.

    Returns:
        [...]; meaningless where the tokens are masked.
    """
    return (-token_entropy(teacher_logits, temperature)).exp()
