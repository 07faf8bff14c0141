"""The self-teacher: the policy's architecture under its own weights, with the privileged prompt (2601.20802, App. A.2).

A teacher holds only a copy of the *trainable* parameters and runs the policy's module with them put in place, so that full
and LoRA training are one case: a LoRA teacher is an average of adapters that starts at the student's adapter. It never
sees dropout and never a gradient. Its state is part of the checkpoint.

    ema            teacher <- (1 - rate) * teacher + rate * policy, after each step
    frozen         the initial weights
    snapshot       a copy taken every `every` steps
    live           the policy's current weights
    trust_region   logits (1 - rate) * initial + rate * policy: the geometric mixture, both with the teacher's prompt
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sdpo.config import TeacherConfig
from sdpo.errors import CheckpointError
from sdpo.forward import completion_logits
from sdpo.policy import Policy
from sdpo.types import Rows

__all__ = ["Teacher", "make_teacher"]


class Teacher:
    """Live weights: the base of the others.

    Args:
        policy: whose module and trainable parameters are used.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def logits(self, rows: Rows) -> Tensor:
        """[R, T, V] logits that predict the completions; detached, without dropout."""
        return self._logits(rows, None)

    def update(self, step: int) -> None:
        """Follow the policy after a step, counted from 1."""

    def state(self) -> dict[str, Tensor]:
        """Weights that a checkpoint must hold, by parameter name."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state()`.

        Raises:
            CheckpointError: it is of another kind of teacher or another model.
        """
        own = self.state()
        if own.keys() != state.keys():
            odd = sorted(own.keys() ^ state.keys())[0]
            raise CheckpointError(
                f"the checkpoint's teacher does not fit: {odd!r} is on one side only",
                hint="resume with the model and the teacher.kind of the run",
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def distance(self) -> float:
        """Relative L2 distance between the teacher's and the policy's trainable parameters."""
        return 0.0

    @torch.no_grad()
    def _logits(self, rows: Rows, weights: Mapping[str, Tensor] | None) -> Tensor:
        model = self.policy.model
        training = model.training
        model.eval()
        try:
            with self.policy.autocast():
                return completion_logits(model, rows, weights)
        finally:
            model.train(training)


class _Copy(Teacher):
    """A teacher with weights of its own, the initial ones at first."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.weights = {name: p.detach().clone() for name, p in policy.trainable().items()}

    def logits(self, rows: Rows) -> Tensor:
        return self._logits(rows, self.weights)

    def state(self) -> dict[str, Tensor]:
        return self.weights

    @torch.no_grad()
    def distance(self) -> float:
        own, current = list(self.weights.values()), [p.detach() for p in self.policy.trainable().values()]
        apart = torch.stack(torch._foreach_norm(torch._foreach_sub(own, current))).norm()
        return float(apart / torch.stack(torch._foreach_norm(current)).norm())


class _Ema(_Copy):
    def __init__(self, policy: Policy, rate: float) -> None:
        super().__init__(policy)
        self.rate = rate

    @torch.no_grad()
    def update(self, step: int) -> None:
        torch._foreach_lerp_(list(self.weights.values()), list(self.policy.trainable().values()), self.rate)


class _Snapshot(_Copy):
    def __init__(self, policy: Policy, every: int) -> None:
        super().__init__(policy)
        self.every = every

    @torch.no_grad()
    def update(self, step: int) -> None:
        if step % self.every == 0:
            torch._foreach_copy_(list(self.weights.values()), list(self.policy.trainable().values()))


class _TrustRegion(_Copy):
    def __init__(self, policy: Policy, rate: float) -> None:
        super().__init__(policy)
        self.rate = rate

    def logits(self, rows: Rows) -> Tensor:
        initial = self._logits(rows, self.weights)
        current = self._logits(rows, None)
        return torch.lerp(initial.float(), current.float(), self.rate)


def make_teacher(config: TeacherConfig, policy: Policy) -> Teacher:
    """The teacher of that kind; call it before the first optimiser step, when the policy is still the initial model."""
    if config.kind == "ema":
        return _Ema(policy, config.rate)
    if config.kind == "snapshot":
        return _Snapshot(policy, config.every)
    if config.kind == "trust_region":
        return _TrustRegion(policy, config.rate)
    if config.kind == "frozen":
        return _Copy(policy)
    return Teacher(policy)
