"""The order of tasks: a fresh permutation an epoch, computed from the seed, so that a cursor is all the state there is."""

from __future__ import annotations

import numpy as np

__all__ = ["TaskOrder", "derive_seed"]


def derive_seed(*parts: int) -> int:
    """A seed for one purpose from the run's seed, the step and so on; equal parts give equal seeds everywhere."""
    return int(np.random.SeedSequence(list(parts)).generate_state(1, np.uint64)[0] >> 1)


class TaskOrder:
    """Positions of tasks in training order.

    Args:
        size: number of tasks, at least 1.
        seed: of the permutations.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def take(self, cursor: int, count: int) -> list[int]:
        """The `count` positions that follow the first `cursor` ones."""
        return [self._at(i) for i in range(cursor, cursor + count)]

    def _at(self, i: int) -> int:
        epoch, position = divmod(i, self.size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        return int(self._permutation[position])
