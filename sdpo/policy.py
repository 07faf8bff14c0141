"""The policy: a causal language model of transformers, its tokenizer, and how both are run on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdpo.chat import Chat
from sdpo.config import ModelConfig
from sdpo.errors import ConfigError, MissingDependencyError, boundary

__all__ = ["Policy", "load_policy", "resolve_model"]

_SMALL = 20_000_000  # parameters below which a second thread costs more in hand-over than it saves


@dataclass(frozen=True, slots=True)
class Policy:
    """A model ready to be trained.

    Attributes:
        model: the module, in training mode, on its device.
        chat: its tokenizer and chat template.
        stop_ids: token ids that end a completion.
        autocast: a factory of the context in which the model runs.
        compute: the type of the matrix products, for the log.
    """

    model: nn.Module
    chat: Chat
    stop_ids: tuple[int, ...]
    autocast: Callable[[], AbstractContextManager[Any]]
    compute: torch.dtype

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def positions(self) -> int:
        """Longest sequence that the model takes, in tokens."""
        config: Any = self.model.config
        return int(getattr(config, "max_position_embeddings", None) or 2**31)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimiser moves, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def resolve_model(path: str) -> str:
    """A folder or hub id; names registered under the entry-point group `sdpo.models` become their folder."""
    for point in entry_points(group="sdpo.models"):
        if point.name == path and not Path(path).exists():
            return str(point.load()())
    return path


def load_policy(config: ModelConfig, *, seed: int = 0) -> Policy:
    """Load model and tokenizer.

    Raises:
        ConfigError: there is no such model, no such device, or the tokenizer cannot chat.
        MissingDependencyError: LoRA without peft, GGUF without gguf.
    """
    transformers.utils.logging.disable_progress_bar()
    device = _device(config.device)
    path = resolve_model(config.path)
    options: dict[str, Any] = {"revision": config.revision, "gguf_file": config.gguf_file}
    options = {k: v for k, v in options.items() if v is not None}
    with boundary(
        f"load model.path = {config.path!r}",
        ConfigError,
        OSError,
        ValueError,
        ImportError,
        hint="give a folder with config.json and safetensors, or a hub id that can be reached",
    ):
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        if config.attention is not None:
            options["attn_implementation"] = config.attention
        adapter = _adapter(path, config)
        source = path if adapter is None else adapter
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, config.dtype), **options)
    chat = Chat(tokenizer, config.template_kwargs, name=config.path)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer of {config.path} has {len(tokenizer)} tokens, the model only {rows}",
            hint="tokenizer and weights are of different models",
        )
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, path, is_trainable=True)
    elif config.lora_rank:
        torch.manual_seed(seed)
        model = _with_lora(model, config)
    if config.gradient_checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.config.use_cache = True  # the sampler needs it; checkpointing only applies in training mode
    if device.type == "cpu":
        torch.set_num_threads(config.threads or _threads(sum(p.numel() for p in model.parameters())))
    model.to(device).train()
    compute = _compute(config.compute, device)
    return Policy(model, chat, _stop_ids(model, chat), lambda: _autocast(device, compute), compute)


def _adapter(path: str, config: ModelConfig) -> str | None:
    """The base model of a folder that holds a LoRA adapter; None for a folder or hub id of a whole model."""
    if not (Path(path) / "adapter_config.json").is_file():
        return None
    try:
        from peft import LoraConfig
    except ImportError:
        raise MissingDependencyError(f"the adapter in {path}", extra="peft") from None
    stored = LoraConfig.from_pretrained(path)
    if config.lora_rank not in (0, stored.r):
        raise ConfigError(
            f"model.lora_rank = {config.lora_rank}, but the adapter in {path} has rank {stored.r}",
            hint="leave model.lora_rank out to go on with the adapter",
        )
    return str(stored.base_model_name_or_path)


def _with_lora(model: Any, config: ModelConfig) -> Any:
    try:
        import peft
    except ImportError:
        raise MissingDependencyError("model.lora_rank > 0", extra="peft") from None
    targets = config.lora_targets
    with boundary(f"add LoRA to model.lora_targets = {targets!r}", ConfigError, ValueError):
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
                target_modules=targets if isinstance(targets, str) else list(targets),
                task_type="CAUSAL_LM",
            ),
        )


def _stop_ids(model: Any, chat: Chat) -> tuple[int, ...]:
    """The tokenizer's end token and those of the model's generation settings."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = own if isinstance(own, (list, tuple)) else [] if own is None else [own]
    return tuple(sorted({chat.eos_id, *map(int, more)}))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with boundary(
        f"use model.device = {name!r}", ConfigError, RuntimeError, AssertionError, hint='"auto", "cpu" or "cuda"'
    ):
        device = torch.device(name)
        torch.empty(0, device=device)
    return device


def _compute(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def _autocast(device: torch.device, compute: torch.dtype) -> AbstractContextManager[Any]:
    if compute == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=compute)


def _threads(parameters: int) -> int:
    """Threads for a model of this size: two threads on two busy cores are slower than one, by spinning."""
    if "OMP_NUM_THREADS" in os.environ or parameters < _SMALL:
        return torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1
    idle = len(os.sched_getaffinity(0)) - round(os.getloadavg()[0])
    return max(1, idle)
