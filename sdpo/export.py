"""`sdpo export`: a checkpoint as a plain Hugging Face folder that loads without peft and without this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from sdpo.errors import CheckpointError, MissingDependencyError, boundary

__all__ = ["export"]


def export(checkpoint: Path, out: Path) -> None:
    """Write `checkpoint` to `out`; a LoRA adapter is merged into its base model.

    Raises:
        CheckpointError: `out` exists, or the checkpoint cannot be read.
        MissingDependencyError: an adapter without peft.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already", hint="give a folder that does not")
    with boundary(f"export {checkpoint}", CheckpointError, OSError, ValueError, RuntimeError):
        model: Any
        if (checkpoint / "adapter_config.json").is_file():
            try:
                from peft import AutoPeftModelForCausalLM
            except ImportError:
                raise MissingDependencyError("merging an adapter", extra="peft") from None
            model = AutoPeftModelForCausalLM.from_pretrained(checkpoint).merge_and_unload()
        else:
            model = AutoModelForCausalLM.from_pretrained(checkpoint)
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(out)
