"""Where a run came from: what environment.json says about code, versions and machine. Imports no torch."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["environment"]

_PACKAGES = ("sdpo", "torch", "transformers", "tokenizers", "datasets", "peft", "numpy", "vllm", "verl")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def environment(argv: Sequence[str], seed: int) -> dict[str, Any]:
    """A JSON-able record of this process: time (UTC), command, seed, git revision, versions, machine."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": list(argv),
        "seed": seed,
        "git": _git(),
        "versions": {"python": platform.python_version(), **{p: v for p in _PACKAGES if (v := _version(p))}},
        "device": _device(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _git() -> dict[str, Any] | None:
    """Revision of the working directory's repository and whether tracked files differ from it; None outside of one."""
    revision = _output("git", "rev-parse", "HEAD")
    if not revision:
        return None
    return {"revision": revision, "modified": bool(_output("git", "status", "--porcelain", "--untracked-files=no"))}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus.splitlines() if gpus else [],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _output(*command: str) -> str:
    """What a command prints; empty where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
