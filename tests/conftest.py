"""Shared fixtures: a two-layer model and a byte-level tokenizer, built in code."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str = TEMPLATE, *, pad: str | None = "<|pad|>") -> Any:
    """256 bytes and a few special tokens; `pad` may be None or the end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    if pad is not None:
        tokenizer.add_special_tokens({"pad_token": pad})
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(vocabulary: int, *, seed: int = 0, dropout: float = 0.0) -> Any:
    """A Llama with two layers of width 32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        attention_dropout=dropout,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture
def model_dir(tmp_path: Path, tokenizer: Any) -> str:
    """The tiny model and its tokenizer as a folder."""
    folder = tmp_path / "model"
    tiny_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Any]:
    """A configuration from nested keyword tables on top of small defaults."""
    from sdpo.config import _merge, build_config

    def make(**tables: Any) -> Any:
        base = {
            "algo": {"name": "sdpo"},
            "model": {"path": "lab"},
            "env": {"name": "lab"},
            "run": {"dir": str(tmp_path / "run")},
        }
        return build_config(_merge(base, tables))

    return make
