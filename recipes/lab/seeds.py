"""SDPO and GRPO on the lab over five seeds: the table and the picture of docs/results/lab.md.

python recipes/lab/seeds.py [--train.steps 200 ...]     writes runs/lab-seeds/ and docs/results/lab.png
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from sdpo import load_config
from sdpo.plot import learning_curves
from sdpo.statistics import t_interval

HERE = Path(__file__).parent
SEEDS = range(5)


def run(job: tuple[str, int]) -> list[tuple[int, float]]:
    """(rollouts, greedy success) of one run."""
    import torch

    from sdpo import train

    torch.set_num_threads(1)
    name, seed = job
    overrides = ["--run.dir", f"runs/lab-seeds/{name}-{seed}", "--run.overwrite", "--run.seed", str(seed)]
    config = load_config([HERE / f"{name}.toml"], [*overrides, *sys.argv[1:]])
    size = config.train.prompts_per_step * config.train.rollouts_per_prompt
    return [(step * size, result.success) for step, result in train(config).evaluations]


def main() -> None:
    jobs = [(name, seed) for name in ("sdpo", "grpo") for seed in SEEDS]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        curves = dict(zip(jobs, pool.map(run, jobs), strict=True))
    rollouts = [x for x, _ in curves["sdpo", 0]]
    at = {name: [[curves[name, s][i][1] for s in SEEDS] for i in range(len(rollouts))] for name in ("sdpo", "grpo")}
    print("| rollouts | SDPO | GRPO |")
    print("| --- | --- | --- |")
    for i, x in enumerate(rollouts):
        cells = [f"{statistics.mean(v[i]):.3f} ± {statistics.stdev(v[i]):.3f}" for v in at.values()]
        print(f"| {x:,} | {' | '.join(cells)} |")
    series = {}
    for name, values in at.items():
        intervals = [t_interval(v) for v in values]
        series[name.upper()] = [(x, i.mean, i.low, i.high) for x, i in zip(rollouts, intervals, strict=True)]
    learning_curves(
        series,
        Path("docs/results/lab.png"),
        x_label="rollouts",
        y_label="held-out success (greedy)",
        title="The lab task, five seeds: mean and 95 % interval",
    )


if __name__ == "__main__":
    main()
