"""Rollouts: sample a group for each task, grade every completion as soon as it ends, return groups.

A sampler says nothing about rewards and an environment nothing about tokens; this module joins them. "Could not grade" is
never a reward of 0: the rollout is marked failed with the boundary named, and the step fails only when too many did.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sdpo.config import EnvConfig
from sdpo.env import Env
from sdpo.errors import GradingError, SandboxError
from sdpo.types import Completion, Failure, Grade, Group, Rollout, Task

__all__ = ["Grader", "Sampler", "SamplingParams", "check_failures", "collect"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn: temperature 0 is greedy, top_k None and top_p 1 keep every token."""

    temperature: float
    top_p: float
    top_k: int | None
    max_tokens: int


class Sampler(Protocol):
    """Draws completions from the current policy."""

    def sample(
        self, prompts: Sequence[tuple[int, ...]], n: int, params: SamplingParams, *, seed: int
    ) -> Iterator[tuple[int, int, Completion]]:
        """Yield (prompt index, rollout index, completion) for `n` completions a prompt, in any order, each as soon as it
        ends. The draws depend on nothing but the weights, the arguments and `seed`."""

    def sync(self) -> None:
        """Take over the policy's current weights; a no-op where the sampler shares them."""

    def close(self) -> None:
        """Release what the sampler holds."""


class Grader:
    """Grades completions of an environment concurrently, each under a time-out, while sampling goes on.

    Synchronous graders run in threads, asynchronous ones in one event loop of their own. A grader that hangs past the
    time-out is abandoned and its rollout marked failed; one that must be killed belongs in a process (see sdpo.env).
    """

    def __init__(self, env: Env, config: EnvConfig) -> None:
        self.env = env
        self.config = config
        self._groupwise = type(env).grade_group is not Env.grade_group
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(config.max_concurrent)
        threading.Thread(target=self._loop.run_forever, name="grader", daemon=True).start()

    def submit(self, task: Task, text: str) -> Future[Grade | Failure]:
        """Start to grade one completion."""
        return asyncio.run_coroutine_threadsafe(self._one(task, text), self._loop)

    def submit_group(self, task: Task, texts: Sequence[str]) -> list[Future[Grade | Failure]]:
        """Start to grade all completions of a group, by `grade_group` where the environment has it."""
        if not self._groupwise:
            return [self.submit(task, text) for text in texts]
        whole = asyncio.run_coroutine_threadsafe(self._group(task, texts), self._loop)
        return [_item(whole, i) for i in range(len(texts))]

    @property
    def groupwise(self) -> bool:
        """Whether the environment wants whole groups."""
        return self._groupwise

    def close(self) -> None:
        """Stop the event loop and close the environment."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.env.close()

    async def _one(self, task: Task, text: str) -> Grade | Failure:
        verdict = await self._guard(lambda: self.env.grade(task, text))
        return verdict if isinstance(verdict, Failure) else self._checked(verdict)

    async def _group(self, task: Task, texts: Sequence[str]) -> list[Grade | Failure]:
        verdicts = await self._guard(lambda: self.env.grade_group(task, texts))
        if verdicts is None:
            return list(await asyncio.gather(*(self._one(task, text) for text in texts)))
        if isinstance(verdicts, Failure):
            return [verdicts] * len(texts)
        if not isinstance(verdicts, Sequence) or len(verdicts) != len(texts):
            return [Failure("env.grade_group", f"returned {_short(verdicts)} for {len(texts)} completions")] * len(
                texts
            )
        return [self._checked(v) for v in verdicts]

    async def _guard(self, call: Callable[[], Any]) -> Any:
        """The call's result, or a Failure that names where it went wrong."""
        async with self._slots:
            try:
                return await asyncio.wait_for(_in_thread_or_loop(call), self.config.timeout)
            except (asyncio.TimeoutError, TimeoutError):
                return Failure("env.grade", f"no verdict within env.timeout = {self.config.timeout:g} s")
            except SandboxError as exc:
                return Failure("sandbox", str(exc))
            except GradingError as exc:
                return Failure("env.grade", str(exc))
            except Exception as exc:
                frame = traceback.extract_tb(exc.__traceback__)[-1]
                return Failure("env.grade", f"{type(exc).__name__}: {exc} ({frame.filename}:{frame.lineno})"[:500])

    def _checked(self, verdict: Any) -> Grade | Failure:
        if not isinstance(verdict, Grade):
            return Failure("env.grade", f"returned {_short(verdict)}, not a Grade")
        if not math.isfinite(verdict.reward):
            return Failure("env.grade", f"returned the reward {verdict.reward}")
        if verdict.success is None:
            return replace(verdict, success=verdict.reward >= self.config.success_threshold)
        return verdict


async def _in_thread_or_loop(call: Callable[[], Any]) -> Any:
    # A thread of its own, and a daemon: a pool's threads are joined at exit, where one hung grader would hang the run.
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            setter(value)

    def work() -> None:
        try:
            value = call()
        except Exception as exc:
            loop.call_soon_threadsafe(settle, result.set_exception, exc)
        else:
            loop.call_soon_threadsafe(settle, result.set_result, value)

    threading.Thread(target=work, name="grade", daemon=True).start()
    value = await result
    return await value if inspect.isawaitable(value) else value


def _item(whole: Future[list[Grade | Failure]], index: int) -> Future[Grade | Failure]:
    part: Future[Grade | Failure] = Future()
    whole.add_done_callback(lambda f: part.set_result(f.result()[index]))
    return part


def _short(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:120]


def collect(
    tasks: Sequence[Task],
    prompts: Sequence[tuple[int, ...]],
    sampler: Sampler,
    grader: Grader,
    n: int,
    params: SamplingParams,
    *,
    seed: int,
) -> list[Group]:
    """Sample `n` completions for each task and grade them.

    Args:
        prompts: the tasks' token ids, generation header included.
        seed: of the sampling.

    Returns:
        One group a task, in order; failed rollouts carry their `Failure`.
    """
    completions: list[list[Completion | None]] = [[None] * n for _ in tasks]
    verdicts: list[list[Future[Grade | Failure]]] = [[Future() for _ in range(n)] for _ in tasks]
    missing = [n] * len(tasks)
    for i, j, completion in sampler.sample(prompts, n, params, seed=seed):
        completions[i][j] = completion
        missing[i] -= 1
        if not grader.groupwise:
            verdicts[i][j] = grader.submit(tasks[i], completion.text)
        elif missing[i] == 0:
            verdicts[i] = grader.submit_group(tasks[i], [c.text for c in completions[i] if c is not None])
    groups = []
    for i, task in enumerate(tasks):
        rollouts = []
        for j, sampled in enumerate(completions[i]):
            if sampled is None:
                continue  # the sampler lost it: a group may be smaller than asked for
            verdict = verdicts[i][j].result()
            grade, failure = (None, verdict) if isinstance(verdict, Failure) else (verdict, None)
            rollouts.append(Rollout(task.id, j, tuple(prompts[i]), sampled, grade, failure))
        groups.append(Group(task, tuple(rollouts)))
    return groups


def check_failures(groups: Sequence[Group], limit: float) -> None:
    """Raise when too few rollouts could be graded.

    Raises:
        GradingError: more than `limit` of the rollouts failed; names the most frequent reason.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    failures = [r.failure for r in rollouts if r.failure is not None]
    if rollouts and len(failures) > limit * len(rollouts):
        reasons = [f"{f.boundary}: {f.message}" for f in failures]
        common = max(set(reasons), key=reasons.count)
        raise GradingError(
            f"{len(failures)} of {len(rollouts)} rollouts could not be graded, most often: {common}",
            hint="mend the environment, or raise train.max_failed_fraction",
        )
