"""The transformers sampler against a plain loop without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdpo.chat import Chat
from sdpo.rollout import SamplingParams
from sdpo.samplers.transformers import TransformersSampler
from tests.conftest import byte_tokenizer, tiny_model

PROMPTS = [tuple(range(5, 12)), (7,), tuple(range(30, 33)), tuple(range(60, 80))]


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Chat]:
    chat = Chat(byte_tokenizer())
    return tiny_model(len(chat.tokenizer)), chat


def draw(parts: tuple[Any, Chat], n: int, batch_size: int = 64, seed: int = 3, **params: Any) -> dict[Any, Any]:
    model, chat = parts
    settings = SamplingParams(**{"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_tokens": 12, **params})
    # Many end tokens, so that rows leave the batch at different times.
    stop = [chat.eos_id, *range(0, 256, 7)]
    sampler = TransformersSampler(model, chat, stop, batch_size=batch_size)
    out = list(sampler.sample(PROMPTS, n, settings, seed=seed))
    assert len(out) == len(PROMPTS) * n
    return {(i, j): c for i, j, c in out}


@torch.no_grad()
def naive_logprobs(model: Any, prompt: tuple[int, ...], ids: tuple[int, ...], temperature: float) -> list[float]:
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None]).squeeze(1).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_logprobs_equal_a_forward_pass_without_cache(
    parts: tuple[Any, Chat], temperature: float, batch_size: int
) -> None:
    for (i, _), completion in draw(parts, 3, batch_size, temperature=temperature, top_p=0.9).items():
        expected = naive_logprobs(parts[0], PROMPTS[i], completion.token_ids, temperature)
        assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_greedy_equals_argmax_step_by_step(parts: tuple[Any, Chat]) -> None:
    out = draw(parts, 1, temperature=0.0)
    with torch.no_grad():
        for i, prompt in enumerate(PROMPTS):
            ids = list(prompt)
            for token in out[i, 0].token_ids:
                assert int(parts[0](torch.tensor([ids])).logits[0, -1].argmax()) == token
                ids.append(token)


def test_completions_end_at_the_stop_token_or_at_the_budget(parts: tuple[Any, Chat]) -> None:
    stop = {parts[1].eos_id, *range(0, 256, 7)}
    reasons = set()
    for completion in draw(parts, 8).values():
        *body, last = completion.token_ids
        assert not stop & set(body)
        assert (last in stop) is (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 12
        reasons.add(completion.finish_reason)
    assert reasons == {"stop", "length"}


def test_draws_depend_on_the_seed_alone(parts: tuple[Any, Chat]) -> None:
    torch.manual_seed(1)
    first = draw(parts, 4)
    torch.manual_seed(2)
    assert draw(parts, 4) == first
    assert draw(parts, 4, seed=4) != first


def test_frequencies_follow_the_distribution(parts: tuple[Any, Chat]) -> None:
    model, chat = parts
    sampler = TransformersSampler(model, chat, [chat.eos_id], batch_size=4000)
    params = SamplingParams(1.0, 1.0, None, 1)
    tokens = [c.token_ids[0] for _, _, c in sampler.sample([PROMPTS[0]], 4000, params, seed=0)]
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([PROMPTS[0]])).logits[0, -1], -1)
    seen = torch.bincount(torch.tensor(tokens), minlength=len(expected)) / len(tokens)
    assert (seen - expected).abs().sum() < 2 * (len(expected) / len(tokens)) ** 0.5


def test_top_k_is_kept(parts: tuple[Any, Chat]) -> None:
    with torch.no_grad():
        allowed = parts[0](torch.tensor([PROMPTS[0]])).logits[0, -1].topk(2).indices.tolist()
    seen = {draw(parts, 40, top_k=2)[0, j].token_ids[0] for j in range(40)}
    assert seen == set(allowed)


def test_training_mode_is_left_as_it_was(parts: tuple[Any, Chat]) -> None:
    parts[0].train()
    draw(parts, 1)
    assert parts[0].training
    parts[0].eval()
    draw(parts, 1)
    assert not parts[0].training


def test_text_leaves_special_tokens_out_and_ids_keep_them(parts: tuple[Any, Chat]) -> None:
    _, chat = parts
    sampler = TransformersSampler(parts[0], chat, [chat.eos_id], batch_size=4)
    completion = sampler._completion([72, chat.eos_id], [-1.0, -1.0], True)
    assert completion.token_ids == (72, chat.eos_id)
    assert "<|end|>" not in completion.text
