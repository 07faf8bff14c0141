"""What training, evaluation and discovery all need: an environment with its grader, a policy with its sampler."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from sdpo.config import Config
from sdpo.env import Env, load_env
from sdpo.errors import ConfigError
from sdpo.policy import Policy, load_policy
from sdpo.rollout import Grader, Sampler
from sdpo.samplers.transformers import TransformersSampler
from sdpo.types import Task

__all__ = ["Session", "TaskSet"]


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks of a split with their prompts' token ids.

    Attributes:
        too_long: how many tasks were left out because their prompt exceeds `sampling.max_prompt_tokens`.
    """

    tasks: tuple[Task, ...]
    prompts: tuple[tuple[int, ...], ...]
    too_long: int


class Session:
    """Opens everything a configuration names; a context manager that closes it again.

    Raises:
        ConfigError, EnvNotFoundError: something that the configuration names cannot be had.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.env: Env = load_env(config.env.name, **config.env.args)
        self.grader = Grader(self.env, config.env)
        try:
            self.policy: Policy = load_policy(config.model, seed=config.run.seed)
        except BaseException:
            self.grader.close()
            raise
        self.sampler: Sampler = TransformersSampler(
            self.policy.model,
            self.policy.chat,
            self.policy.stop_ids,
            batch_size=config.sampling.batch_size,
            autocast=self.policy.autocast,
        )

    def task_set(self, split: str, limit: int | None = None) -> TaskSet:
        """The tasks of a split that fit, at most the first `limit`.

        Raises:
            ConfigError: none is left, or two have the same id.
        """
        tasks = list(self.env.tasks(split))[:limit]
        if len({t.id for t in tasks}) != len(tasks):
            raise ConfigError(
                f"split {split!r} of {self.config.env.name} has a task id twice", hint="ids must be unique"
            )
        for task in tasks:
            if not task.prompt or task.prompt[-1]["role"] != "user":
                raise ConfigError(f"task {task.id!r}: its prompt does not end in a user message")
        prompts = [self.policy.chat.prompt_ids(t.prompt) for t in tasks]
        budget = self.config.sampling.max_prompt_tokens
        kept = [i for i, p in enumerate(prompts) if len(p) <= budget]
        if not kept:
            why = f"all {len(tasks)} prompts exceed sampling.max_prompt_tokens = {budget}" if tasks else "it is empty"
            raise ConfigError(f"no tasks in split {split!r} of {self.config.env.name}: {why}")
        return TaskSet(tuple(tasks[i] for i in kept), tuple(prompts[i] for i in kept), len(tasks) - len(kept))

    def close(self) -> None:
        """Release sampler and environment."""
        self.sampler.close()
        self.grader.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
