"""envs/README.md: its commands run in order, its recipes are ones that the environments take."""

from __future__ import annotations

import inspect
import json
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


def test_commands(tmp_path: Path) -> None:
    """From nothing to a trained environment: everything runs as it is written, and the reward rises."""
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert [line.split()[0] for line in commands] == ["sdpo", "cd", "sdpo", "sdpo", "echo", "python", "sdpo"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    folder = tmp_path
    for line in commands:
        if line.startswith("cd "):
            folder = folder / line.removeprefix("cd ")
            continue
        done = subprocess.run(
            line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    evaluations = [json.loads(line) for line in (folder / "runs" / "swap" / "evals.jsonl").read_text().splitlines()]
    assert evaluations[0]["success"] < 0.1
    assert evaluations[-1]["success"] > 0.9
    assert (folder / "runs" / "swap" / "metrics.jsonl").exists()
    assert list((folder / "runs" / "swap" / "rollouts").iterdir())


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda text: text.split('"')[1])
def test_recipes(block: str) -> None:
    table: dict[str, Any] = tomllib.loads(block)["env"]
    cls = {"judge": Judge, "mixture": Mixture}[table["name"]]
    inspect.signature(cls).bind(**table["args"])
    for part in table["args"].get("parts", {}).values():
        assert set(part) <= {"env", "args", "weight", "success_at", "splits"}
