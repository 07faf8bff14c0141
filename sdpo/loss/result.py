"""What a loss returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LossResult", "over_normalizer"]


@dataclass(frozen=True, slots=True)
class LossResult:
    """A loss and what is worth logging about it.

    Attributes:
        loss: 0-d, differentiable: per_token.sum() / normalizer.
        per_token: [B, T], differentiable: the weighted loss of each token, 0 outside the mask.
        sums: name to (sum, count), detached 0-d tensors; see the subclass for the names.
    """

    loss: Tensor
    per_token: Tensor
    sums: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Name to mean, detached 0-d tensors; 0 where nothing was counted."""
        return {name: total / count.clamp(min=1) for name, (total, count) in self.sums.items()}

    @property
    def totals(self) -> dict[str, tuple[float, float]]:
        """Name to (sum, count) as numbers, which add up over micro-batches. Waits for the device once."""
        if not self.sums:
            return {}
        flat = torch.stack([value for pair in self.sums.values() for value in pair]).tolist()
        return dict(zip(self.sums, zip(flat[::2], flat[1::2], strict=True), strict=True))


def over_normalizer(per_token: Tensor, counted: Tensor, normalizer: Tensor | float | None) -> Tensor:
    """The sum of token losses over the normaliser: by default the tokens counted. A normaliser of 0 counts as 1, so
    that a batch without a token gives 0 and not 0/0."""
    n = counted.sum() if normalizer is None else torch.as_tensor(normalizer, device=per_token.device)
    return per_token.sum() / torch.where(n == 0, torch.ones_like(n), n)
