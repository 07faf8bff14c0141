"""Experiment trackers behind one method: tensorboard, wandb, trackio (extra `track`).

Chosen by `run.track` and imported only then. A run keeps its own record in its directory (sdpo.run) whatever a tracker
does. Not covered: uploads of rollouts or checkpoints.
"""

from __future__ import annotations

import importlib
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from sdpo.errors import BackendError, MissingDependencyError, boundary

__all__ = ["Tracker", "open_tracker"]

_PROJECT = "sdpo"
_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker:
    """Where numbers go besides the run directory; this one sends them nowhere. A context manager."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log the finite numbers among `metrics` at a step."""

    def close(self) -> None:
        """Flush and end."""

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _TensorBoard(Tracker):
    def __init__(self, module: Any, run_dir: Path, config: Mapping[str, Any], name: str, first_step: int) -> None:
        # purge_step hides what a killed run logged after the checkpoint from which it goes on.
        self._writer = module.SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step or None)
        self._writer.add_text("config", "\n".join(f"    {k} = {v!r}" for k, v in _flat(config).items()), first_step)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB(Tracker):
    def __init__(self, module: Any, run_dir: Path, config: Mapping[str, Any], name: str, first_step: int) -> None:
        self._run = module.init(
            project=_PROJECT,
            name=name,
            id=_run_id(run_dir),
            resume="allow",
            dir=str(run_dir),
            config=dict(config),
        )
        # Our own axis: wandb's counter refuses steps that are logged again after a resumption.
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log({**_numbers(metrics), "step": step})

    def close(self) -> None:
        self._run.finish()


class _Trackio(Tracker):
    def __init__(self, module: Any, run_dir: Path, config: Mapping[str, Any], name: str, first_step: int) -> None:
        # trackio tells runs apart by name, and two run directories may have the same.
        unique = f"{name}-{_run_id(run_dir)[:6]}"
        self._run = module.init(project=_PROJECT, name=unique, config=dict(config), resume="allow")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS = {"tensorboard": _TensorBoard, "wandb": _WandB, "trackio": _Trackio}


def open_tracker(
    kind: Literal["tensorboard", "wandb", "trackio"] | None,
    run_dir: Path,
    config: Mapping[str, Any],
    name: str,
    *,
    first_step: int = 0,
) -> Tracker:
    """Start or continue logging.

    Args:
        kind: `run.track`; None gives a tracker that does nothing.
        run_dir: of the run; tensorboard writes into its folder `tensorboard`.
        config: the resolved settings, shown beside the curves.
        name: of the run.
        first_step: the step from which a resumed run goes on.

    Raises:
        MissingDependencyError: the tracker is not installed.
        BackendError: it cannot start, for example for want of a login.
    """
    if kind is None:
        return Tracker()
    try:
        module = importlib.import_module(_MODULES[kind])
    except ImportError as exc:
        raise MissingDependencyError(f'run.track = "{kind}"', extra="track") from exc
    hint = 'set run.track = "none" to go without it'
    with boundary(f'start run.track = "{kind}"', BackendError, Exception, hint=hint):
        return _TRACKERS[kind](module, run_dir, config, name, first_step)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in config.items() for key, value in table.items()}


def _run_id(run_dir: Path) -> str:
    """An identifier that stays with the run directory, so that a resumed run continues its curves."""
    file = run_dir / "tracker-id"
    with boundary(f"write {file}", BackendError):
        if not file.exists():
            file.write_text(uuid.uuid4().hex, encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()
