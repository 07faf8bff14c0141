"""`sdpo env new`: a package with a small working environment, its test and a recipe, to be changed into one's own.

The example is for the model of the lab, which is part of the package, knows 54 words and learns a new task in seconds on
a CPU: so a change can be tried at once. Not covered: publishing the package.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from sdpo.errors import ConfigError, boundary

__all__ = ["write_package"]

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")

_MODULE = '''"""Swap the last two of three digits: an environment to change into your own.

Its words are those of the lab's tiny model. Feedback "4 2 9 E p2 9" says: the attempt was 4 2 9, its first error is at
position 2, where 9 is wanted. For a language model write prompt and feedback as sentences.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdpo import Env, Grade, Message, Task
from sdpo.errors import ConfigError

DIGITS = tuple("0123456789")


class {cls}(Env):
    """Digits to reorder, "ba 4 2 9" -> "4 9 2"; splits "train" and "test".

    Args:
        word: the name of the task, one that the model knows.
    """

    def __init__(self, word: str = "ba") -> None:
        self.word = word

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in ("train", "test"):
            raise ConfigError(f"{name} has no split {{split!r}}", hint="train or test")
        return [self._task(number) for number in range(1000) if (number % 7 == 0) == (split == "test")]

    def grade(self, task: Task, completion: str) -> Grade:
        words, wanted = completion.split(), task.target.split()
        if words == wanted:
            return Grade(reward=1.0)
        shown = [word if word in DIGITS else "_" for word in [*words, "_", "_", "_"][:3]]
        wrong = next((i for i in range(3) if shown[i] != wanted[i]), 3)
        right = wanted[wrong] if wrong < 3 else "_"
        return Grade(reward=0.0, feedback=f"{{' '.join(shown)}} E p{{wrong + 1}} {{right}}")

    def _task(self, number: int) -> Task:
        a, b, c = list(f"{{number:03d}}")
        prompt = (Message(role="user", content=f"{{self.word}} {{a}} {{b}} {{c}}"),)
        return Task(id=str(number), prompt=prompt, target=f"{{a}} {{c}} {{b}}", demonstration=f"{{a}} {{c}} {{b}}")
'''

_TEST = '''"""The contract that every environment keeps, and what is special about this one."""

from sdpo.env_check import check_env

from {module} import {cls}


def test_keeps_the_contract() -> None:
    assert [line for line in check_env({cls}()) if line.verdict == "failed"] == []


def test_feedback_says_what_is_wrong() -> None:
    env = {cls}()
    task = env.tasks("train")[428]
    assert task.prompt[0]["content"] == "ba 5 0 0"
    assert env.grade(task, "5 0 0").reward == 1.0
    assert env.grade(task, "5 1 0").feedback == "5 1 0 E p2 0"
    assert env.grade(task, "five").feedback == "_ _ _ E p1 5"
    assert env.grade(task, "5 0 0 0").feedback == "5 0 0 E p4 _"
'''

_PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.10"
dependencies = ["sdpo"]

[project.entry-points."sdpo.envs"]
{name} = "{module}:{cls}"

[tool.hatch.build.targets.wheel]
only-include = ["{module}.py"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_RECIPE = """# SDPO on {name}, seconds on a CPU: sdpo train train.toml

[algo]
name = "sdpo"

[model]
path = "lab" # for a language model give its name or folder, and leave [context] and [optim] out

[env]
name = "{module}.py:{cls}" # or "{name}", once the package is installed

[sampling]
max_tokens = 6

[context] # the lab's model knows no sentences
feedback = "always"
template = "{{question}}{{demonstration}}{{feedback}}"
demonstration_template = " S {{demonstration}}"
feedback_template = " T {{feedback}}"

[optim]
lr = 6e-4
warmup_steps = 0

[train]
steps = 20
prompts_per_step = 16

[eval]
every = 10
temperature = 0.0

[run]
dir = "runs/{name}"
"""


def write_package(name: str, folder: Path) -> list[Path]:
    """Write `folder/name` and return the files.

    Raises:
        ConfigError: the name is not usable as a package's, or the folder exists.
    """
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        raise ConfigError(f"{name!r} cannot name an environment", hint="lower-case letters, digits and hyphens")
    target = folder / name
    names = {"name": name, "module": module, "cls": "".join(part.capitalize() for part in name.split("-"))}
    files = {f"{module}.py": _MODULE, f"test_{module}.py": _TEST, "pyproject.toml": _PROJECT, "train.toml": _RECIPE}
    with boundary(f"create {target}", ConfigError, OSError, hint="choose another name or --folder"):
        target.mkdir(parents=True)
        for file, template in files.items():
            (target / file).write_text(template.format(**names), encoding="utf-8")
    return [target / file for file in files]
