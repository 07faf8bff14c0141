"""Checkpoints: ordinary Hugging Face folders with a `trainer/` folder beside the weights.

    checkpoints/000100/config.json, model.safetensors, tokenizer.json, ...
                       trainer/state.json        step, data cursor, monitors, totals
                       trainer/optimizer.pt      optimiser and scheduler (tensors and plain data only)
                       trainer/teacher.safetensors

A checkpoint is written under a temporary name, flushed to disk and renamed: it is there whole or not at all. Random draws
are derived from the seed and the step (sdpo.order.derive_seed), so there is no generator state to keep.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sdpo.errors import CheckpointError, boundary
from sdpo.policy import Policy
from sdpo.step import Stepper

_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError)

__all__ = ["latest", "load_state", "prune", "restore", "save"]


def save(folder: Path, step: int, policy: Policy, stepper: Stepper, state: Mapping[str, Any]) -> Path:
    """Write `folder/000100` for step 100; an existing one of that name is replaced.

    Raises:
        CheckpointError: the disk is full, the folder not writable, ...
    """
    target = folder / f"{step:06d}"
    temporary = folder / f".{target.name}.{os.getpid()}"
    hint = "free space or another run.dir, then --run.resume"
    with boundary(f"write checkpoint {target}", CheckpointError, OSError, RuntimeError, SafetensorError, hint=hint):
        for stale in folder.glob(".*"):
            shutil.rmtree(stale, ignore_errors=True)
        (temporary / "trainer").mkdir(parents=True)
        policy.model.save_pretrained(temporary)  # type: ignore[operator]
        policy.chat.tokenizer.save_pretrained(temporary)
        torch.save(
            {"optimizer": stepper.optimizer.state_dict(), "scheduler": stepper.scheduler.state_dict()},
            temporary / "trainer" / "optimizer.pt",
        )
        teacher = {name: tensor.contiguous() for name, tensor in stepper.teacher.state().items()}
        save_file(teacher, temporary / "trainer" / "teacher.safetensors")
        (temporary / "trainer" / "state.json").write_text(json.dumps({**state, "step": step}), encoding="utf-8")
        _flush(temporary)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
        _sync(folder)
    return target


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a run's `checkpoints` folder."""
    found = [p for p in folder.glob("[0-9]*") if (p / "trainer" / "state.json").is_file()]
    return max(found, key=lambda p: int(p.name), default=None)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The plain state of a checkpoint."""
    with boundary(f"read checkpoint {checkpoint}", CheckpointError, OSError, ValueError):
        state: dict[str, Any] = json.loads((checkpoint / "trainer" / "state.json").read_text(encoding="utf-8"))
    return state


def restore(checkpoint: Path, policy: Policy, stepper: Stepper) -> None:
    """Put weights, optimiser, scheduler and teacher back as they were.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    with boundary(f"read checkpoint {checkpoint}", CheckpointError, *_DAMAGE):
        _load_weights(checkpoint, policy)
        saved = torch.load(checkpoint / "trainer" / "optimizer.pt", map_location=policy.device, weights_only=True)
        stepper.optimizer.load_state_dict(saved["optimizer"])
        stepper.scheduler.load_state_dict(saved["scheduler"])
        stepper.teacher.load_state(load_file(checkpoint / "trainer" / "teacher.safetensors"))


def prune(folder: Path, keep: int, protect: Sequence[int]) -> None:
    """Remove all but the newest `keep` checkpoints and those of the steps in `protect`."""
    found = sorted((p for p in folder.glob("[0-9]*") if p.is_dir()), key=lambda p: int(p.name))
    spared = {f"{step:06d}" for step in protect} | {p.name for p in found[-keep:]}
    for path in found:
        if path.name not in spared:
            shutil.rmtree(path, ignore_errors=True)


def _load_weights(checkpoint: Path, policy: Policy) -> None:
    model: Any = policy.model
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        weights = load_file(checkpoint / "adapter_model.safetensors")
        odd = set_peft_model_state_dict(model, weights).unexpected_keys
        if odd:
            raise CheckpointError(f"the weights in {checkpoint} do not fit the model: {odd[0]}")
        return
    # transformers renames and fuses parameters between file and module for some models, so it has to do the reading.
    fresh = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    model.load_state_dict(fresh.state_dict())


def _flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
