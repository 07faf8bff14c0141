"""The table and the picture of docs/results/smollm2.md from the four run directories.

python recipes/smollm2/table.py runs/smollm2
"""

from __future__ import annotations

import sys
from pathlib import Path

from sdpo.plot import learning_curves
from sdpo.run import RunDir

RUNS = {"SDPO, LoRA": "sdpo-lora", "SDPO, full": "sdpo-full", "GRPO, LoRA": "grpo-lora", "GRPO, full": "grpo-full"}


def main() -> None:
    folder = Path(sys.argv[1])
    print("| run | one letter, before | after 10 steps | after 20 steps | right letter, before | after | minutes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    series = {}
    for name, run in RUNS.items():
        directory = RunDir(folder / run)
        evals, steps = directory.read_evals(), directory.read_metrics()
        cells = [f"{e['success']:.3f} ({e['interval'][0]:.3f} to {e['interval'][1]:.3f})" for e in evals]
        right = [f"{e['metrics']['correct']:.3f}" for e in (evals[0], evals[-1])]
        minutes = sum(step["seconds"]["step"] for step in steps) / 60
        print(f"| {name} | {' | '.join(cells)} | {' | '.join(right)} | {minutes:.1f} |")
        series[name] = [(64 * s["step"], s["success/rate"], s["success/rate"], s["success/rate"]) for s in steps]
    learning_curves(
        series,
        Path("docs/results/smollm2.png"),
        x_label="rollouts",
        y_label="training rollouts that are one letter",
        title="SmolLM2-135M: answering in one letter",
    )


if __name__ == "__main__":
    main()
