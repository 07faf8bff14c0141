"""SDPO beside GRPO on the lab task, from the shipped checkpoint: `make quickstart`.

Both train for 100 steps of 16 questions x 8 rollouts. Prints the two curves and writes runs/quickstart/{sdpo,grpo} and
runs/quickstart/curves.png. The task is built so that feedback can be used (recipes/lab/README.md): this shows that the
machinery works, not what a language model would gain.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from sdpo import TrainResult, load_config, train
from sdpo.plot import learning_curves

HERE = Path(__file__).parent


def main() -> None:
    out = Path("runs/quickstart")
    results: dict[str, TrainResult] = {}
    for name in ("sdpo", "grpo"):
        overrides = ["--run.dir", str(out / name), "--run.overwrite", *sys.argv[1:]]
        start = time.monotonic()
        config = load_config([HERE / f"{name}.toml"], overrides)
        results[name] = train(config, sys.argv)
        print(f"{name}: {results[name].steps} steps in {time.monotonic() - start:.0f} s")
    size = config.train.prompts_per_step * config.train.rollouts_per_prompt
    print("\nshare of held-out questions answered right, greedily")
    print(f"{'rollouts':>10}  {'SDPO':>6}  {'GRPO':>6}")
    for (step, sdpo), (_, grpo) in zip(results["sdpo"].evaluations, results["grpo"].evaluations, strict=True):
        print(f"{step * size:>10,}  {sdpo.success:>6.3f}  {grpo.success:>6.3f}")
    learning_curves(
        {
            name.upper(): [(step * size, r.success, *r.interval) for step, r in result.evaluations]
            for name, result in results.items()
        },
        out / "curves.png",
        x_label="rollouts",
        y_label="held-out success (greedy)",
        title="The lab task: SDPO and GRPO at equal rollouts",
    )
    print(f"\n{out}/sdpo and {out}/grpo hold the runs, {out}/curves.png the picture")


if __name__ == "__main__":
    main()
