"""Evaluation: avg@k and pass@k with intervals over tasks.

avg@k is the mean success of k rollouts a task; pass@k the unbiased estimate that at least one of k succeeds (2107.03374).
Rollouts that could not be graded are left out and counted, truncated ones are counted. Greedy evaluation
(`eval.temperature = 0`) draws one rollout a task, since the others would equal it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpo.config import Config
from sdpo.errors import GradingError
from sdpo.order import derive_seed
from sdpo.rollout import SamplingParams, check_failures, collect
from sdpo.session import Session, TaskSet
from sdpo.statistics import bootstrap_interval, pass_at_k
from sdpo.types import Group

__all__ = ["EvalResult", "evaluate", "evaluate_tasks"]

_EVAL = 1  # purpose of the derived seeds; training draws use 0


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One evaluation.

    Attributes:
        success: avg@k, the mean over tasks of the share of successful rollouts.
        interval: 95 % bootstrap interval of `success` over tasks.
        pass_at: {k: pass@k} for powers of two up to the number of rollouts.
        reward: mean reward.
        length: mean completion length in tokens.
        truncated: share of rollouts that ran into the token budget.
        failed: rollouts that could not be graded.
        metrics: the environment's own numbers, averaged.
    """

    split: str
    tasks: int
    rollouts: int
    success: float
    interval: tuple[float, float]
    pass_at: dict[int, float]
    reward: float
    length: float
    truncated: float
    failed: int
    metrics: dict[str, float]

    def to_record(self) -> dict[str, Any]:
        """As JSON-able data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> EvalResult:
        """The inverse of `to_record`, also after a trip through JSON."""
        fields = {f.name: record[f.name] for f in dataclasses.fields(cls)}
        low, high = record["interval"]
        return cls(**{**fields, "interval": (low, high), "pass_at": {int(k): v for k, v in record["pass_at"].items()}})


def evaluate_tasks(session: Session, task_set: TaskSet, config: Config) -> tuple[EvalResult, list[Group]]:
    """Evaluate the session's policy on these tasks.

    The draws depend on the run's seed only, not on the training step, so that two evaluations differ by their weights.

    Raises:
        GradingError: more than `train.max_failed_fraction` of the rollouts could not be graded.
    """
    settings = config.eval
    n = 1 if settings.temperature == 0 else settings.rollouts
    params = SamplingParams(settings.temperature, settings.top_p, None, config.sampling.max_tokens)
    seed = derive_seed(config.run.seed, _EVAL)
    groups = collect(task_set.tasks, task_set.prompts, session.sampler, session.grader, n, params, seed=seed)
    check_failures(groups, config.train.max_failed_fraction)
    if not any(g.graded for g in groups):
        raise GradingError("no rollout of the evaluation could be graded", hint="try `sdpo env check`")
    return summarise(groups, settings.split, n, seed=config.run.seed), groups


def summarise(groups: Sequence[Group], split: str, n: int, *, seed: int) -> EvalResult:
    """The numbers of an evaluation from its graded groups."""
    graded = [g for g in groups if g.graded]
    rates = [len(g.successes) / len(g.graded) for g in graded]
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [reward for g in groups for reward in g.rewards]
    ks = [k for k in (2**i for i in range(20)) if k <= min((len(g.graded) for g in graded), default=0)]
    collected: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in (rollout.grade.metrics if rollout.grade else {}).items():
            collected.setdefault(name, []).append(value)
    return EvalResult(
        split=split,
        tasks=len(groups),
        rollouts=n,
        success=sum(rates) / len(rates),
        interval=bootstrap_interval(rates, seed=seed),
        pass_at={k: sum(pass_at_k(len(g.graded), len(g.successes), k) for g in graded) / len(graded) for k in ks},
        reward=sum(rewards) / len(rewards),
        length=sum(len(r.completion.token_ids) for r in rollouts) / len(rollouts),
        truncated=sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
        failed=sum(r.failure is not None for r in rollouts),
        metrics={name: sum(values) / len(values) for name, values in sorted(collected.items())},
    )


def evaluate(config: Config, checkpoint: str | Path | None = None) -> tuple[EvalResult, list[Group]]:
    """Evaluate a model, or a checkpoint of it, on `eval.split`.

    Args:
        checkpoint: a folder to load instead of `model.path`.

    Raises:
        ConfigError: model, environment or split cannot be had.
    """
    if checkpoint is not None:
        model = config.model.model_copy(
            update={"path": str(checkpoint), "lora_rank": 0, "gguf_file": None, "revision": None}
        )
        config = config.model_copy(update={"model": model})
    with Session(config) as session:
        return evaluate_tasks(session, session.task_set(config.eval.split, config.eval.tasks), config)
