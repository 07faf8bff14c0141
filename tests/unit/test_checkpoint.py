"""Checkpoints: whole or not at all, Hugging Face folders, exact restoration, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdpo import checkpoint
from sdpo.config import ModelConfig
from sdpo.errors import CheckpointError
from sdpo.policy import Policy, load_policy
from sdpo.step import Stepper
from sdpo.teacher import make_teacher


def parts(model_dir: str, config: Any, rank: int = 0) -> tuple[Policy, Stepper]:
    policy = load_policy(ModelConfig(path=model_dir, lora_rank=rank))
    return policy, Stepper(config, policy, make_teacher(config.teacher, policy), None)


def move(policy: Policy, stepper: Stepper) -> None:
    for p in policy.trainable().values():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    stepper.optimizer.step()
    stepper.scheduler.step()
    stepper.teacher.update(1)


@pytest.mark.parametrize("rank", [0, 4])
def test_everything_comes_back_exactly(model_dir: str, make_config: Any, tmp_path: Path, rank: int) -> None:
    config = make_config(optim={"warmup_steps": 5})
    policy, stepper = parts(model_dir, config, rank)
    move(policy, stepper)
    path = checkpoint.save(tmp_path, 3, policy, stepper, {"cursor": 12})
    other, again = parts(model_dir, config, rank)
    checkpoint.restore(path, other, again)
    assert checkpoint.load_state(path) == {"cursor": 12, "step": 3}
    for name, p in policy.trainable().items():
        assert torch.equal(p, other.trainable()[name]), name
    for name, t in stepper.teacher.state().items():
        assert torch.equal(t, again.teacher.state()[name]), name
    assert again.optimizer.param_groups[0]["lr"] == stepper.optimizer.param_groups[0]["lr"]
    for _ in range(2):  # the optimiser's moments are there too: the next steps agree
        move(policy, stepper)
        move(other, again)
    for name, p in policy.trainable().items():
        assert torch.equal(p, other.trainable()[name]), name


def test_a_checkpoint_is_a_hugging_face_folder(model_dir: str, make_config: Any, tmp_path: Path) -> None:
    policy, stepper = parts(model_dir, make_config())
    move(policy, stepper)
    path = checkpoint.save(tmp_path, 1, policy, stepper, {})
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, dict(policy.model.named_parameters())[name])
    assert AutoTokenizer.from_pretrained(path).chat_template == policy.chat.tokenizer.chat_template


def test_a_lora_checkpoint_is_exported_as_a_plain_model(model_dir: str, make_config: Any, tmp_path: Path) -> None:
    from sdpo.export import export

    policy, stepper = parts(model_dir, make_config(optim={"lr": 0.03, "warmup_steps": 0}), rank=4)
    for _ in range(3):
        move(policy, stepper)
    path = checkpoint.save(tmp_path, 1, policy, stepper, {})
    export(path, tmp_path / "plain")
    ids = torch.arange(12)[None]
    policy.model.eval()
    expected = policy.model(input_ids=ids).logits
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    assert not torch.allclose(base(input_ids=ids).logits, expected, atol=1e-3)


def test_a_lora_checkpoint_can_be_evaluated_as_it_is(model_dir: str, make_config: Any, tmp_path: Path) -> None:
    policy, stepper = parts(model_dir, make_config(optim={"lr": 0.03, "warmup_steps": 0}), rank=4)
    for _ in range(3):
        move(policy, stepper)
    path = checkpoint.save(tmp_path, 1, policy, stepper, {})
    ids = torch.arange(12)[None]
    policy.model.eval()
    loaded = load_policy(ModelConfig(path=str(path)))
    loaded.model.eval()
    expected = policy.model(input_ids=ids).logits
    torch.testing.assert_close(loaded.model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_half_written_checkpoints_are_not_seen_and_cleared(model_dir: str, make_config: Any, tmp_path: Path) -> None:
    policy, stepper = parts(model_dir, make_config())
    torn = tmp_path / ".000009.4711"
    torn.mkdir()
    (tmp_path / "000008").mkdir()
    assert checkpoint.latest(tmp_path) is None
    path = checkpoint.save(tmp_path, 2, policy, stepper, {})
    assert checkpoint.latest(tmp_path) == path
    assert not torn.exists()


def test_pruning_spares_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        (tmp_path / f"{step:06d}" / "trainer").mkdir(parents=True)
    checkpoint.prune(tmp_path, 2, [1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000001", "000004", "000005"]


@pytest.mark.parametrize("file", ["model.safetensors", "trainer/optimizer.pt", "trainer/teacher.safetensors"])
def test_a_damaged_checkpoint_is_refused(model_dir: str, make_config: Any, tmp_path: Path, file: str) -> None:
    policy, stepper = parts(model_dir, make_config())
    path = checkpoint.save(tmp_path, 1, policy, stepper, {})
    whole = (path / file).read_bytes()
    (path / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="could not read checkpoint"):
        checkpoint.restore(path, policy, stepper)


def test_a_checkpoint_of_another_teacher_or_model_is_refused(model_dir: str, make_config: Any, tmp_path: Path) -> None:
    policy, stepper = parts(model_dir, make_config())
    path = checkpoint.save(tmp_path, 1, policy, stepper, {})
    other, live = parts(model_dir, make_config(teacher={"kind": "live"}))
    with pytest.raises(CheckpointError, match="teacher does not fit"):
        checkpoint.restore(path, other, live)
    adapted, with_lora = parts(model_dir, make_config(), rank=4)
    with pytest.raises(CheckpointError):
        checkpoint.restore(path, adapted, with_lora)


def test_training_goes_on_from_an_adapter(model_dir: str, make_config: Any, tmp_path: Path) -> None:
    from sdpo.errors import ConfigError

    policy, stepper = parts(model_dir, make_config(), rank=4)
    move(policy, stepper)
    path = checkpoint.save(tmp_path, 1, policy, stepper, {})
    again = load_policy(ModelConfig(path=str(path)))
    for name, p in policy.trainable().items():
        assert torch.equal(p, again.trainable()[name])
    with pytest.raises(ConfigError, match="has rank 4"):
        load_policy(ModelConfig(path=str(path), lora_rank=8))


def test_models_whose_files_name_parameters_otherwise_come_back(
    make_config: Any, tmp_path: Path, tokenizer: Any
) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    tokenizer.save_pretrained(tmp_path / "neox")
    policy, stepper = parts(str(tmp_path / "neox"), make_config())
    move(policy, stepper)
    path = checkpoint.save(tmp_path / "run", 1, policy, stepper, {})
    other, again = parts(str(tmp_path / "neox"), make_config())
    checkpoint.restore(path, other, again)
    for name, p in policy.trainable().items():
        assert torch.equal(p, other.trainable()[name]), name
