"""The lab learns: SDPO over three seeds, beside GRPO at equal rollouts, with the bounds of docs/results/lab.md.

recipes/lab/mutations.py shows that a wrong sign, a shift by a token, a reversed EMA and an unmasked teacher break them.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2)
SDPO_AT_LEAST = 0.65
GAIN_OVER_GRPO = 0.10
DISTANCE = (0.02, 0.5)


def broken_bounds(success: float, distance: float) -> list[str]:
    """The bounds on one SDPO run of 100 steps that do not hold."""
    broken = []
    if success < SDPO_AT_LEAST:
        broken.append(f"success >= {SDPO_AT_LEAST}")
    if not DISTANCE[0] <= distance <= DISTANCE[1]:
        broken.append(f"teacher's distance in {DISTANCE}")
    return broken


def run(recipe: str, seed: int, folder: str) -> tuple[float, float, float]:
    """Greedy success before and after 100 steps, and the teacher's distance at the end."""
    import torch

    from sdpo import load_config, train
    from sdpo.run import RunDir

    torch.set_num_threads(1)
    overrides = ["--run.dir", f"{folder}/{recipe}-{seed}", "--run.seed", str(seed), "--eval.every", "100"]
    result = train(load_config([ROOT / "recipes" / "lab" / recipe], overrides))
    last = RunDir(result.run_dir).read_metrics()[-1]
    return result.evaluations[0][1].success, result.evaluations[-1][1].success, last.get("teacher/distance", 0.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sdpo_learns_from_feedback_and_faster_than_grpo(tmp_path: Path) -> None:
    jobs = [(recipe, seed, str(tmp_path)) for recipe in ("sdpo.toml", "grpo.toml") for seed in SEEDS]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = dict(zip([job[:2] for job in jobs], pool.map(run, *zip(*jobs, strict=True)), strict=True))
    for seed in SEEDS:
        before, after, distance = results["sdpo.toml", seed]
        assert before < 0.35
        assert broken_bounds(after, distance) == []
    mean = {
        recipe: sum(results[recipe, seed][1] for seed in SEEDS) / len(SEEDS) for recipe in ("sdpo.toml", "grpo.toml")
    }
    assert mean["sdpo.toml"] >= mean["grpo.toml"] + GAIN_OVER_GRPO, mean
    assert mean["grpo.toml"] > results["grpo.toml", 0][0] + 0.03, "the baseline learns too"
