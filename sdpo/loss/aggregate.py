"""Token losses to one number, so that micro-batch size, packing and gradient accumulation do not show in the gradient.

    loss = sum over micro-batches of (weights * per_token).sum()  /  sum over micro-batches of the counts

    token_mean      every token of the batch weighs the same                           (2503.14476)
    sequence_mean   every sequence weighs the same: the mean of its tokens             (2402.03300)
    constant        the sum over rows * max_length: no length bias                     (2503.20783, Dr.GRPO)

Weights are read off the rows that are trained, counts off whichever rows belong in the denominator. Counting over rows
that have a teacher context makes the step size independent of how many have one; counting over all rows is what the
released SDPO code does (its micro-batches of one sequence make it a sequence mean over all rows, whatever its setting).
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from sdpo.errors import ConfigError, did_you_mean

__all__ = ["Aggregation", "aggregation_count", "aggregation_weights"]

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def _check(mode: str, max_length: int | None) -> None:
    if mode not in get_args(Aggregation):
        raise ConfigError(f"unknown aggregation {mode!r}", hint=did_you_mean(mode, get_args(Aggregation)))
    if mode == "constant" and (max_length is None or max_length < 1):
        raise ConfigError(f'aggregation "constant" needs max_length, not {max_length}', hint="give the token budget")


def aggregation_weights(mask: Tensor, mode: Aggregation, max_length: int | None = None) -> Tensor:
    """What each token's loss is multiplied by before the sum.

    Args:
        mask: [B, T], 1 on tokens that count.
        mode: see the module.
        max_length: completion budget in tokens; needed by "constant".

    Returns:
        [B, T] float, 0 where the mask is.
    """
    _check(mode, max_length)
    counted = (mask != 0).float()
    if mode == "sequence_mean":
        return counted / counted.sum(-1, keepdim=True).clamp(min=1)
    return counted


def aggregation_count(mask: Tensor, mode: Aggregation, max_length: int | None = None) -> Tensor:
    """The share of these rows in the denominator; adds up over micro-batches. A row without a token counts nothing.

    Args:
        mask: [B, T] of the rows that belong in the denominator.
        mode: see the module.
        max_length: completion budget in tokens; needed by "constant".

    Returns:
        0-d float: tokens, rows, or rows * max_length.
    """
    _check(mode, max_length)
    counted = mask != 0
    if mode == "token_mean":
        return counted.sum().float()
    rows = counted.any(-1).sum().float()
    return rows * max_length if mode == "constant" and max_length is not None else rows
