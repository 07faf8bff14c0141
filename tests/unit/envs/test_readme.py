"""envs/README.md: its commands run in order, its recipes are ones that the environments take."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdpo_envs.judge import Judge
from sdpo_envs.mixture import Mixture

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

README = Path(__file__).resolve().parents[3] / "envs" / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_commands(tmp_path: Path, model_dir: str) -> None:
    """The training command gets a tiny model and two steps; everything else runs as it is written."""
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert [line.split()[0] for line in commands] == ["sdpo", "cd", "sdpo", "sdpo", "echo", "python", "sdpo"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    folder = tmp_path
    for line in commands:
        if line.startswith("cd "):
            folder = folder / line.removeprefix("cd ")
            continue
        if line.startswith("sdpo train"):
            line += f" --model.path {model_dir} --train.steps 2 --eval.tasks 2 --train.prompts_per_step 2"
        done = subprocess.run(
            line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert (folder / "runs" / "parity" / "metrics.jsonl").read_text().count("\n") == 2
    assert list((folder / "runs" / "parity" / "rollouts").iterdir())


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda text: text.split('"')[1])
def test_recipes(block: str) -> None:
    table: dict[str, Any] = tomllib.loads(block)["env"]
    cls = {"judge": Judge, "mixture": Mixture}[table["name"]]
    inspect.signature(cls).bind(**table["args"])
    for part in table["args"].get("parts", {}).values():
        assert set(part) <= {"env", "args", "weight", "success_at", "splits"}
