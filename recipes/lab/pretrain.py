"""Rebuild the lab's checkpoint: a Llama of 163,648 parameters that learns in context, in minutes on one core.

    python recipes/lab/pretrain.py --out DIR [--seed 0] [--steps 4000]

Supervised, on a mixture of plain questions (the policy stays unsure of what a name means) and questions with a
solution, with feedback on a wrong attempt, or with both (the model learns to read them). A part of the answers after a
context is *wrong* throughout and counts only after its first deviation: text stays coherent with its own beginning, as
natural text does. Sequences are laid out by the templates that training uses, see `layout`.

Writes the Hugging Face folder, and in it `lab.json`: teacher gap, arguments and the SHA-256 of the weights. One thread
and one seed give the same bytes on one machine; another processor or version of torch may round differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sdpo.types import Task
from sdpo_envs.lab import DEMONSTRATION_TEMPLATE, FEEDBACK_TEMPLATE, TEMPLATE, Lab
from sdpo_envs.lab.language import CHAT_TEMPLATE, EOS, FUNCTIONS, NAMES, PAD, RARE, UNK, WORDS

Ids = npt.NDArray[np.int64]

BATCH = 128
LEARNING_RATE = 2e-3
WARM_UP = 100
# plain, solution, solution and feedback, feedback
MIXTURE = (0.45, 0.08, 0.07, 0.40)
RARE_WITHOUT_CONTEXT = 0.02
WRONG_ANSWERS = 0.30
IGNORED = -100


def build_tokenizer() -> Any:
    """A word-level tokenizer of the lab's vocabulary, with its chat template."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=EOS, unk_token=UNK, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(seed: int) -> Any:
    """The untrained model. Two heads of 32: vLLM's CPU build refuses heads of 16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.08,  # learns in half the steps of the usual 0.02
        pad_token_id=WORDS.index(PAD),
        eos_token_id=WORDS.index(EOS),
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def teacher_text(question: str, demonstration: str, feedback: str) -> str:
    """The user turn of a teacher prompt; an empty section is left out."""
    return TEMPLATE.format(
        question=question,
        demonstration=DEMONSTRATION_TEMPLATE.format(demonstration=demonstration) if demonstration else "",
        feedback=FEEDBACK_TEMPLATE.format(feedback=feedback) if feedback else "",
    )


SLOTS = {
    "question": ("name", "x1", "x2", "x3"),
    "solution": ("s1", "s2", "s3"),
    "feedback": ("t1", "t2", "t3", "E", "position", "wanted"),
    "answer": ("a1", "a2", "a3"),
}


def layout(tokenizer: Any, *, solution: bool, feedback: bool) -> list[str]:
    """The words of a sequence in order, slots in place of what varies: rendered by the templates, so that pretraining
    sees what training will show."""
    question, demonstration, told, answer = (" ".join(SLOTS[part]) for part in SLOTS)
    user = teacher_text(question, demonstration if solution else "", told if feedback else "")
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False)).split()


@dataclass(frozen=True)
class Sequences:
    """Token ids [N, L] and labels [N, L] (IGNORED where no loss), padded on the right."""

    ids: Ids
    labels: Ids


class Mixture:
    """Draws pretraining sequences, without a Python loop over them.

    Args:
        tokenizer: gives the layouts.
        seed: of all draws.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.layouts = [
            layout(tokenizer, solution=solution, feedback=feedback)
            for solution, feedback in ((False, False), (True, False), (True, True), (False, True))
        ]
        self.length = max(map(len, self.layouts))
        self.order = np.array([f.order for f in FUNCTIONS])
        self.sign = np.array([f.sign for f in FUNCTIONS])
        self.shift = np.array([f.shift for f in FUNCTIONS])
        self.priors = np.stack([_prior(name) for name in NAMES])

    def draw(self, count: int) -> Sequences:
        """`count` sequences of the mixture, sorted by kind."""
        kinds = np.sort(self.rng.choice(len(MIXTURE), size=count, p=MIXTURE))
        parts = [self._of_kind(kind, int((kinds == kind).sum())) for kind in range(len(MIXTURE))]
        return Sequences(np.concatenate([p.ids for p in parts]), np.concatenate([p.labels for p in parts]))

    def _of_kind(self, kind: int, count: int) -> Sequences:
        rows = np.arange(count)
        name = self.rng.integers(len(NAMES), size=count)
        x = self.rng.integers(10, size=(count, 3))
        outputs = (self.sign[:, None] * x[:, self.order] + self.shift[:, None]) % 10  # [N, functions, 3]
        if kind == 0:
            function = (self.rng.random((count, 1)) > self.priors[name].cumsum(axis=1)).sum(axis=1)
            function = np.minimum(function, len(FUNCTIONS) - 1)  # rounding of the cumulated sum
        else:
            function = self.rng.integers(len(FUNCTIONS), size=count)
        truth = outputs[rows, function]
        attempt = self._other(outputs, truth)
        first = (attempt != truth).argmax(axis=1)

        answer, start = truth, np.zeros(count, dtype=np.int64)
        if kind != 0:
            # Half of the wrong answers repeat the attempt: the very text that a self-teacher re-scores.
            wrong = np.where(self.rng.random((count, 1)) < 0.5, attempt, self._other(outputs, truth))
            chosen = self.rng.random(count) < WRONG_ANSWERS
            answer = np.where(chosen[:, None], wrong, truth)
            start = np.where(chosen, (wrong != truth).argmax(axis=1) + 1, 0)

        word = WORDS.index
        values = {"name": word(next(iter(NAMES))) + name, "position": word("p1") + first}
        values |= {"wanted": word("0") + truth[rows, first]}
        for letter, digits in (("x", x), ("s", truth), ("t", attempt), ("a", answer)):
            values |= {f"{letter}{i + 1}": word("0") + digits[:, i] for i in range(3)}
        ids = np.full((count, self.length), word(PAD), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for column, slot in enumerate(self.layouts[kind]):
            ids[:, column] = values[slot] if slot in values else word(slot)
        begin = self.layouts[kind].index("a1")
        for i in range(4):  # three digits and the end token
            labels[:, begin + i] = np.where(i >= start, ids[:, begin + i], IGNORED)
        return Sequences(ids, labels)

    def _other(self, outputs: Ids, truth: Ids) -> Ids:
        """The output of a random function that differs from the truth."""
        differs = (outputs != truth[:, None]).any(axis=2)
        choice = np.where(differs, self.rng.random(differs.shape), -1.0).argmax(axis=1)
        return np.asarray(outputs[np.arange(len(truth)), choice])


def _prior(name: str) -> npt.NDArray[np.float64]:
    """How often each function is shown with a name in plain questions."""
    binding = NAMES[name]
    share = np.full(len(FUNCTIONS), RARE_WITHOUT_CONTEXT / len(RARE))
    common = [i for i in range(len(FUNCTIONS)) if i not in RARE]
    others = [i for i in common if i != binding.function]
    share[others] = (1 - RARE_WITHOUT_CONTEXT) * (1 - binding.prior) / len(others)
    if not binding.hard:
        share[binding.function] = (1 - RARE_WITHOUT_CONTEXT) * binding.prior
    return share


def train(model: Any, mixture: Mixture, steps: int, *, log_every: int = 200) -> None:
    """AdamW with a linear warm-up and a cosine to zero; loss is the mean over counted tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    started, losses = time.perf_counter(), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
        drawn = mixture.draw(BATCH)
        logits = model(input_ids=torch.from_numpy(drawn.ids[:, :-1])).logits
        labels = torch.from_numpy(drawn.labels[:, 1:])
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % log_every == 0:
            mean = sum(losses[-log_every:]) / log_every
            print(f"step {step + 1:5d}  loss {mean:.4f}  {time.perf_counter() - started:.0f} s", flush=True)


@torch.no_grad()
def answer(model: Any, tokenizer: Any, users: Sequence[str], *, sample: bool, seed: int = 0) -> list[str]:
    """One answer a user turn, sampled at temperature 1 or greedy, of at most 4 tokens."""
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True)
        for user in users
    ]
    tokenizer.padding_side = "left"
    encoded = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    torch.manual_seed(seed)
    out = model.generate(
        encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=4,
        do_sample=sample,
        temperature=1.0 if sample else None,
        top_k=0 if sample else None,
        pad_token_id=tokenizer.pad_token_id,
    )
    new = out[:, encoded["input_ids"].shape[1] :]
    return [str(text) for text in tokenizer.batch_decode(new, skip_special_tokens=True)]


def teacher_gap(model: Any, tokenizer: Any, *, questions: int = 1024, seed: int = 0) -> dict[str, float]:
    """What a context is worth: success of the policy, and of the model shown feedback on its failures or a solution.

    Returns:
        Shares of success at temperature 1 over test questions (`greedy*`: greedy), with `_easy` and `_hard` parts:
        `policy`; over the policy's failures `retry` (no context), `with_feedback`, `with_solution`, `with_both`.
    """
    env = Lab(seed=seed, test_size=questions)
    tasks = list(env.tasks("test"))
    plain = [task.prompt[-1]["content"] for task in tasks]

    def shares(key: str, of: Sequence[Task], texts: Sequence[str]) -> dict[str, float]:
        rewards = {part: [] for part in ("", "_easy", "_hard")}  # type: dict[str, list[float]]
        for task, text in zip(of, texts, strict=True):
            reward = env.grade(task, text).reward
            rewards[""].append(reward)
            rewards["_hard" if task.metadata["hard"] else "_easy"].append(reward)
        return {key + part: round(sum(r) / len(r), 4) for part, r in rewards.items() if r}

    attempts = answer(model, tokenizer, plain, sample=True, seed=seed)
    result = shares("greedy", tasks, answer(model, tokenizer, plain, sample=False))
    result |= shares("policy", tasks, attempts)
    told = [(t, f) for t, text in zip(tasks, attempts, strict=True) if (f := env.grade(t, text).feedback)]
    failed = [task for task, _ in told]
    for key, solution, feedback in (
        ("retry", False, False),
        ("with_feedback", False, True),
        ("with_solution", True, False),
        ("with_both", True, True),
    ):
        users = [
            teacher_text(t.prompt[-1]["content"], t.target if solution else "", f if feedback else "") for t, f in told
        ]
        result |= shares(key, failed, answer(model, tokenizer, users, sample=True, seed=seed + 1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the data")
    parser.add_argument("--steps", type=int, default=4000, help=f"batches of {BATCH} sequences")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists; give a new folder")
    torch.set_num_threads(1)  # two threads on busy cores wait for each other; one is also deterministic
    tokenizer, model = build_tokenizer(), build_model(args.seed)
    train(model, Mixture(tokenizer, args.seed), args.steps)
    model.eval()
    gap = teacher_gap(model, tokenizer)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    digest = hashlib.sha256((args.out / "model.safetensors").read_bytes()).hexdigest()
    record = {"sha256": digest, "seed": args.seed, "steps": args.steps, "teacher_gap": gap}
    (args.out / "lab.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
