"""Do the convergence tests see a broken method? Train the lab with one fault at a time and apply their bounds.

    python recipes/lab/mutations.py            prints the table of docs/results/lab-mutations.md

Faults: the sign of the loss, the teacher's logits one token late, the EMA the wrong way round, the teacher's padding
unmasked. Each must break at least one bound of tests/e2e/test_convergence.py.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import sdpo.algorithms.sdpo as sdpo_algorithm
import sdpo.teacher as teachers
from sdpo import load_config, train
from sdpo.run import RunDir
from tests.e2e.test_convergence import broken_bounds

HERE = Path(__file__).parent


@contextmanager
def sign_error() -> Iterator[None]:
    original = sdpo_algorithm.distil

    def negated(*args: Any) -> Any:
        out = original(*args)
        return dataclasses.replace(out, loss=-out.loss)

    with patch.object(sdpo_algorithm, "distil", negated):
        yield


@contextmanager
def one_token_late() -> Iterator[None]:
    original = teachers.completion_logits

    def late(*args: Any) -> torch.Tensor:
        return torch.roll(original(*args), 1, dims=1)

    with patch.object(teachers, "completion_logits", late):
        yield


@contextmanager
def ema_reversed() -> Iterator[None]:
    @torch.no_grad()
    def update(self: Any, step: int) -> None:
        torch._foreach_lerp_(list(self.weights.values()), list(self.policy.trainable().values()), 1 - self.rate)

    with patch.object(teachers._Ema, "update", update):
        yield


@contextmanager
def padding_unmasked() -> Iterator[None]:
    original = teachers.completion_logits

    def unmasked(model: Any, rows: Any, weights: Any) -> torch.Tensor:
        return original(model, dataclasses.replace(rows, prompt_mask=torch.ones_like(rows.prompt_mask)), weights)

    with patch.object(teachers, "completion_logits", unmasked):
        yield


@contextmanager
def nothing() -> Iterator[None]:
    yield


FAULTS: dict[str, Callable[[], Any]] = {
    "none": nothing,
    "sign of the loss": sign_error,
    "teacher one token late": one_token_late,
    "EMA the wrong way round": ema_reversed,
    "teacher's padding unmasked": padding_unmasked,
}


def main() -> None:
    print("| fault | held-out success after 100 steps | teacher's distance | bounds broken |")
    print("| --- | --- | --- | --- |")
    for name, fault in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder, fault():
            result = train(load_config([HERE / "sdpo.toml"], ["--run.dir", f"{folder}/run", "--run.seed", "0"]))
            records = RunDir(result.run_dir).read_metrics()
        success, distance = result.evaluations[-1][1].success, records[-1]["teacher/distance"]
        broken = broken_bounds(success, distance)
        print(f"| {name} | {success:.3f} | {distance:.3f} | {', '.join(broken) or 'none'} |", flush=True)


if __name__ == "__main__":
    main()
