"""Adapters: reward functions in TRL's form, inspect_ai tasks, verifiers tasksets. The last two need their packages."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdpo.env_check import check_env
from sdpo.errors import ConfigError, GradingError, MissingDependencyError
from sdpo.types import Grade
from sdpo_envs.adapters.trl import TrlReward

REWARDS = """
def right(completions, answer, **rest):
    return [float(c.strip() == a) for c, a in zip(completions, answer)]

def chat(prompts, completions, answer):
    assert prompts[0][-1]["role"] == "user"
    return [float(c[-1]["content"] == a) for c, a in zip(completions, answer)]

async def later(completions, answer):
    return [0.5 for _ in completions]

def nothing(completions, **rest):
    return [None for _ in completions]

def broken(completions, **rest):
    return 1.0
"""

INSPECT = '''
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, choice, includes, scorer
from inspect_ai.solver import generate, multiple_choice, self_critique, system_message, use_tools
from inspect_ai.tool import tool

SUMS = [Sample(input=f"{a} + 1 = ?", target=str(a + 1), id=f"s{a}") for a in range(6)]

@scorer(metrics=[accuracy()])
def strict():
    async def score(state, target):
        good = state.output.completion.strip() == target.text
        return Score(value=1 if good else 0.25, explanation="" if good else "the sum is not " + state.output.completion[:20])
    return score

@task
def sums():
    return Task(dataset=SUMS, solver=[system_message("Be brief."), generate()], scorer=strict())

@task
def letters():
    samples = [Sample(input="Which is red?", choices=["grass", "blood"], target="B")]
    return Task(dataset=samples, solver=multiple_choice(), scorer=choice())

@tool
def adder():
    async def execute(x: int):
        """Add.

        Args:
            x: a number
        """
        return x
    return execute

@task
def tooled():
    return Task(dataset=SUMS, solver=[use_tools(adder()), generate()], scorer=includes())

@task
def twice():
    return Task(dataset=SUMS, solver=[generate(), generate()], scorer=includes())

@task
def boxed():
    return Task(dataset=SUMS, solver=generate(), scorer=includes(), sandbox="local")

@scorer(metrics=[accuracy()])
def raises():
    async def score(state, target):
        raise RuntimeError("scorer is down")
    return score

@task
def failing():
    return Task(dataset=SUMS, solver=generate(), scorer=raises())
'''

VERIFIERS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class Told(Sum):
    @vf.reward(weight=0.0)
    async def explain(self, task, trace) -> float:
        trace.info["feedback"] = "the sum is another"
        return 0.0

class Down(vf.Task[Data]):
    @vf.reward
    async def right(self, task, trace) -> float:
        raise RuntimeError("no")

class Boxed(Sum):
    async def setup(self, trace, runtime):
        return None

def load(cls):
    return [cls(Data(prompt=f"{a} + 1 = ?", system_prompt="Be brief.", answer=str(a + 1))) for a in range(6)]

class Sums(vf.Taskset[Sum]):
    def load(self):
        return load(Sum)

class ToldSums(vf.Taskset[Told]):
    def load(self):
        return load(Told)

class DownSums(vf.Taskset[Down]):
    def load(self):
        return load(Down)

class BoxedSums(vf.Taskset[Boxed]):
    def load(self):
        return load(Boxed)

class Endless(vf.Taskset[Sum]):
    INFINITE = True
    def load(self):
        while True:
            yield from load(Sum)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path with the modules above."""
    texts = {"their_rewards": REWARDS, "their_inspect": INSPECT, "their_verifiers": VERIFIERS}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in texts:
        sys.modules.pop(name, None)


def rows(folder: Path, records: list[dict[str, object]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def graded(env: TrlReward, text: str) -> Grade:
    grade = env.grade(env.tasks("train")[0], text)
    assert isinstance(grade, Grade)
    return grade


def test_trl_passes_columns_and_reads_feedback_from_one(module: Path) -> None:
    path = rows(module, [{"prompt": f"{a} + 1", "answer": str(a + 1), "hint": f"think {a}"} for a in range(4)])
    env = TrlReward(
        "their_rewards:right", path=path, feedback_column="hint", demonstration_column="answer", test_fraction=0
    )
    assert graded(env, " 1 ") == Grade(1.0, success=True)
    assert graded(env, "7") == Grade(0.0, feedback="think 0", success=False)
    assert [line for line in check_env(env, splits=["train"]) if line.verdict == "failed"] == []


def test_trl_chats_stay_chats_and_async_functions_are_awaited(module: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = rows(module, [{"prompt": chat, "answer": "x"}])
    assert graded(TrlReward("their_rewards:chat", path=path), "x").reward == 1.0
    assert graded(TrlReward("their_rewards:later", path=path), "x").reward == 0.5


@pytest.mark.parametrize("name", ["nothing", "broken"])
def test_trl_without_a_number_is_not_graded(module: Path, name: str) -> None:
    env = TrlReward(f"their_rewards:{name}", path=rows(module, [{"prompt": "p"}]))
    with pytest.raises(GradingError, match="not a list of one number"):
        graded(env, "x")


def test_names_that_point_nowhere_are_one_line(module: Path) -> None:
    path = rows(module, [{"prompt": "p"}])
    for name in ("their_rewards", "their_rewards:absent", "no_such_module:right"):
        with pytest.raises(ConfigError, match="reward function"):
            TrlReward(name, path=path)
    with pytest.raises(ConfigError, match="no field 'prompt'"):
        TrlReward("their_rewards:right", path=rows(module, [{"question": "p"}])).tasks("train")


def test_missing_packages_name_their_extra(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sdpo_envs.adapters import inspect_ai, reasoning_gym, verifiers

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for build, extra in (
        (lambda: inspect_ai.InspectTask("a:b"), "inspect"),
        (lambda: verifiers.VerifiersTaskset("a"), "verifiers"),
        (lambda: reasoning_gym.ReasoningGym("chain_sum"), "rg"),
    ):
        with pytest.raises(MissingDependencyError, match=rf"sdpo\[{extra}\]"):
            build()


class TestInspect:
    @pytest.fixture(autouse=True)
    def _installed(self, module: Path) -> None:
        pytest.importorskip("inspect_ai", reason="inspect_ai is not installed")

    def test_prompt_score_and_explanation(self) -> None:
        from sdpo_envs.adapters.inspect_ai import InspectTask

        env = InspectTask("their_inspect:sums", splits={"train": 4, "test": 2})
        task = env.tasks("train")[1]
        assert [m["content"] for m in task.prompt] == ["Be brief.", "1 + 1 = ?"]
        assert env.grade(task, "2") == Grade(1.0, success=True)
        assert env.grade(task, "3") == Grade(0.25, feedback="the sum is not 3", success=False)
        assert [t.id for t in env.tasks("test")] == ["s4", "s5"]
        assert [line for line in check_env(env) if line.verdict == "failed"] == []

    def test_solvers_that_read_the_answer_run(self) -> None:
        from sdpo_envs.adapters.inspect_ai import InspectTask

        env = InspectTask("their_inspect:letters")
        (task,) = env.tasks("test")
        assert "blood" in task.prompt[0]["content"]
        assert env.grade(task, "ANSWER: B").reward == 1.0
        assert env.grade(task, "ANSWER: A").reward == 0.0

    @pytest.mark.parametrize(
        ("name", "reason"), [("tooled", "tools"), ("twice", "more than once"), ("boxed", "sandbox")]
    )
    def test_what_needs_more_than_one_turn_is_refused(self, name: str, reason: str) -> None:
        from sdpo_envs.adapters.inspect_ai import InspectTask

        with pytest.raises(ConfigError, match=reason):
            InspectTask(f"their_inspect:{name}").tasks("test")

    def test_a_scorer_that_raises_is_not_a_wrong_answer(self) -> None:
        from sdpo_envs.adapters.inspect_ai import InspectTask

        env = InspectTask("their_inspect:failing")
        with pytest.raises(GradingError, match="scorer is down"):
            env.grade(env.tasks("test")[0], "1")


class TestVerifiers:
    @pytest.fixture(autouse=True)
    def _installed(self, module: Path) -> None:
        pytest.importorskip("verifiers.v1", reason="verifiers is not installed")

    @staticmethod
    async def grades(name: str, texts: list[str]) -> list[Grade]:
        from sdpo_envs.adapters.verifiers import VerifiersTaskset

        env = VerifiersTaskset(f"their_verifiers:{name}", splits={"train": 4, "test": 2})
        return [await env.grade(env.tasks("train")[1], text) for text in texts]

    def test_prompt_reward_and_feedback(self) -> None:
        import asyncio

        from sdpo_envs.adapters.verifiers import VerifiersTaskset

        env = VerifiersTaskset("their_verifiers:Sums")
        assert [m["content"] for m in env.tasks("train")[1].prompt] == ["Be brief.", "1 + 1 = ?"]
        right, wrong = asyncio.run(self.grades("Sums", ["2", "30"]))
        assert right == Grade(1.0, success=True, metrics={"length": 1.0})
        assert wrong == Grade(
            0.0, feedback="Not everything was earned: right: 0.", success=False, metrics={"length": 2.0}
        )
        assert asyncio.run(self.grades("ToldSums", ["3"]))[0].feedback == "the sum is another"
        assert [line for line in check_env(env, splits=["train"]) if line.verdict == "failed"] == []

    def test_refusals_and_failures(self) -> None:
        import asyncio

        from sdpo_envs.adapters.verifiers import VerifiersTaskset

        with pytest.raises(ConfigError, match="prepares or reads a runtime"):
            VerifiersTaskset("their_verifiers:BoxedSums").tasks("train")
        with pytest.raises(ConfigError, match="endless"):
            VerifiersTaskset("their_verifiers:Endless").tasks("train")
        assert len(VerifiersTaskset("their_verifiers:Endless", splits={"train": 9}).tasks("train")) == 9
        with pytest.raises(GradingError, match="score verifiers"):
            asyncio.run(self.grades("DownSums", ["2"]))
