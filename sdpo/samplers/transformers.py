"""Sampling with the policy module itself: no second copy of the weights, nothing to synchronise.

`generate` of transformers is not used because a step needs three things that it does not give at once: the log-probability
of every sampled token without keeping logits of the whole completion, the prompt of a group encoded once for all its
rollouts, and rows that leave the batch when they end. Truncation to top-k and top-p is transformers' own. Not covered:
beam search, penalties, stop strings, models without a key-value cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.generation.logits_process import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from sdpo.chat import Chat
from sdpo.errors import ConfigError
from sdpo.forward import cache_argument, new_cache
from sdpo.rollout import SamplingParams
from sdpo.types import Completion

__all__ = ["TransformersSampler"]


class TransformersSampler:
    """Draws from a causal language model of transformers.

    Args:
        model: the policy; its training mode and gradients are left as they are.
        chat: for the end and padding tokens and for decoding.
        stop_ids: token ids that end a completion.
        batch_size: rollouts decoded at the same time.
        autocast: a factory of the context in which the model runs.
    """

    def __init__(
        self,
        model: nn.Module,
        chat: Chat,
        stop_ids: Sequence[int],
        *,
        batch_size: int,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model = model
        self.chat = chat
        self.stop_ids = sorted(set(stop_ids))
        self.batch_size = batch_size
        self.autocast = autocast
        self._cache_argument = cache_argument(model)
        if not all(hasattr(layer, "batch_select_indices") for layer in new_cache(model).layers):
            raise ConfigError(
                f"{type(model).__name__} keeps a state that is no key-value cache",
                hint="models with convolution or state-space layers cannot be sampled here",
            )

    def sync(self) -> None:
        """Nothing to do: the weights are the policy's own."""

    def close(self) -> None:
        """Nothing is held."""

    def sample(
        self, prompts: Sequence[tuple[int, ...]], n: int, params: SamplingParams, *, seed: int
    ) -> Iterator[tuple[int, int, Completion]]:
        """See `sdpo.rollout.Sampler.sample`."""
        device = next(self.model.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        # Prompts of like length share a batch, so that little of it is padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        per_batch = max(1, self.batch_size // n)
        training = self.model.training
        self.model.eval()
        try:
            for start in range(0, len(order), per_batch):
                chosen = order[start : start + per_batch]
                repeats = [min(self.batch_size, n - done) for done in range(0, n, self.batch_size)]
                first = 0
                for repeat in repeats:
                    for row, completion in self._batch([prompts[i] for i in chosen], repeat, params, generator):
                        yield chosen[row // repeat], first + row % repeat, completion
                    first += repeat
        finally:
            self.model.train(training)

    @torch.no_grad()
    def _batch(
        self, prompts: Sequence[tuple[int, ...]], n: int, params: SamplingParams, generator: torch.Generator
    ) -> Iterator[tuple[int, Completion]]:
        """Decode `n` rollouts of each prompt; yield (row, completion) as rows end."""
        device = next(self.model.parameters()).device
        warpers = self._warpers(params)
        ids, mask = self._left_padded(prompts, device)
        cache = new_cache(self.model)
        with self.autocast():
            logits = self._forward(ids, mask, cache)
        if n > 1:
            cache.batch_repeat_interleave(n)
            logits, mask = logits.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)
        rows = list(range(len(prompts) * n))
        tokens: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        stop = torch.tensor(self.stop_ids, device=device)
        drawn = 0
        while rows:
            ended: list[tuple[int, bool]] = []
            # Left before every yield, so that the consumer does not run under autocast; kept over many tokens, so that
            # weights are cast once and not once a token.
            with self.autocast():
                while not ended:
                    chosen, chosen_logprobs = self._draw(logits, ids, params, warpers, generator)
                    drawn += 1
                    stopped = torch.isin(chosen, stop).tolist()
                    over = drawn == params.max_tokens
                    values = zip(rows, chosen.tolist(), chosen_logprobs.tolist(), stopped, strict=True)
                    for row, token, logprob, done in values:
                        tokens[row].append(token)
                        logprobs[row].append(logprob)
                        if done or over:
                            ended.append((row, done))
                    if len(ended) == len(rows):
                        rows = []
                        break
                    if ended:
                        keep = [i for i, done in enumerate(stopped) if not done]
                        rows = [rows[i] for i in keep]
                        index = torch.tensor(keep, device=device)
                        cache.batch_select_indices(index)
                        chosen, mask = chosen[index], mask[index]
                    mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
                    logits = self._forward(chosen[:, None], mask, cache)
            for row, done in ended:
                yield row, self._completion(tokens[row], logprobs[row], done)

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """[rows, V] float32 logits of the last column."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            **{self._cache_argument: cache},
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def _draw(
        self,
        logits: Tensor,
        ids: Tensor,
        params: SamplingParams,
        warpers: LogitsProcessorList,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """One token a row and its log-probability before truncation."""
        if params.temperature == 0:
            chosen = logits.argmax(-1)
            logprobs = torch.log_softmax(logits, -1)
        else:
            logits = logits / params.temperature
            logprobs = torch.log_softmax(logits, -1)
            probabilities = torch.softmax(warpers(ids, logits) if warpers else logits, -1)
            chosen = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
        return chosen, logprobs.gather(1, chosen[:, None]).squeeze(1)

    def _completion(self, tokens: list[int], logprobs: list[float], stopped: bool) -> Completion:
        return Completion(
            text=self.chat.completion_text(tokens),
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            finish_reason="stop" if stopped else "length",
        )

    def _left_padded(self, prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
        width = max(map(len, prompts))
        ids = torch.tensor([[self.chat.pad_id] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        return ids, mask

    def _warpers(self, params: SamplingParams) -> LogitsProcessorList:
        warpers = LogitsProcessorList()
        if params.temperature > 0 and params.top_k is not None:
            warpers.append(TopKLogitsWarper(top_k=params.top_k))
        if params.temperature > 0 and params.top_p < 1:
            warpers.append(TopPLogitsWarper(top_p=params.top_p))
        return warpers
