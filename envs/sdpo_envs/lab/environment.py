"""The lab: questions that a model of 160 thousand parameters can learn from feedback, in seconds on a CPU.

A task built to have the property that SDPO needs, and tuned on itself: it tests the machinery, not language models.
Grading is exact and cheap; nothing an attempt contains is executed or repeated beyond its first three digits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from sdpo.env import Env
from sdpo.errors import ConfigError, did_you_mean
from sdpo.types import Grade, Message, Task
from sdpo_envs.lab.language import DIGITS, ERROR, FUNCTIONS, NAMES, NOTHING, POSITIONS, SKILLS, Binding

__all__ = ["Lab", "checkpoint", "feedback"]

_SPLIT_SEED = 11
_HELD_OUT = 200  # of a name's 1,000 questions
_LENGTH = 3


def checkpoint() -> Path:
    """Folder of the shipped model: a Hugging Face Llama with its tokenizer (`recipes/lab/pretrain.py` rebuilds it)."""
    return Path(__file__).parent / "model"


def feedback(attempt: str, target: str) -> str:
    """What is wrong with an attempt, in the lab's words: "5 3 0 E p2 7".

    The attempt, and the digit wanted at its *first* wrong position. A position that is missing or holds anything but a
    digit counts as wrong and is written "_"; a fourth word is answered by "p4 _".

    Returns:
        The feedback; empty when the attempt equals the target up to white space.
    """
    words = attempt.split(maxsplit=_LENGTH)
    wanted = target.split()
    shown = [word if word in DIGITS else NOTHING for word in words[:_LENGTH]]
    shown += [NOTHING] * (_LENGTH - len(shown))
    for position, (got, digit) in enumerate(zip(shown, wanted, strict=True)):
        if got != digit:
            return " ".join([*shown, ERROR, POSITIONS[position], digit])
    return " ".join([*shown, ERROR, POSITIONS[_LENGTH], NOTHING]) if len(words) > _LENGTH else ""


class Lab(Env):
    """Names bound to hidden functions on three digits: "ba 4 2 9" -> "5 7 0".

    24 names are easy (their function is common in the pretraining), 8 are hard (theirs is rare: the untrained policy
    answers about one in a hundred right). Splits: "train" and "test"; 200 of each name's 1,000 questions are test
    questions, whatever the arguments. Made for the checkpoint in `sdpo_envs.lab.checkpoint()`.

    Args:
        names: "all", "easy", "hard", or a skill: 0, 1, 2 for thirds of the names, to learn one after another.
        seed: chooses and orders the questions of a split.
        train_size: at most this many training questions.
        test_size: at most this many test questions.
    """

    def __init__(
        self, names: str | int = "all", *, seed: int = 0, train_size: int = 16_384, test_size: int = 1_024
    ) -> None:
        for key, value in (("train_size", train_size), ("test_size", test_size)):
            if value < 1:
                raise ConfigError(f"lab: {key} = {value}", hint="give at least 1")
        self._names = [name for name, binding in NAMES.items() if _selected(binding, names)]
        self._seed = seed
        self._sizes = {"train": train_size, "test": test_size}

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._sizes:
            raise ConfigError(f"lab has no split {split!r}", hint=did_you_mean(split, self._sizes))
        held_out = split == "test"
        pool = [(name, number) for name in self._names for number in _numbers(name, held_out)]
        random.Random(f"{self._seed}/{split}").shuffle(pool)
        return [_task(name, number) for name, number in pool[: self._sizes[split]]]

    def grade(self, task: Task, completion: str) -> Grade:
        told = feedback(completion, task.target)
        return Grade(reward=0.0 if told else 1.0, feedback=told, success=not told)


def _selected(binding: Binding, names: str | int) -> bool:
    groups = {"all": True, "easy": not binding.hard, "hard": binding.hard}
    if isinstance(names, str) and names in groups:
        return groups[names]
    if type(names) is int and names in range(SKILLS):
        return binding.skill == names
    raise ConfigError(f"lab: names = {names!r}", hint='one of "all", "easy", "hard", 0, 1, 2')


def _numbers(name: str, held_out: bool) -> Sequence[int]:
    """Digit triples as numbers below 1,000: the part of one name that belongs to a split."""
    shuffled = random.Random(f"{_SPLIT_SEED}/{name}").sample(range(10**_LENGTH), 10**_LENGTH)
    return shuffled[:_HELD_OUT] if held_out else shuffled[_HELD_OUT:]


def _task(name: str, number: int) -> Task:
    question = f"{number:0{_LENGTH}d}"
    binding = NAMES[name]
    answer = " ".join(str(digit) for digit in FUNCTIONS[binding.function](tuple(map(int, question))))
    return Task(
        id=f"{name}-{question}",
        prompt=(Message(role="user", content=" ".join([name, *question])),),
        target=answer,
        demonstration=answer,
        metadata={"name": name, "hard": binding.hard, "skill": binding.skill},
    )
