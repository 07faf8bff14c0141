"""Rollouts: sample a group for each task, grade every completion as soon as it ends, return groups.

A sampler says nothing about rewards and an environment nothing about tokens; this module joins them. "Could not grade" is
never a reward of 0: the rollout is marked failed with the boundary named, and the step fails only when too many did.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
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

    def patience(self, rollouts: int) -> float:
        """Seconds within which so many rollouts are graded or given up, as long as the event loop runs."""
        return self.config.timeout * (1 + rollouts / self.config.max_concurrent) + 5.0

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
                value, error = await asyncio.wait_for(_outcome(call), self.config.timeout)
            except (asyncio.TimeoutError, TimeoutError):
                return Failure("env.grade", f"no verdict within env.timeout = {self.config.timeout:g} s")
            except asyncio.CancelledError:
                return Failure("env.grade", "the grader was cancelled")
        return value if error is None else _failure(error)

    def _checked(self, verdict: Any) -> Grade | Failure:
        """The verdict with `success` decided, or a Failure for what is none."""
        if not isinstance(verdict, Grade):
            return Failure("env.grade", f"returned {_short(verdict)}, not a Grade")
        try:
            reward = float(verdict.reward)
            metrics = {str(name): float(value) for name, value in dict(verdict.metrics).items()}
            success = reward >= self.config.success_threshold if verdict.success is None else bool(verdict.success)
        except (TypeError, ValueError, OverflowError):
            return Failure("env.grade", f"returned {_short(verdict)}, whose numbers are none")
        if not math.isfinite(reward):
            return Failure("env.grade", f"returned the reward {reward}")
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return Grade(reward, str(verdict.feedback or ""), success, finite)


def _failure(error: BaseException) -> Failure:
    if isinstance(error, SandboxError):
        return Failure("sandbox", str(error))
    if isinstance(error, GradingError):
        return Failure("env.grade", str(error))
    try:
        told = str(error)
    except Exception:
        told = "its message cannot be read"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Failure("env.grade", f"{type(error).__name__}: {told}{where}"[:500])


async def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a grader returned or raised. Everything it can raise is data here, SystemExit and StopIteration too: in a
    thread they would be lost, in the event loop they would end it."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not result.done():
            result.set_result((value, error))

    def work() -> None:
        try:
            value, error = call(), None
        except BaseException as exc:
            value, error = None, exc
        loop.call_soon_threadsafe(settle, value, error)

    # A thread of its own, and a daemon: a pool's threads are joined at exit, where one hung grader would hang the run.
    threading.Thread(target=work, name="grade", daemon=True).start()
    value, error = await result
    if error is None and inspect.isawaitable(value):
        try:
            return await value, None
        except asyncio.CancelledError:
            raise
        except BaseException as exc:
            return None, exc
    return value, error


def _item(whole: Future[list[Grade | Failure]], index: int) -> Future[Grade | Failure]:
    part: Future[Grade | Failure] = Future()

    def settle(done: Future[list[Grade | Failure]]) -> None:
        error = done.exception()
        part.set_result(done.result()[index] if error is None else _failure(error))

    whole.add_done_callback(settle)
    return part


def _short(value: object) -> str:
    try:
        return f"{type(value).__name__} {value!r}"[:120]
    except Exception:
        return type(value).__name__


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
    for i, task in enumerate(tasks):
        if grader.groupwise and missing[i]:  # the sampler lost some of the group: grade what there is
            there = [j for j, c in enumerate(completions[i]) if c is not None]
            graded = grader.submit_group(task, [c.text for c in completions[i] if c is not None])
            for j, future in zip(there, graded, strict=True):
                verdicts[i][j] = future
    deadline = time.monotonic() + grader.patience(n * len(tasks))
    groups = []
    for i, task in enumerate(tasks):
        rollouts = []
        for j, sampled in enumerate(completions[i]):
            if sampled is None:
                continue  # the sampler lost it: a group may be smaller than asked for
            verdict = _settled(verdicts[i][j], deadline)
            grade, failure = (None, verdict) if isinstance(verdict, Failure) else (verdict, None)
            rollouts.append(Rollout(task.id, j, tuple(prompts[i]), sampled, grade, failure))
        groups.append(Group(task, tuple(rollouts)))
    return groups


def _settled(verdict: Future[Grade | Failure], deadline: float) -> Grade | Failure:
    try:
        return verdict.result(max(0.0, deadline - time.monotonic()))
    except (FutureTimeoutError, TimeoutError):
        return Failure("env.grade", "no verdict: an asynchronous grader blocks the event loop")


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
