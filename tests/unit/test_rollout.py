"""Collecting and grading: invariant 7, concurrency, hostile environments."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sdpo.config import EnvConfig
from sdpo.env import Env
from sdpo.errors import GradingError, SandboxError
from sdpo.rollout import Grader, SamplingParams, check_failures, collect
from sdpo.types import Completion, Grade, Group, Message, Task

PARAMS = SamplingParams(1.0, 1.0, None, 8)
TASKS = [Task(f"t{i}", (Message(role="user", content="q"),), target=str(i)) for i in range(3)]
PROMPTS = [(1, 2), (3,), (4, 5, 6)]


class Scripted:
    """A sampler that says fixed words, in a scrambled order."""

    def __init__(self, words: Sequence[str], lose: tuple[int, int] | None = None) -> None:
        self.words, self.lose = words, lose

    def sample(
        self, prompts: Sequence[tuple[int, ...]], n: int, params: SamplingParams, *, seed: int
    ) -> Iterator[tuple[int, int, Completion]]:
        for j in reversed(range(n)):
            for i in reversed(range(len(prompts))):
                if (i, j) != self.lose:
                    yield i, j, Completion(f"{self.words[j]} {i}", (i, j))

    def sync(self) -> None: ...
    def close(self) -> None: ...


class Base(Env):
    def tasks(self, split: str) -> Sequence[Task]:
        return TASKS

    def grade(self, task: Task, completion: str) -> Any:
        return Grade(1.0 if completion == f"yes {task.target}" else 0.0, "said no")


def run(env: Env, words: Sequence[str] = ("yes", "no"), sampler: Any = None, **config: Any) -> list[Group]:
    grader = Grader(env, EnvConfig(name="test", **config))
    try:
        chosen = sampler or Scripted(words)
        return collect(TASKS, PROMPTS, chosen, grader, len(words), PARAMS, seed=0)
    finally:
        grader.close()


def test_groups_are_in_order_and_graded_against_their_own_task() -> None:
    groups = run(Base())
    assert [g.task.id for g in groups] == ["t0", "t1", "t2"]
    for i, g in enumerate(groups):
        assert [r.completion.token_ids for r in g.rollouts] == [(i, 0), (i, 1)]
        assert [r.prompt_ids for r in g.rollouts] == [PROMPTS[i]] * 2
        assert g.rewards == (1.0, 0.0)
        assert [r.success for r in g.rollouts] == [True, False]


@pytest.mark.parametrize(("threshold", "successes"), [(0.5, 1), (0.3, 2), (0.71, 0)])
def test_success_threshold_decides_where_the_environment_does_not(threshold: float, successes: int) -> None:
    class Partial(Base):
        def grade(self, task: Task, completion: str) -> Any:
            return Grade(0.7 if completion.startswith("yes") else 0.3)

    assert len(run(Partial(), success_threshold=threshold)[0].successes) == successes


def test_environments_own_success_wins_over_the_threshold() -> None:
    class Strict(Base):
        def grade(self, task: Task, completion: str) -> Any:
            return Grade(0.9, success=False)

    assert run(Strict())[0].successes == ()


@pytest.mark.parametrize(
    ("outcome", "boundary", "said"),
    [
        (SandboxError("server down", hint="start it"), "sandbox", "server down"),
        (GradingError("no tests"), "env.grade", "no tests"),
        (ZeroDivisionError("oops"), "env.grade", "ZeroDivisionError: oops"),
        (None, "env.grade", "returned NoneType None, not a Grade"),
        (0.5, "env.grade", "returned float 0.5, not a Grade"),
        (Grade(float("nan")), "env.grade", "reward nan"),
        (Grade(float("inf")), "env.grade", "reward inf"),
    ],
)
def test_invariant_7_could_not_grade_is_a_failure_and_never_reward_0(outcome: Any, boundary: str, said: str) -> None:
    class Broken(Base):
        def grade(self, task: Task, completion: str) -> Any:
            if completion.startswith("no"):
                if isinstance(outcome, Exception):
                    raise outcome
                return outcome
            return super().grade(task, completion)

    for g in run(Broken()):
        assert g.rewards == (1.0,), "the others keep their verdict, and the statistics see them alone"
        failed = g.rollouts[1]
        assert failed.grade is None
        assert failed.reward is None
        assert failed.failure is not None
        assert failed.failure.boundary == boundary
        assert said in failed.failure.message


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_hanging_grader_is_given_up(kind: str) -> None:
    release = threading.Event()

    class Hanging(Base):
        def grade(self, task: Task, completion: str) -> Any:
            if completion == "no 1":
                if kind == "async":
                    return self.hang()
                release.wait(30)
            return super().grade(task, completion)

        async def hang(self) -> Grade:
            await asyncio.sleep(30)
            return Grade(1.0)

    start = time.monotonic()
    groups = run(Hanging(), timeout=0.3)
    release.set()
    assert time.monotonic() - start < 10
    failure = groups[1].rollouts[1].failure
    assert failure is not None
    assert "no verdict within env.timeout = 0.3 s" in failure.message
    assert sum(r.failure is not None for g in groups for r in g.rollouts) == 1


def test_grading_is_concurrent_and_bounded() -> None:
    lock, running, most = threading.Lock(), 0, 0

    class Slow(Base):
        def grade(self, task: Task, completion: str) -> Any:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.05)
            with lock:
                running -= 1
            return super().grade(task, completion)

    run(Slow(), ["yes"] * 8, max_concurrent=4)
    assert most == 4


def test_asynchronous_graders_and_groupwise_graders() -> None:
    class Async(Base):
        async def grade(self, task: Task, completion: str) -> Grade:
            await asyncio.sleep(0)
            return Grade(1.0 if completion.startswith("yes") else 0.0)

    class Ranked(Base):
        def grade_group(self, task: Task, completions: Sequence[str]) -> Sequence[Grade]:
            return [Grade(float(sorted(completions).index(c))) for c in completions]

    class Short(Base):
        def grade_group(self, task: Task, completions: Sequence[str]) -> Sequence[Grade]:
            return [Grade(1.0)]

    assert [g.rewards for g in run(Async())] == [(1.0, 0.0)] * 3
    assert [g.rewards for g in run(Ranked())] == [(1.0, 0.0)] * 3
    failure = run(Short())[0].rollouts[0].failure
    assert failure is not None
    assert failure.boundary == "env.grade_group"


def test_a_rollout_that_the_sampler_lost_leaves_a_smaller_group() -> None:
    groups = run(Base(), sampler=Scripted(("yes", "no"), lose=(1, 0)))
    assert [len(g.rollouts) for g in groups] == [2, 1, 2]


def test_a_step_fails_only_past_the_limit_and_names_the_reason() -> None:
    class Flaky(Base):
        def grade(self, task: Task, completion: str) -> Any:
            if completion.startswith("no"):
                raise SandboxError("connection refused")
            return super().grade(task, completion)

    groups = run(Flaky())
    check_failures(groups, 0.5)
    with pytest.raises(GradingError, match="3 of 6 rollouts could not be graded, most often: sandbox: connection"):
        check_failures(groups, 0.4)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


@pytest.mark.parametrize(
    "outcome",
    [SystemExit(1), StopIteration(), asyncio.CancelledError(), KeyboardInterrupt(), TimeoutError("mine"), Unreadable()],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("kind", ["sync", "async", "group"])
def test_whatever_a_grader_raises_is_a_failure_at_once(outcome: BaseException, kind: str) -> None:
    class Sync(Base):
        def grade(self, task: Task, completion: str) -> Any:
            raise outcome

    class Async(Base):
        async def grade(self, task: Task, completion: str) -> Grade:
            if isinstance(outcome, StopIteration):
                raise RuntimeError("a coroutine cannot raise it")
            raise outcome

    class Whole(Base):
        def grade_group(self, task: Task, completions: Sequence[str]) -> Any:
            raise outcome

    start = time.monotonic()
    groups = run({"sync": Sync, "async": Async, "group": Whole}[kind](), timeout=20)
    assert time.monotonic() - start < 15
    assert all(r.failure is not None and r.grade is None for g in groups for r in g.rollouts)


@pytest.mark.parametrize("verdict", [Grade(None), Grade("1x"), Grade(10**400), Grade(1.0, metrics=3)])  # type: ignore[arg-type]
@pytest.mark.parametrize("groupwise", [False, True])
def test_rubbish_in_a_grade_is_a_failure(verdict: Any, groupwise: bool) -> None:
    class Single(Base):
        def grade(self, task: Task, completion: str) -> Any:
            return verdict

    class Whole(Base):
        def grade_group(self, task: Task, completions: Sequence[str]) -> Any:
            return [verdict] * len(completions)

    groups = run(Whole() if groupwise else Single())
    assert all(r.failure is not None for g in groups for r in g.rollouts)


def test_numpy_values_and_missing_feedback_are_understood() -> None:
    import numpy as np

    class Numpy(Base):
        def grade(self, task: Task, completion: str) -> Any:
            return Grade(np.float32(1), feedback=None, success=np.bool_(True), metrics={"x": float("nan"), "y": 2})  # type: ignore[arg-type]

    rollout = run(Numpy())[0].rollouts[0]
    assert rollout.success
    assert rollout.grade == Grade(1.0, "", True, {"y": 2.0})


def test_an_asynchronous_grader_that_blocks_does_not_hang_the_step() -> None:
    class Blocking(Base):
        async def grade(self, task: Task, completion: str) -> Grade:
            time.sleep(8)
            return Grade(1.0)

    grader = Grader(Blocking(), EnvConfig(name="test", timeout=0.2))
    start = time.monotonic()
    groups = collect(TASKS, PROMPTS, Scripted(("yes",)), grader, 1, PARAMS, seed=0)
    assert time.monotonic() - start < 15
    assert any(r.failure is not None and "blocks" in r.failure.message for g in groups for r in g.rollouts)


def test_a_groupwise_grader_gets_what_the_sampler_did_not_lose() -> None:
    class Whole(Base):
        def grade_group(self, task: Task, completions: Sequence[str]) -> Any:
            return [Grade(1.0) for _ in completions]

    groups = run(Whole(), sampler=Scripted(("yes", "no"), lose=(1, 0)))
    assert [len(g.graded) for g in groups] == [2, 1, 2]
