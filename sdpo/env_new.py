"""`sdpo env new`: a package with a small working environment, its test and a recipe, to be changed into one's own.

The example is one that a model of 135 million parameters can learn on a laptop: mostly, to answer in one word. Not
covered: publishing the package.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from sdpo.errors import ConfigError, boundary

__all__ = ["write_package"]

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")

_MODULE = '''"""Is a number even? An environment to change into your own.

Try it:  sdpo env show {module}.py:{cls}
         sdpo env check {module}.py:{cls}
"""

from __future__ import annotations

from collections.abc import Sequence

from sdpo import Env, Grade, Message, Task
from sdpo.errors import ConfigError


class {cls}(Env):
    """Is a number even? Yes or no, in one word; splits "train" and "test".

    Args:
        digits: length of the numbers.
    """

    def __init__(self, digits: int = 2) -> None:
        self.digits = digits

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in ("train", "test"):
            raise ConfigError(f"{name} has no split {{split!r}}", hint="train or test")
        numbers = range(10 ** (self.digits - 1), 10**self.digits)
        return [self._task(number) for number in numbers if (number % 7 == 0) == (split == "test")]

    def grade(self, task: Task, completion: str) -> Grade:
        word = completion.strip().rstrip(".").lower()
        if word == task.target:
            return Grade(reward=1.0)
        if word in ("yes", "no"):
            return Grade(reward=0.0, feedback="Wrong. An even number ends in 0, 2, 4, 6 or 8.")
        return Grade(reward=0.0, feedback="Reply with one word: Yes or No.")

    def _task(self, number: int) -> Task:
        prompt = (Message(role="user", content=f"Answer yes or no: is {{number}} an even number?"),)
        answer = "no" if number % 2 else "yes"
        return Task(id=str(number), prompt=prompt, target=answer, demonstration=answer)
'''

_TEST = '''"""The contract that every environment keeps, and what is special about this one."""

from sdpo.env_check import check_env

from {module} import {cls}


def test_keeps_the_contract() -> None:
    assert [line for line in check_env({cls}()) if line.verdict == "failed"] == []


def test_feedback_says_what_is_wrong() -> None:
    env = {cls}()
    task = next(task for task in env.tasks("train") if task.target == "no")
    assert env.grade(task, "No.").reward == 1.0
    assert "one word" in env.grade(task, "No, it is odd.").feedback
    assert "even number ends in" in env.grade(task, "yes").feedback
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

_RECIPE = """# SDPO on {name}: sdpo train train.toml
# Minutes on a laptop's CPU. A larger model in model.path learns more; leave [context] and [loss] out for it.

[algo]
name = "sdpo"

[model]
path = "HuggingFaceTB/SmolLM2-135M-Instruct"

[env]
name = "{module}.py:{cls}" # or "{name}", once the package is installed

[sampling]
max_tokens = 8

[context] # a model of this size reads short contexts best
feedback = "always"
template = "{{question}}{{demonstration}}{{feedback}}"
demonstration_template = "\\n\\nAnswer: {{demonstration}}"
feedback_template = "\\n\\n{{feedback}}"

[loss]
divergence = "forward_kl"

[optim]
lr = 2e-5
warmup_steps = 0

[train]
steps = 20
prompts_per_step = 8
rollouts_per_prompt = 8

[eval]
every = 10

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
