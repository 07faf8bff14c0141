"""The plug-in kit: the contract check finds bad environments, the command line, the scaffold."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from sdpo.env import Env, load_env
from sdpo.env_check import check_env
from sdpo.env_cli import app
from sdpo.env_new import write_package
from sdpo.errors import ConfigError, EnvNotFoundError, GradingError, MissingDependencyError
from sdpo.types import Grade, Message, Task

HERE = Path(__file__)


class Good(Env):
    """Answer with the word after the colon; a model environment.

    Args:
        size: how many tasks.
    """

    def __init__(self, size: int = 4) -> None:
        self.size = size

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in ("train", "test"):
            raise ConfigError(f"no split {split!r}")
        return [self.made(f"{split}-{i}", f"secret{i}") for i in range(self.size)]

    @staticmethod
    def made(name: str, word: str, **more: Any) -> Task:
        return Task(name, (Message(role="user", content="Guess the word."),), target=word, demonstration=word, **more)

    def grade(self, task: Task, completion: str) -> Any:
        good = completion == task.target
        return Grade(float(good), "" if good else "another word")

    def task_from(self, row: dict[str, Any]) -> Task:
        return self.made("case", row["gold"])


class Asynchronous(Good):
    async def grade(self, task: Task, completion: str) -> Any:
        await asyncio.sleep(0)
        return super().grade(task, completion)


class RepeatedIds(Good):
    def tasks(self, split: str) -> Sequence[Task]:
        return [self.made("same", task.target) for task in super().tasks(split)]


class Unordered(Good):
    calls = 0

    def tasks(self, split: str) -> Sequence[Task]:
        Unordered.calls += 1
        tasks = list(super().tasks(split))
        return tasks[:: -1 if Unordered.calls % 2 else 1]


class NotJson(Good):
    def tasks(self, split: str) -> Sequence[Task]:
        return [self.made(task.id, task.target, metadata={"path": Path("x")}) for task in super().tasks(split)]


class NoUser(Good):
    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(t.id, (*t.prompt, Message(role="assistant", content="x")), t.target) for t in super().tasks(split)]


class AnySplit(Good):
    def tasks(self, split: str) -> Sequence[Task]:
        return super().tasks(split if split in ("train", "test") else "train")


class GoldFails(Good):
    def grade(self, task: Task, completion: str) -> Any:
        return Grade(0.0, "no")


class Pays(Good):
    def grade(self, task: Task, completion: str) -> Any:
        return Grade(1.0, "fine")


class Silent(Good):
    def grade(self, task: Task, completion: str) -> Any:
        return Grade(float(completion == task.target))


class Leaks(Good):
    def grade(self, task: Task, completion: str) -> Any:
        return Grade(float(completion == task.target), f"it was {task.target}")


class Declared(Leaks):
    feedback_reveals_target: ClassVar[bool] = True


class Raises(Good):
    def grade(self, task: Task, completion: str) -> Any:
        return super().grade(task, str(completion.split()[0]))


class Hangs(Good):
    def grade(self, task: Task, completion: str) -> Any:
        if len(completion) > 100_000:
            time.sleep(5)
        return super().grade(task, completion)


class Moody(Good):
    graded = 0

    def grade(self, task: Task, completion: str) -> Any:
        Moody.graded += 1
        return Grade(float(completion == task.target), f"attempt number {Moody.graded}")


class NotANumber(Good):
    def grade(self, task: Task, completion: str) -> Any:
        return Grade(float(completion == task.target), "x", metrics={"m": float("nan")})


class NotAGrade(Good):
    def grade(self, task: Task, completion: str) -> Any:
        return float(completion == task.target)


class Unpicklable(Good):
    def __init__(self) -> None:
        super().__init__()
        self.key = lambda: 1


class Copies(Good):
    def grade(self, task: Task, completion: str) -> Any:
        good = "Guess" in completion or completion == task.target
        return Grade(float(good), "another word")


class Groups(Good):
    def grade_group(self, task: Task, completions: Sequence[str]) -> Any:
        return [Grade(float(c == task.target), "" if c == task.target else "another word") for c in completions]


class Empty(Good):
    def tasks(self, split: str) -> Sequence[Task]:
        return [] if split == "train" else super().tasks(split)


@pytest.mark.parametrize("env", [Good(), Asynchronous(), Groups(), Declared(), Silent(), Copies()])
def test_good_environments_pass(env: Env) -> None:
    assert [line for line in check_env(env) if line.verdict == "failed"] == []


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (RepeatedIds(), "ids are unique"),
        (Unordered(), "tasks are the same when asked again"),
        (NotJson(), "tasks are JSON"),
        (NoUser(), "prompts end with the user's question"),
        (AnySplit(), "an unknown split is refused"),
        (GoldFails(), "demonstrations succeed"),
        (Pays(), "empty and garbage completions fail"),
        (Leaks(), "feedback keeps the target back"),
        (Raises(), "anything that a model writes gets a grade"),
        (Hangs(), "anything that a model writes gets a grade"),
        (Moody(), "grades are the same when repeated"),
        (NotANumber(), "demonstrations succeed"),
        (NotAGrade(), "demonstrations succeed"),
        (Unpicklable(), "the environment can be sent to another process"),
        (Empty(), "tasks('train')"),
    ],
)
def test_each_fault_is_found(env: Env, name: str) -> None:
    report = {line.name: line for line in check_env(env, timeout=1.0)}
    assert report[name].verdict == "failed", report
    assert report[name].detail


def test_notes_say_what_is_missing() -> None:
    def notes(env: Env) -> str:
        return " / ".join(
            f"{line.name}: {line.detail}"
            for line in check_env(env, splits=["train", "valid"])
            if line.verdict == "note"
        )

    assert "failures have feedback: none for" in notes(Silent())
    assert "there is no such split" in notes(Good())
    assert "it is declared to reveal it" in notes(Declared())
    assert "it succeeds on 4 of 4" in notes(Copies())


def run(*arguments: str, text: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), input=text)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


GOOD = f"{HERE}:Good"


ENTRY_POINTS = {
    "science": ("sdpo_envs.science:Science", {"path": "x"}),
    "gpqa": ("sdpo_envs.gpqa:Gpqa", {"path": "x"}),
    "mmlu_pro": ("sdpo_envs.mmlu_pro:MmluPro", {"path": "x"}),
    "tooluse": ("sdpo_envs.tooluse:Tooluse", {"path": "x"}),
    "bfcl": ("sdpo_envs.bfcl:Bfcl", {"path": "x"}),
    "math": ("sdpo_envs.math:Math", {"path": "x"}),
    "demonstrations": ("sdpo_envs.demonstrations:Demonstrations", {"path": "x"}),
    "mixture": ("sdpo_envs.mixture:Mixture", {"parts": {"a": {"env": "rg:gcd"}}}),
    "judge": ("sdpo_envs.judge:Judge", {"env": "trl:json:loads", "args": {"path": "x"}}),
    "rg:": ("sdpo_envs.adapters.reasoning_gym:ReasoningGym", {}),
    "trl:": ("sdpo_envs.adapters.trl:TrlReward", {"path": "x"}),
    "inspect:": ("sdpo_envs.adapters.inspect_ai:InspectTask", {}),
    "verifiers:": ("sdpo_envs.adapters.verifiers:VerifiersTaskset", {}),
}


def test_bundled_environments_load_by_name_and_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constructing reads no data and imports nothing heavy: names can be listed and cases graded without either."""
    points = {name: EntryPoint(name, value, "sdpo.envs") for name, (value, _) in ENTRY_POINTS.items()}
    monkeypatch.setattr("sdpo.env._entry_points", lambda: points)
    suffix = {"rg:": "gcd", "trl:": "json:loads", "inspect:": "a:b", "verifiers:": "c"}
    for name, (_, arguments) in ENTRY_POINTS.items():
        try:
            env = load_env(name + suffix.get(name, ""), **arguments)
        except MissingDependencyError:
            continue  # its extra is not installed
        env.close()
    with pytest.raises(EnvNotFoundError, match="did you mean science"):
        load_env("sciense")
    with pytest.raises(ConfigError, match="multiple values for argument 'dataset'"):
        load_env("rg:gcd", dataset="other")


def test_list_names_each_environment() -> None:
    code, out = run("list")
    assert code == 0
    assert any(line.startswith("lab ") and "digits" in line for line in out.splitlines())


def test_show_takes_the_environment_s_own_arguments() -> None:
    code, out = run("show", GOOD, "--size", "2", "--split", "test")
    assert code == 0
    for words in (
        "a model environment",
        "2 tasks in test; the first, test-0",
        "[user] Guess the word.",
        "[target] secret0",
    ):
        assert words in out


def test_check_reports_and_sets_the_exit_code() -> None:
    code, out = run("check", GOOD, "--limit", "2")
    assert code == 0
    assert "checks passed" in out
    code, out = run("check", f"{HERE}:Leaks")
    assert code == 1
    assert "failed  feedback keeps the target back: " in out


def test_grade_one(tmp_path: Path) -> None:
    file = tmp_path / "answer.txt"
    file.write_text("secret1")
    code, out = run("grade", GOOD, "--task", "train-1", "--completion", str(file))
    assert code == 0
    assert json.loads(out) == {"id": "train-1", "reward": 1.0, "feedback": "", "success": None, "metrics": {}}
    _, out = run("grade", f"{HERE}:Asynchronous", "--task", "test-1", "--completion", "-", text="x")
    assert json.loads(out)["feedback"] == "another word"


def test_grade_many_by_id_and_by_case(tmp_path: Path) -> None:
    rows = [
        {"task": "train-0", "completion": "secret0"},
        {"id": "c1", "gold": "word", "response": "word"},
        {"id": "c2", "env": "x", "input": {"gold": "word", "response": "other"}},
        {"id": "c3", "input": {"response": "other"}},
        {"task": "train-9", "completion": "x"},
        {"task": "train-0"},
    ]
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    code, out = run("grade", GOOD, "--input", str(file))
    grades = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [grade["id"] for grade in grades] == ["train-0", "c1", "c2", "c3", "train-9", "train-0"]
    assert [grade.get("reward") for grade in grades] == [1.0, 1.0, 0.0, None, None, None]
    assert "KeyError" in grades[3]["error"]
    assert "did you mean train-" in grades[4]["error"]
    assert "no completion" in grades[5]["error"]


def test_what_cannot_be_graded_is_an_error_not_a_zero(tmp_path: Path) -> None:
    module = tmp_path / "down.py"
    module.write_text(
        "from sdpo.errors import GradingError\nfrom test_kit import Good\n\n\nclass Down(Good):\n"
        "    def grade(self, task, completion):\n        raise GradingError('the checker is down')\n"
    )
    sys.modules.setdefault("test_kit", sys.modules[__name__])
    code, out = run("grade", f"{module}:Down", "--input", "-", text='{"task": "train-0", "completion": "x"}\n')
    assert code == 1
    assert json.loads(out) == {"id": "train-0", "error": "the checker is down"}
    with pytest.raises(GradingError):
        run("grade", f"{module}:Down", "--task", "train-0", "--completion", "-", text="x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grade", GOOD], "nothing to grade"),
        (["grade", GOOD, "--task", "train-0"], "nothing to grade"),
        (["grade", GOOD, "--input", "absent.jsonl"], "could not read absent.jsonl"),
        (["show", GOOD, "--colour", "red"], "it takes: size"),
        (["show", f"{HERE}:Gud"], "could not load 'Gud'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        run(*arguments)
    assert isinstance(caught.value, (ConfigError, LookupError))


def test_the_command_line_does_not_import_torch() -> None:
    code = "import sys, sdpo.env_cli, sdpo.env_check, sdpo.env_new; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["swap", "my-env2"])
def test_the_scaffold_is_small_and_keeps_the_contract(tmp_path: Path, name: str) -> None:
    code, out = run("new", name, "--folder", str(tmp_path))
    assert code == 0
    assert out.count("wrote ") == 4
    folder = tmp_path / name
    module = name.replace("-", "_")
    assert len((folder / f"{module}.py").read_text().splitlines()) <= 45
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=folder, check=True, capture_output=True
    )
    cls = "Swap" if name == "swap" else "MyEnv2"
    assert run("check", f"{folder / module}.py:{cls}")[0] == 0
    assert f'{name} = "{module}:{cls}"' in (folder / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["My", "a b", "../x", "class", "-a", ""])
def test_names_that_cannot_be_a_package_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name an environment"):
        write_package(name, tmp_path)


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    write_package("swap", tmp_path)
    with pytest.raises(ConfigError, match="choose another name"):
        write_package("swap", tmp_path)
