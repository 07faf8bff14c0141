"""Teachers: update rule and direction, dropout, LoRA, state."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sdpo.chat import Chat
from sdpo.config import TeacherConfig
from sdpo.errors import CheckpointError
from sdpo.policy import Policy
from sdpo.teacher import make_teacher
from sdpo.types import Rows
from tests.conftest import byte_tokenizer, tiny_model

IDS = torch.arange(20).reshape(2, 10)
ONES = torch.ones_like(IDS)
ROWS = Rows(IDS[:, :6], ONES[:, :6], torch.arange(2), IDS[:, 6:], ONES[:, 6:])


def make_policy(*, dropout: float = 0.0, lora: bool = False) -> Policy:
    chat = Chat(byte_tokenizer())
    model = tiny_model(len(chat.tokenizer), dropout=dropout)
    if lora:
        import peft

        torch.manual_seed(0)
        settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout)
        model = peft.get_peft_model(model, settings)
    return Policy(model.train(), chat, (chat.eos_id,), nullcontext, torch.float32)


def move(policy: Policy, amount: float = 0.05) -> None:
    """A pretended optimiser step."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(amount * torch.randn(p.shape, generator=generator))


def logits(teacher: Any) -> torch.Tensor:
    out: torch.Tensor = teacher.logits(ROWS)
    return out


def test_ema_moves_towards_the_policy_by_the_rate_and_no_more() -> None:
    """Teacher 0, student 1, rate .05: .05 after one update, .0975 after two (not .95)."""
    policy = make_policy()
    with torch.no_grad():
        for p in policy.trainable().values():
            p.zero_()
    teacher = make_teacher(TeacherConfig(kind="ema", rate=0.05), policy)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.fill_(1.0)
    for step, expected in ((1, 0.05), (2, 0.0975)):
        teacher.update(step)
        for tensor in teacher.state().values():
            torch.testing.assert_close(tensor, torch.full_like(tensor, expected))
    assert all((p == 1).all() for p in policy.trainable().values()), "the policy is not what moves"


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["ema", "frozen", "trust_region", "live", "snapshot"])
def test_at_the_start_every_teacher_is_the_policy(kind: Any, lora: bool) -> None:
    policy = make_policy(lora=lora)
    policy.model.eval()
    expected = policy.model(input_ids=IDS).logits[:, -5:-1]
    torch.testing.assert_close(logits(make_teacher(TeacherConfig(kind=kind), policy)), expected)


@pytest.mark.parametrize("lora", [False, True])
def test_what_each_teacher_does_when_the_policy_moves(lora: bool) -> None:
    policy = make_policy(lora=lora)
    kinds = ("ema", "frozen", "trust_region", "live", "snapshot")
    teachers = {k: make_teacher(TeacherConfig(kind=k, rate=0.25, every=2), policy) for k in kinds}  # type: ignore[arg-type]
    initial = logits(teachers["frozen"])
    move(policy)
    for teacher in teachers.values():
        teacher.update(1)
    current = logits(teachers["live"])
    assert not torch.allclose(initial, current)
    torch.testing.assert_close(logits(teachers["frozen"]), initial)
    torch.testing.assert_close(logits(teachers["snapshot"]), initial)
    torch.testing.assert_close(logits(teachers["trust_region"]), torch.lerp(initial, current, 0.25))
    ema = logits(teachers["ema"])
    assert (ema - initial).norm() < (ema - current).norm()
    assert not torch.allclose(ema, initial)
    teachers["snapshot"].update(2)
    torch.testing.assert_close(logits(teachers["snapshot"]), current)


def test_trust_region_is_the_geometric_mixture() -> None:
    policy = make_policy()
    teacher = make_teacher(TeacherConfig(kind="trust_region", rate=0.3), policy)
    p = torch.softmax(logits(teacher), -1)
    move(policy)
    q = torch.softmax(logits(make_teacher(TeacherConfig(kind="live"), policy)), -1)
    mixture = p**0.7 * q**0.3
    torch.testing.assert_close(torch.softmax(logits(teacher), -1), mixture / mixture.sum(-1, keepdim=True))


def test_lora_ema_starts_from_the_students_adapter() -> None:
    """Averaged from zero, the teacher's update would lag about twentyfold behind."""
    policy = make_policy(lora=True)
    teacher = make_teacher(TeacherConfig(kind="ema", rate=0.05), policy)
    factors = [name for name in teacher.state() if "lora_A" in name]
    assert factors
    assert all(teacher.state()[name].norm() > 0 for name in factors)
    move(policy)
    teacher.update(1)

    def delta(weights: Any) -> torch.Tensor:
        a = next(n for n in weights if "lora_A" in n)
        return weights[a.replace("lora_A", "lora_B")].detach() @ weights[a].detach()

    ratio = delta(teacher.state()).norm() / delta(policy.trainable()).norm()
    assert 0.03 < ratio < 0.08, "about the rate, not its square"


@pytest.mark.parametrize("kind", ["ema", "live", "trust_region"])
@pytest.mark.parametrize("lora", [False, True])
def test_dropout_is_off_and_the_training_mode_survives(kind: Any, lora: bool) -> None:
    policy = make_policy(dropout=0.5, lora=lora)
    teacher = make_teacher(TeacherConfig(kind=kind), policy)
    torch.testing.assert_close(logits(teacher), logits(teacher), rtol=0, atol=0)
    assert policy.model.training
    assert not logits(teacher).requires_grad


def test_state_goes_to_a_checkpoint_and_back() -> None:
    policy = make_policy()
    teacher = make_teacher(TeacherConfig(kind="ema", rate=0.5), policy)
    move(policy)
    teacher.update(1)
    saved = {name: tensor.clone() for name, tensor in teacher.state().items()}
    fresh = make_teacher(TeacherConfig(kind="ema", rate=0.5), make_policy())
    assert fresh.distance() == 0
    fresh.load_state(saved)
    torch.testing.assert_close(logits(fresh), logits(teacher), rtol=0, atol=0)
    assert fresh.distance() > 0
    with pytest.raises(CheckpointError, match="does not fit"):
        make_teacher(TeacherConfig(kind="live"), policy).load_state(saved)


def test_distance_is_relative_to_the_policy() -> None:
    policy = make_policy()
    teacher = make_teacher(TeacherConfig(kind="frozen"), policy)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.mul_(2)
    assert teacher.distance() == pytest.approx(0.5)
