"""Tasksets written for verifiers (its v1 interface) as environments: `verifiers:ID` or `verifiers:package.module:Class`.

The taskset brings prompts and rewards; a single-turn trace of prompt and attempt is made and scored by the task's own
reward functions. verifiers has no text feedback: a task may leave some in `trace.info["feedback"]`, else the feedback
names the rewards that were not earned. What a single turn does not have is refused with its reason: tools, set-up or
finalisation in a runtime, containers, rewards that need a runtime, users that open the conversation.

Not covered: harnesses, judges that call a model's endpoint (they run, at their own cost). Needs the extra `verifiers`
(Python >= 3.11).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from sdpo.env import Env
from sdpo.errors import ConfigError, GradingError, boundary
from sdpo.types import Grade, Message, Task
from sdpo_envs.adapters.imports import imported, require

__all__ = ["VerifiersTaskset"]


class VerifiersTaskset(Env):
    """A verifiers taskset; its tasks are the split "train", or what `splits` says.

    Args:
        taskset: id of an installed taskset, or "package.module:Class".
        args: fields of the taskset's config.
        splits: how many tasks go to each split, in order, for example {train = 400, test = 100}; needed for endless ones.
        success_at: a total reward of at least this is a success.
    """

    feedback_reveals_target = True  # a task may leave anything in trace.info

    def __init__(
        self,
        taskset: str,
        *,
        args: Mapping[str, Any] | None = None,
        splits: Mapping[str, int] | None = None,
        success_at: float = 1.0,
    ) -> None:
        require("verifiers", f"environment verifiers:{taskset}", extra="verifiers")
        self._name = taskset
        self._args = dict(args or {})
        self._sizes = dict(splits or {})
        self._success_at = success_at

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._splits:
            raise ConfigError(
                f"verifiers:{self._name} has no split {split!r}", hint=f"it has {', '.join(self._splits)}"
            )
        return [_task(inner, split, index) for index, inner in enumerate(self._splits[split])]

    async def grade(self, task: Task, completion: str) -> Grade:
        inner = self._splits[task.metadata["split"]][task.metadata["index"]]
        trace = _trace(inner, task, completion)
        with boundary(f"score verifiers:{self._name}", GradingError, Exception):
            await inner.score(trace)
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards:
            raise GradingError(f"verifiers:{self._name}: no value for {', '.join(missing) or 'any reward'}")
        reward = float(trace.reward)
        success = reward >= self._success_at
        return Grade(
            reward=reward,
            feedback="" if success else _explained(trace),
            success=success,
            metrics={name: float(value) for name, value in trace.metrics.items() if value is not None},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_splits"}

    @cached_property
    def _splits(self) -> dict[str, list[Any]]:
        taskset = self._load()
        if not self._sizes and not taskset.bounded:
            raise ConfigError(f"verifiers:{self._name} is endless", hint="give splits, for example {train = 400}")
        tasks = iter(taskset)
        if not self._sizes:
            splits = {"train": list(tasks)}
        else:
            splits = {split: list(itertools.islice(tasks, size)) for split, size in self._sizes.items()}
        for split, found in splits.items():
            if not found:
                raise ConfigError(f"verifiers:{self._name}: nothing is left for the split {split}", hint="lower splits")
            for inner in found:
                if reason := _refusal(inner):
                    raise ConfigError(
                        f"verifiers:{self._name} cannot be an environment: {reason}", hint="single turns only"
                    )
        return splits

    def _load(self) -> Any:
        from verifiers.v1.configs.taskset import TasksetConfig
        from verifiers.v1.taskset import Taskset
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import taskset_class

        with boundary(f"load the taskset {self._name!r}", ConfigError, Exception):
            cls = imported(self._name, "taskset") if ":" in self._name else taskset_class(self._name)
            config = (concrete_type(cls, TasksetConfig, origin=Taskset) or TasksetConfig)(**self._args)
            if cls.toolsets(config):
                raise ConfigError(f"verifiers:{self._name} cannot be an environment: it has tools")
            return cls(config)


def _refusal(inner: Any) -> str:
    """Why a task cannot be played in a single turn of text; empty when it can."""
    from verifiers.v1.task import Task as Base

    cls = type(inner)
    if inner.NEEDS_CONTAINER or inner.data.image:
        return "it needs a container"
    if (
        cls.setup is not Base.setup
        or cls.finalize is not Base.finalize
        or cls.stage_verifier is not Base.stage_verifier
    ):
        return "it prepares or reads a runtime (setup, finalize, stage_verifier)"
    if cls.toolsets(inner.config):
        return "it has tools"
    if inner.data.prompt is None:
        return "the user opens the conversation"
    for function in inner.hooks("reward"):
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"its reward {function.__name__} needs a runtime"
    return ""


def _task(inner: Any, split: str, index: int) -> Task:
    from verifiers.v1.types import content_text

    data = inner.data
    messages = [Message(role="system", content=data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        messages.append(Message(role="user", content=data.prompt))
    else:
        messages += [Message(role=m.role, content=content_text(m.content)) for m in data.prompt]
    return Task(
        id=f"{split}-{data.id or inner.key[:16]}-{index}",
        prompt=tuple(messages),
        metadata={"split": split, "index": index},
    )


def _trace(inner: Any, task: Task, completion: str) -> Any:
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    nodes = [
        MessageNode(parent=i - 1 if i else None, message=kinds[message["role"]](content=message["content"]))
        for i, message in enumerate(task.prompt)
    ]
    nodes.append(MessageNode(parent=len(nodes) - 1, message=AssistantMessage(content=completion), sampled=True))
    trace = Trace(
        task=TraceTask(type=type(inner).__name__, data=inner.data, key=inner.key, hash=inner.hash),
        agent=AgentInfo(config=AgentConfig()),
        nodes=nodes,
    )
    trace.state = state_cls(type(inner))()
    return trace


def _explained(trace: Any) -> str:
    told = trace.info.get("feedback")
    if isinstance(told, str) and told.strip():
        return told
    lost = [
        f"{name}: {reward.score:.3g}" for name, reward in trace.rewards.items() if reward.weight and reward.score < 1
    ]
    return f"Not everything was earned: {', '.join(lost)}." if lost else "The attempt was not right."
