"""Invariant 10: a run that is killed (SIGKILL, several times, anywhere) and resumed equals an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
RUN = "import sys; from sdpo import load_config, train; train(load_config(sys.argv[1].split(','), sys.argv[2:]))"
SHORT = """
[train]
steps = 10
prompts_per_step = 4
rollouts_per_prompt = 4
save_every = 2
[eval]
every = 3
tasks = 32
[run]
rollouts_every = 5
"""


def start(recipe: str, *overrides: str, extra: Path) -> subprocess.Popen[str]:
    files = f"{ROOT / 'recipes' / 'lab' / recipe},{extra}"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", RUN, files, *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}:{ROOT / 'sandbox'}"},
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sdpo.toml", "grpo.toml"])
def test_invariant_10_killed_and_resumed_equals_uninterrupted(recipe: str, tmp_path: Path) -> None:
    extra = tmp_path / "short.toml"
    extra.write_text(SHORT + ("[teacher]\nrate = 0.3\n" if recipe == "sdpo.toml" else ""))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = start(recipe, "--run.dir", str(whole), extra=extra)
    assert run.wait(240) == 0, run.stderr and run.stderr.read()

    delays = random.Random(0)
    run = start(recipe, "--run.dir", str(broken), extra=extra)
    kills = 0
    for target in (1, 4, 7, 9):
        deadline = time.monotonic() + 120
        while steps_done(broken) < target and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delays.uniform(0, 0.15))
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
            kills += 1
        run.wait()
        run = start(recipe, "--run.dir", str(broken), "--run.resume", extra=extra)
    assert kills >= 2, "the test must interrupt what it is about"
    assert run.wait(240) == 0, run.stderr and run.stderr.read()

    assert lines(broken / "metrics.jsonl") == lines(whole / "metrics.jsonl")
    assert lines(broken / "evals.jsonl") == lines(whole / "evals.jsonl")
    for file in ("model.safetensors", "trainer/teacher.safetensors"):
        first, second = (load_file(folder / "checkpoints" / "000010" / file) for folder in (whole, broken))
        assert first.keys() == second.keys()
        assert all((first[name] == second[name]).all() for name in first)
    assert not list((broken / "checkpoints").glob(".*")), "no half-written checkpoint is left"
    for name in ("000005.jsonl", "000010.jsonl"):
        assert (broken / "rollouts" / name).read_text() == (whole / "rollouts" / name).read_text()


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_nothing_is_lost(tmp_path: Path) -> None:
    """Files may grow to 300 kB only, less than a checkpoint's weights."""
    extra = tmp_path / "short.toml"
    extra.write_text(SHORT)
    files = f"{ROOT / 'recipes' / 'lab' / 'sdpo.toml'},{extra}"
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
    command = "from sdpo.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'envs'}:{ROOT / 'sandbox'}"}
    arguments = ["train", *files.split(","), "--run.dir", str(tmp_path / "run"), "--train.save_every", "2"]
    full = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", limited + command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert full.returncode == 1
    assert "Traceback" not in full.stderr
    said = [line for line in full.stderr.splitlines() if line.startswith("sdpo: ")]
    assert len(said) == 1
    assert "could not write checkpoint" in said[0]
    assert "--run.resume" in said[0]
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    more = [*arguments, "--run.resume"]
    resumed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command, *more],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert steps_done(tmp_path / "run") == 10
