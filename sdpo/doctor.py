"""`sdpo doctor`: what a bug report needs to know about a machine, and which extras are missing."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from sdpo.env import env_names

__all__ = ["report"]

_PACKAGES = ("sdpo", "torch", "transformers", "datasets", "safetensors", "numpy", "scipy")
_EXTRAS = {
    "peft": "peft",
    "math-verify": "math",
    "reasoning-gym": "rg",
    "altair": "report",
    "tensorboard": "track",
    "starlette": "serve",
    "vllm": "vllm",
    "verl": "verl",
}


def report() -> Iterator[str]:
    """Lines for the terminal."""
    yield f"python        {platform.python_version()} on {platform.platform()}"
    for package in _PACKAGES:
        yield f"{package:<13} {_version(package) or 'not installed'}"
    for package, extra in _EXTRAS.items():
        found = _version(package)
        yield f"{package:<13} {found}" if found else f"{package:<13} not installed: pip install 'sdpo[{extra}]'"
    cores = len(os.sched_getaffinity(0))
    yield f"cpu           {cores} cores, load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} torch threads"
    yield f"bf16 on cpu   {'AMX' if torch.cpu._is_amx_tile_supported() else 'no AMX: float32 is used'}"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            yield f"cuda:{i}        {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        yield "cuda          none"
    yield f"environments  {', '.join(env_names()) or 'none'}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
