"""Trackers: tensorboard for real; of wandb and trackio, which are not installed, what they are called with."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from sdpo.errors import BackendError, MissingDependencyError
from sdpo.track import open_tracker

CONFIG = {"algo": {"name": "sdpo"}, "optim": {"lr": 1e-5}}
RECORD = {"step": 3, "loss": 0.5, "reward/mean": 1, "broken": math.nan, "text": "x", "seconds": {"step": 2.0}}
NUMBERS = {"loss": 0.5, "reward/mean": 1.0}


class FakeModule(types.ModuleType):
    """Records calls as (name, positional, keyword); `init` returns the module itself, which then plays the run."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.error = error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> FakeModule:
            if self.error is not None:
                raise self.error
            self.calls.append((name, args, kwargs))
            return self

        return call


def test_no_tracker_is_a_tracker_that_does_nothing(tmp_path: Path) -> None:
    with open_tracker(None, tmp_path, CONFIG, "run") as tracker:
        tracker.log(RECORD, 3)
    assert list(tmp_path.iterdir()) == []


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_writes_finite_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with open_tracker("tensorboard", tmp_path, CONFIG, "run") as tracker:
        tracker.log(RECORD, 3)
        tracker.log({"loss": 0.25}, 4)
        assert read_events(tmp_path / "tensorboard")["loss"] == [(3, 0.5), (4, 0.25)]  # before it is closed
    assert read_events(tmp_path / "tensorboard") == {"loss": [(3, 0.5), (4, 0.25)], "reward/mean": [(3, 1.0)]}


def test_tensorboard_after_a_resumption_hides_what_was_logged_in_vain(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with open_tracker("tensorboard", tmp_path, CONFIG, "run") as tracker:
        for step in (1, 2, 3):
            tracker.log({"loss": 1.0}, step)
    with open_tracker("tensorboard", tmp_path, CONFIG, "run", first_step=2) as tracker:
        tracker.log({"loss": 2.0}, 2)
    assert read_events(tmp_path / "tensorboard")["loss"] == [(1, 1.0), (2, 2.0)]


def test_wandb_continues_one_run_on_its_own_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeModule("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        with open_tracker("wandb", tmp_path, CONFIG, "lab-sdpo") as tracker:
            tracker.log(RECORD, 3)
    assert [name for name, _, _ in fake.calls] == ["init", "define_metric", "log", "finish"] * 2
    init, define, log, _ = fake.calls[:4]
    assert {k: v for k, v in init[2].items() if k != "id"} == {
        "project": "sdpo",
        "name": "lab-sdpo",
        "resume": "allow",
        "dir": str(tmp_path),
        "config": CONFIG,
    }
    assert define == ("define_metric", ("*",), {"step_metric": "step"})
    assert log == ("log", ({**NUMBERS, "step": 3},), {})
    assert init[2]["id"] == fake.calls[4][2]["id"]


def test_another_directory_is_another_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeModule("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        open_tracker("wandb", tmp_path / name, CONFIG, "run").close()
    ids = [kwargs["id"] for name, _, kwargs in fake.calls if name == "init"]
    assert len(set(ids)) == 2


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeModule("trackio")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with open_tracker("trackio", tmp_path, CONFIG, "lab-sdpo") as tracker:
        tracker.log(RECORD, 3)
    (_, _, init), (_, logged, log), (last, _, _) = fake.calls
    assert init["name"].startswith("lab-sdpo-")
    assert {k: v for k, v in init.items() if k != "name"} == {"project": "sdpo", "config": CONFIG, "resume": "allow"}
    assert (logged, log) == ((NUMBERS,), {"step": 3})
    assert last == "finish"


@pytest.mark.parametrize(("kind", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r"run.track = .*pip install 'sdpo\[track\]'"):
        open_tracker(kind, tmp_path, CONFIG, "run")


def test_a_tracker_that_cannot_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeModule("wandb", RuntimeError("no API key\nlog in first")))
    with pytest.raises(BackendError, match=r'start run.track = "wandb": RuntimeError: no API key \(set run.track'):
        open_tracker("wandb", tmp_path, CONFIG, "run")
