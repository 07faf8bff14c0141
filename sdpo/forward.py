"""One forward pass: rows of tokens to the logits that predict their completions.

Rows that share a prompt run it once: the prompt's keys and values are computed with gradient, repeated for its rows, and
the completions attend to them. With 8 rollouts a prompt and prompts longer than completions this saves most of the work,
in the backward pass too. Prompt and completion go through together instead where there is nothing to share, and where
gradient checkpointing forbids a cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from sdpo.types import Rows

__all__ = ["cache_argument", "completion_logits", "new_cache"]


def completion_logits(model: nn.Module, rows: Rows, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Logits that predict the completions' tokens.

    Args:
        model: a causal language model of transformers.
        rows: U distinct prompts, B completions of T columns.
        weights: parameters by name to use instead of the module's own.

    Returns:
        [B, T, V], in the type that the model computes; padded columns hold anything.
    """
    if len(rows.prompt_ids) < len(rows.which) and not (model.training and _checkpoints(model)):
        return _shared(model, rows, weights)
    return _together(model, rows, weights)


def new_cache(model: nn.Module) -> DynamicCache:
    """An empty key-value cache for the model."""
    return DynamicCache(config=model.config)


def cache_argument(model: nn.Module) -> str:
    """What the model's `forward` calls its cache; transformers 5.20 renamed it."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"


def _checkpoints(model: nn.Module) -> bool:
    """Whether activations are recomputed; transformers 5.20 renamed the flag."""
    renamed = getattr(model, "is_activation_checkpointing", None)
    return bool(getattr(model, "is_gradient_checkpointing", False) if renamed is None else renamed)


def _call(model: nn.Module, weights: Mapping[str, Tensor] | None, **inputs: Any) -> Tensor:
    if weights is None:
        out = model(**inputs)
    else:
        out = torch.func.functional_call(model, dict(weights), kwargs=inputs, tie_weights=True)
    logits: Tensor = out.logits
    return logits


def _together(model: nn.Module, rows: Rows, weights: Mapping[str, Tensor] | None) -> Tensor:
    mask = torch.cat([rows.prompt_mask[rows.which], rows.completion_mask], 1)
    logits = _call(
        model,
        weights,
        input_ids=torch.cat([rows.prompt_ids[rows.which], rows.completion_ids], 1),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
        logits_to_keep=rows.completion_ids.shape[1] + 1,
    )
    return logits[:, :-1]


def _shared(model: nn.Module, rows: Rows, weights: Mapping[str, Tensor] | None) -> Tensor:
    cache = new_cache(model)
    held = {cache_argument(model): cache, "use_cache": True}
    first = _call(
        model,
        weights,
        input_ids=rows.prompt_ids,
        attention_mask=rows.prompt_mask,
        position_ids=(rows.prompt_mask.cumsum(1) - 1).clamp(min=0),
        logits_to_keep=1,
        **held,
    )[rows.which]
    width = rows.completion_ids.shape[1]
    if width == 1:
        return first
    cache.batch_select_indices(rows.which)
    prompt_mask = rows.prompt_mask[rows.which]
    rest = _call(
        model,
        weights,
        input_ids=rows.completion_ids[:, :-1],
        attention_mask=torch.cat([prompt_mask, rows.completion_mask[:, :-1]], 1),
        position_ids=prompt_mask.sum(1, keepdim=True) + torch.arange(width - 1, device=prompt_mask.device),
        **held,
    )
    return torch.cat([first, rest], 1)
