"""One step on a two-layer model: invariants 4, 5, 7 and 8, directions, off-policy ratios, every algorithm."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sdpo.advantage import group_advantages
from sdpo.algorithms import ALGORITHMS, get_algorithm
from sdpo.chat import Chat
from sdpo.config import TeacherConfig
from sdpo.context import ContextBuilder
from sdpo.policy import Policy
from sdpo.step import Stepper
from sdpo.teacher import make_teacher
from sdpo.types import Completion, Failure, Grade, Group, Message, Rollout, Task, TeacherContext
from tests.conftest import byte_tokenizer, tiny_model

CHAT = Chat(byte_tokenizer())


def make_policy(seed: int = 0, dropout: float = 0.0) -> Policy:
    model = tiny_model(len(CHAT.tokenizer), seed=seed, dropout=dropout).train()
    return Policy(model, CHAT, (CHAT.eos_id,), nullcontext, torch.float32)


def make_groups(policy: Policy, count: int = 3, size: int = 4, seed: int = 0) -> list[Group]:
    """Groups with completions of many lengths, their log-probs under the policy, rewards 1 and 0, and feedback."""
    draw = random.Random(seed)
    groups = []
    for g in range(count):
        task = Task(f"t{g}", (Message(role="user", content="q" * (3 * g + 1)),))
        prompt = CHAT.prompt_ids(task.prompt)
        rollouts = []
        for i in range(size):
            ids = tuple(draw.randrange(33, 120) for _ in range(draw.randint(1, 9))) + (CHAT.eos_id,)
            with torch.no_grad():
                logits = policy.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1).tolist()
            success = i % 3 == 0
            rollouts.append(
                Rollout(
                    task.id,
                    i,
                    prompt,
                    Completion(CHAT.decode(ids), ids, tuple(logprobs)),
                    Grade(float(success), "" if success else f"wrong at {i}", success=success),
                )
            )
        groups.append(Group(task, tuple(rollouts)))
    return groups


def gradients(config: Any, groups: list[Group], contexts: Any = None, policy: Policy | None = None) -> Any:
    """(gradient before clipping, loss, metrics) of one optimiser step."""
    policy = policy or make_policy()
    teacher = make_teacher(config.teacher, policy)
    reference = make_teacher(TeacherConfig(kind="frozen"), policy) if config.policy.kl_coef else None
    stepper = Stepper(config, policy, teacher, reference)
    if contexts is None:
        contexts = ContextBuilder(config.context, CHAT).build(groups, 0)
    out = stepper.run(groups, contexts, group_advantages(groups, baseline=config.policy.baseline))
    grads = {name: p.grad.clone() for name, p in policy.trainable().items() if p.grad is not None}
    return grads, out.loss, out.metrics


@pytest.fixture
def config(make_config: Callable[..., Any]) -> Callable[..., Any]:
    def make(name: str, **tables: Any) -> Any:
        train = {"prompts_per_step": 3, "rollouts_per_prompt": 4, "mini_batch_prompts": None, **tables.pop("train", {})}
        optim = {"max_grad_norm": 1e9, "warmup_steps": 0, **tables.pop("optim", {})}
        return make_config(algo={"name": name, **tables.pop("algo", {})}, train=train, optim=optim, **tables)

    return make


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_invariant_8_micro_batches_do_not_change_the_gradient(name: str, config: Callable[..., Any]) -> None:
    groups = make_groups(make_policy())
    whole, loss, _ = gradients(config(name, train={"micro_batch_tokens": 100_000}), groups)
    assert max(g.abs().max() for g in whole.values()) > 1e-6
    for budget in (1, 90, 300):
        parts, part_loss, _ = gradients(config(name, train={"micro_batch_tokens": budget}), groups)
        close(whole, parts)
        assert part_loss == pytest.approx(loss, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("denominator", ["active", "all"])
def test_invariant_8_for_every_aggregation(aggregation: str, denominator: str, config: Callable[..., Any]) -> None:
    groups = make_groups(make_policy())
    loss = {"aggregation": aggregation, "denominator": denominator, "skip_first_tokens": 2}
    whole, _, _ = gradients(config("sdpo", loss=loss), groups)
    parts, _, _ = gradients(config("sdpo", loss=loss, train={"micro_batch_tokens": 1}), groups)
    close(whole, parts)


def test_invariant_4_rollouts_without_context_have_no_weight(config: Callable[..., Any]) -> None:
    groups = make_groups(make_policy())
    settings = config("sdpo")
    contexts = ContextBuilder(settings.context, CHAT).build(groups, 0)
    contexts[1] = [None] * 4
    with_them, _, _ = gradients(settings, groups, contexts)
    without, _, _ = gradients(settings, [groups[0], groups[2]], [contexts[0], contexts[2]])
    close(with_them, without)
    counted, _, _ = gradients(config("sdpo", loss={"denominator": "all"}), groups, contexts)
    tokens = [sum(len(r.completion.token_ids) for r in g.rollouts) for g in groups]
    share = (tokens[0] + tokens[2]) / sum(tokens)
    name = next(iter(counted))
    torch.testing.assert_close(counted[name], with_them[name] * share, rtol=1e-4, atol=1e-7)


def test_invariant_4_a_step_without_any_context_moves_nothing(config: Callable[..., Any]) -> None:
    policy = make_policy()
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    groups = make_groups(policy)
    grads, loss, metrics = gradients(config("sdpo"), groups, [[None] * 4] * 3, policy)
    assert loss == 0
    assert not any(g.abs().max() > 0 for g in grads.values())
    assert all((p == before[name]).all() for name, p in policy.trainable().items())
    assert metrics["grad_norm"] == 0


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
@pytest.mark.parametrize("top_k", ["none", 5])
def test_invariant_5_equal_contexts_and_a_live_teacher_give_nothing(
    divergence: str, top_k: Any, config: Callable[..., Any]
) -> None:
    groups = make_groups(make_policy())
    same = [[TeacherContext(g.task.prompt, r.prompt_ids, None, True) for r in g.rollouts] for g in groups]
    settings = config("sdpo", loss={"divergence": divergence, "top_k": top_k}, teacher={"kind": "live"})
    grads, loss, _ = gradients(settings, groups, same)
    assert abs(loss) < 1e-6
    assert max(g.abs().max() for g in grads.values()) < 1e-5
    different, _, _ = gradients(settings, groups)
    assert max(g.abs().max() for g in different.values()) > 1e-4


def test_invariant_7_ungraded_rollouts_leave_loss_and_statistics(config: Callable[..., Any]) -> None:
    groups = make_groups(make_policy())
    lost = Rollout("t0", 9, groups[0].rollouts[0].prompt_ids, groups[0].rollouts[1].completion)
    broken = Rollout(lost.task_id, 9, lost.prompt_ids, lost.completion, failure=Failure("sandbox", "down"))
    more = [Group(groups[0].task, (*groups[0].rollouts, broken)), *groups[1:]]
    for name in ("sdpo", "grpo", "sdpo_grpo"):
        close(gradients(config(name), groups)[0], gradients(config(name), more)[0])


def test_a_step_moves_the_policy_towards_the_teacher(config: Callable[..., Any]) -> None:
    policy = make_policy()
    groups = make_groups(policy)
    settings = config("sdpo", optim={"lr": 1e-3}, teacher={"kind": "frozen"}, loss={"divergence": "forward_kl"})
    contexts = ContextBuilder(settings.context, CHAT).build(groups, 0)
    stepper = Stepper(settings, policy, make_teacher(settings.teacher, policy), None)
    zeros = [[0.0] * 4] * 3
    losses = [stepper.run(groups, contexts, zeros).loss for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]


def test_grpo_raises_the_probability_of_what_was_rewarded(config: Callable[..., Any]) -> None:
    policy = make_policy()
    groups = make_groups(policy)
    settings = config("grpo", optim={"lr": 1e-4})
    before = {(g.task.id, r.index): sum(r.completion.logprobs or ()) for g in groups for r in g.rollouts}
    gradients(settings, groups, policy=policy)
    for g in groups:
        for r in g.rollouts:
            with torch.no_grad():
                ids = r.completion.token_ids
                logits = policy.model(torch.tensor([[*r.prompt_ids, *ids]])).logits[0, len(r.prompt_ids) - 1 : -1]
            after = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum().item()
            assert (after > before[g.task.id, r.index]) is r.success


def test_first_tokens_can_be_skipped_even_past_the_end(config: Callable[..., Any]) -> None:
    groups = make_groups(make_policy())
    grads, loss, _ = gradients(config("sdpo", loss={"skip_first_tokens": 50}), groups)
    assert loss == 0
    assert all(g.isfinite().all() for g in grads.values())
    assert gradients(config("sdpo", loss={"skip_first_tokens": 1}), groups)[1] != 0


def test_sampler_logprobs_pair_with_their_tokens_whatever_the_prompt_lengths(config: Callable[..., Any]) -> None:
    """Equal weights for sampling and training: the gap is 0 and every ratio 1."""
    _, _, metrics = gradients(config("grpo"), make_groups(make_policy()))
    assert metrics["sampler/logprob_gap"] < 1e-5


def test_temperature_divides_on_both_sides(config: Callable[..., Any]) -> None:
    policy = make_policy()
    groups = make_groups(policy)
    cooled = []
    for g in groups:
        rollouts = []
        for r in g.rollouts:
            ids = r.completion.token_ids
            with torch.no_grad():
                logits = policy.model(torch.tensor([[*r.prompt_ids, *ids]])).logits[0, len(r.prompt_ids) - 1 : -1]
            values = (logits / 0.6).log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1).tolist()
            completion = Completion(r.completion.text, ids, tuple(values))
            rollouts.append(Rollout(r.task_id, r.index, r.prompt_ids, completion, r.grade))
        cooled.append(Group(g.task, tuple(rollouts)))
    settings = config("grpo", sampling={"temperature": 0.6})
    assert gradients(settings, cooled)[2]["sampler/logprob_gap"] < 1e-5
    assert gradients(settings, groups)[2]["sampler/logprob_gap"] > 0.01


def test_later_optimiser_steps_are_off_policy(config: Callable[..., Any]) -> None:
    policy = make_policy()
    groups = make_groups(policy)
    settings = config("grpo", optim={"lr": 3e-3}, train={"mini_batch_prompts": 1})
    _, _, metrics = gradients(settings, groups, policy=policy)
    assert metrics["optimiser_steps"] == 3
    ratio = next(v for k, v in metrics.items() if "ratio" in k)
    assert abs(ratio - 1) > 1e-4
    on_policy = gradients(config("grpo"), make_groups(make_policy()))[2]
    assert next(v for k, v in on_policy.items() if "ratio" in k) == pytest.approx(1)


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(config: Callable[..., Any]) -> None:
    policy = make_policy()
    groups = make_groups(policy)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[CHAT.eos_id] = float("inf")  # type: ignore[operator]
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    _, _, metrics = gradients(config("grpo"), groups, policy=policy)
    assert metrics["skipped_updates"] == 1
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable().items())


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_kl_to_the_reference_pulls_only_once_the_policy_has_moved(kl_coef: float, config: Callable[..., Any]) -> None:
    groups = make_groups(make_policy())
    settings = config("grpo", policy={"kl_coef": kl_coef})
    plain, _, _ = gradients(config("grpo"), groups)
    pulled, _, _ = gradients(settings, groups)
    close(plain, pulled)


def test_rows_that_cannot_contribute_enter_no_forward_pass(config: Callable[..., Any]) -> None:
    settings, policy = config("sdpo"), make_policy()
    groups = make_groups(policy)
    contexts = ContextBuilder(settings.context, CHAT).build(groups, 0)
    contexts = [[c if g == 0 and i == 1 else None for i, c in enumerate(row)] for g, row in enumerate(contexts)]
    seen: list[int] = []
    handle = policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    gradients(settings, groups, contexts, policy)
    handle.remove()
    assert seen == [1, 1], "one row for the teacher, one for the student"


def test_names_say_what_is_read() -> None:
    for name, algorithm in ALGORITHMS.items():
        assert get_algorithm(name) is algorithm
        assert set(algorithm.preset) <= {*algorithm.sections, "optim", "train", "eval", "algo"}
        assert algorithm.needs_teacher is ("teacher" in algorithm.sections)


def test_the_samplers_gap_does_not_measure_the_steps_own_updates(config: Callable[..., Any]) -> None:
    policy = make_policy(dropout=0.3)
    policy.model.eval()
    groups = make_groups(policy)
    policy.model.train()
    settings = config("grpo", optim={"lr": 1e-2}, train={"mini_batch_prompts": 1})
    _, _, metrics = gradients(settings, groups, policy=policy)
    assert metrics["sampler/logprob_gap"] < 1e-5
