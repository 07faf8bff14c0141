"""One local training step: groups, contexts and advantages in; moved parameters and numbers out.

    examples -> optimiser batches of `mini_batch_prompts` groups -> micro-batches by a token budget
    each: teacher forward (rows with a context only) -> student forward -> the algorithm's loss -> backward
    then: clip the gradient, optimiser, scheduler

All denominators are counted over the optimiser batch before its first micro-batch, so the gradient does not depend on
how the batch was cut. Rows that cannot contribute never enter a forward pass.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import get_scheduler

from sdpo.algorithms import Signals, get_algorithm
from sdpo.batch import make_examples, micro_batches, padding_share, row_masks, to_batch
from sdpo.config import Config
from sdpo.forward import completion_logits
from sdpo.loss import entropy_weights, token_entropy, token_logprobs, truncated_importance_weights
from sdpo.policy import Policy
from sdpo.teacher import Teacher
from sdpo.types import Batch, Example, Group, TeacherContext

__all__ = ["Optimised", "Stepper"]


_ENTROPY_TOKENS = 256  # a micro-batch


@dataclass(frozen=True, slots=True)
class Optimised:
    """What the optimiser steps of one training step did."""

    loss: float
    metrics: dict[str, float]
    timings: dict[str, float]


class Stepper:
    """Holds the optimiser and moves the policy.

    Args:
        config: the whole tree.
        policy: the model that is trained.
        teacher: scores rollouts under their contexts.
        reference: the frozen initial model, for `policy.kl_coef`; None without it.
    """

    def __init__(self, config: Config, policy: Policy, teacher: Teacher, reference: Teacher | None) -> None:
        self.config = config
        self.policy = policy
        self.teacher = teacher
        self.reference = reference
        self.algorithm = get_algorithm(config.algo.name)
        self._parameters = list(policy.trainable().values())
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=optim.lr, weight_decay=optim.weight_decay, betas=optim.betas, fused=True
        )
        mini = config.train.mini_batch_prompts or config.train.prompts_per_step
        per_step = config.train.prompts_per_step // mini
        self.scheduler = get_scheduler(
            {"constant": "constant_with_warmup"}.get(optim.schedule, optim.schedule),
            self.optimizer,
            num_warmup_steps=optim.warmup_steps * per_step,
            num_training_steps=config.train.steps * per_step,
        )
        self._timings: dict[str, float] = defaultdict(float)
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def run(
        self,
        groups: Sequence[Group],
        contexts: Sequence[Sequence[TeacherContext | None]],
        advantages: Sequence[Sequence[float]],
    ) -> Optimised:
        """Train on one step's groups.

        Args:
            groups: of the step.
            contexts: one entry a rollout, aligned with `groups`.
            advantages: likewise.
        """
        self._timings, self._sums = defaultdict(float), defaultdict(lambda: [0.0, 0.0])
        examples = make_examples(groups, contexts, advantages)
        mini = self.config.train.mini_batch_prompts or max(1, len(groups))
        parts = [[e for e in examples if start <= e.group < start + mini] for start in range(0, len(groups), mini)]
        parts = [part for part in parts if part]
        old = [self._score(self._used(part)) if len(parts) > 1 else None for part in parts]
        losses = [self._optimise(part, before) for part, before in zip(parts, old, strict=True)]
        metrics = {name: total / count for name, (total, count) in self._sums.items() if count}
        metrics["optimiser_steps"] = float(len(parts))
        return Optimised(sum(losses) / max(1, len(losses)), metrics, dict(self._timings))

    def _used(self, examples: Sequence[Example]) -> list[Example]:
        return [e for e in examples if self.algorithm.needs_row(e, self.config)]

    def _score(self, examples: Sequence[Example]) -> list[Tensor]:
        """Log-probs under the policy before the step, [T_i] for each example, without dropout: with several optimiser
        steps the later ones are off-policy."""
        scores: list[Tensor] = [torch.empty(0)] * len(examples)
        self.policy.model.eval()
        with torch.no_grad(), self._timed("old_logprobs"):
            for rows in micro_batches(examples, self.config.train.micro_batch_tokens):
                batch = to_batch(examples, rows, self.policy.chat.pad_id, self.policy.device)
                values = self._logprobs(self._student(batch), batch.student.completion_ids)
                for row, i in enumerate(rows):
                    scores[i] = values[row, : len(examples[i].rollout.completion.token_ids)]
        self.policy.model.train()
        return scores

    def _optimise(self, examples: Sequence[Example], old: Sequence[Tensor] | None) -> float:
        """One optimiser step."""
        config, device = self.config, self.policy.device
        totals = self.algorithm.counts(*row_masks(examples, device), config)
        rows = self._used(examples)
        cuts = micro_batches(rows, config.train.micro_batch_tokens)
        self._add("padding_share", padding_share(rows, cuts), 1.0)
        if self.algorithm.needs_teacher_entropy(config):
            totals["teacher_entropy_weight"] = self._teacher_entropy(rows, cuts)
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for cut in cuts:
            batch = to_batch(rows, cut, self.policy.chat.pad_id, device)
            signals = self._signals(batch, None if old is None else [old[i] for i in cut])
            with self._timed("loss"):
                objective = self.algorithm.objective(signals, totals, config)
            for name, (total, count) in objective.metrics.items():
                self._add(name, total, count)
            with self._timed("backward"):
                objective.loss.backward()  # type: ignore[no-untyped-call]
            loss += objective.loss.item()
        with self._timed("optimiser"):
            self._apply()
        return loss

    def _apply(self) -> None:
        """Clip, step, schedule; a gradient that is not finite moves nothing and is counted."""
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in self._parameters if p.grad is not None], self.config.optim.max_grad_norm
        ).item()
        finite = math.isfinite(norm)
        if finite:
            self._add("grad_norm", norm, 1.0)
            self._add("lr", self.optimizer.param_groups[0]["lr"], 1.0)
            self.optimizer.step()
            self.scheduler.step()
        self._add("skipped_updates", 0.0 if finite else 1.0, 1.0)

    def _signals(self, batch: Batch, old: Sequence[Tensor] | None) -> Signals:
        """The forward passes of a micro-batch."""
        teacher = self._teacher(batch) if self.algorithm.needs_teacher else None
        with self._timed("student"):
            logits = self._student(batch)
            logprobs = self._logprobs(logits, batch.student.completion_ids)
        old_logprobs = logprobs.detach()
        if old is not None:
            old_logprobs = torch.nn.utils.rnn.pad_sequence(list(old), batch_first=True)
        reference = None
        if self.reference is not None:
            with self._timed("reference"):
                reference = self._logprobs(self.reference.logits(batch.student), batch.student.completion_ids)
        weights = torch.ones_like(batch.mask)
        if batch.sampler_logprobs is not None:
            self._watch_sampler(batch, old_logprobs)
            if (clip := self.config.train.rollout_is_clip) is not None:
                weights = truncated_importance_weights(old_logprobs, batch.sampler_logprobs, clip)
        self._watch_policy(batch, logits)
        return Signals(
            mask=batch.mask,
            token_ids=batch.student.completion_ids,
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            sampler_weights=weights,
            ref_logprobs=reference,
            advantages=batch.advantages,
            success=batch.success,
            has_context=batch.has_context,
            rows=batch.teacher_rows,
            student_logits=None if teacher is None else _rows(logits, batch.teacher_rows),
            teacher_logits=teacher,
        )

    def _student(self, batch: Batch) -> Tensor:
        with self.policy.autocast():
            return completion_logits(self.policy.model, batch.student)

    def _teacher(self, batch: Batch) -> Tensor | None:
        if batch.teacher is None:
            return None
        with self._timed("teacher"):
            return self.teacher.logits(batch.teacher)

    def _teacher_entropy(self, examples: Sequence[Example], cuts: Sequence[Sequence[int]]) -> Tensor:
        """Sum of exp(-teacher entropy) over the tokens that will be distilled."""
        total = torch.zeros((), device=self.policy.device)
        for cut in cuts:
            batch = to_batch(examples, cut, self.policy.chat.pad_id, self.policy.device)
            logits = self._teacher(batch)
            if logits is not None:
                target = self.algorithm.distilled(batch.mask, batch.has_context, batch.success, self.config)
                raw = entropy_weights(logits, temperature=self.config.teacher.temperature)
                total += (raw * target[batch.teacher_rows]).sum()
        return total

    def _logprobs(self, logits: Tensor, ids: Tensor) -> Tensor:
        return token_logprobs(logits, ids, self.config.sampling.temperature)

    def _watch_sampler(self, batch: Batch, logprobs: Tensor) -> None:
        assert batch.sampler_logprobs is not None
        gap = ((logprobs - batch.sampler_logprobs).abs() * batch.mask).sum().item()
        self._add("sampler/logprob_gap", gap, batch.mask.sum().item())

    @torch.no_grad()
    def _watch_policy(self, batch: Batch, logits: Tensor) -> None:
        # A sample of the tokens is enough for a log: the entropy of all would cost a good part of the loss.
        counted = batch.mask.nonzero()
        rows, columns = counted[:: max(1, -(-len(counted) // _ENTROPY_TOKENS))].unbind(1)
        entropy = token_entropy(logits[rows, columns], self.config.sampling.temperature)
        self._add("policy/entropy", entropy.sum().item(), float(entropy.numel()))

    def _add(self, name: str, total: float, count: float) -> None:
        self._sums[name][0] += total
        self._sums[name][1] += count

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._timings[phase] += time.perf_counter() - start


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """The chosen rows, without a copy where they are all of them."""
    return tensor if len(rows) == len(tensor) else tensor[rows]
