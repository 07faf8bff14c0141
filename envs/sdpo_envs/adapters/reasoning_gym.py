"""reasoning-gym (github.com/open-thought/reasoning-gym): over a hundred generators of checkable puzzles, no network.

    sdpo.load_env("rg:chain_sum", train_size=200, min_terms=2, max_terms=3)

The generators and scorers are theirs; the answer's form, the feedback and the isolation are ours. They run in grading
processes: several scorers evaluate the attempt as an expression, which can hang. Training questions that are also test
questions are removed (small generators repeat themselves). Not covered: curricula, composite data sets.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, get_args

from sdpo.env import Env
from sdpo.errors import ConfigError, GradingError, MissingDependencyError, did_you_mean
from sdpo.types import Grade, Message, Task
from sdpo_envs.grading.text import final_text, find_tags, quote
from sdpo_envs.grading.worker import WorkerFailure, Workers

__all__ = ["ReasoningGym"]

Form = Literal["tags", "text"]
System = Literal["short", "reason", "none"]
Reward = Literal["score", "correct", "format"]
Feedback = Literal["none", "format", "verdict", "answer"]

_SYSTEM = {
    "short": "Answer with the result only{form}.",
    "reason": "Think step by step. Then give the result{form}.",
    "none": "",
}
_IN_TAGS = ", in this form: <answer>result</answer>"
_TEST_SEED = 500_000_000  # item i is made from seed + i: far enough from every training item
_GENERATE_S = 600.0
_WORKERS = Workers("sdpo_envs.adapters.reasoning_gym_scorer:run", timeout=60.0)
"""Shared by all data sets of a process: a mixture of ten of them must not import reasoning-gym in ten times as many."""
_LONGEST = 20_000  # characters of an answer


class ReasoningGym(Env):
    """A reasoning-gym data set; splits "train" and "test" are made from different seeds.

    Args:
        dataset: its name, for example "chain_sum".
        train_size, test_size: questions of each split (a few less where the generator repeats itself).
        seed: of the generator.
        system: "short": the result only; "reason": reasoning first; "none": no system prompt.
        answer: "tags": the result stands in <answer> tags; "text": the response is the result.
        reward: "score": the scorer's number (many give a little for a near miss); "correct": 1 for full marks, else 0;
            "format": 1 for one answer in tags, right or wrong.
        format_credit: least reward of an answer in the asked form.
        feedback: "none"; "format": what is wrong with the form; "verdict": also whether the result is wrong or close;
            "answer": also the right result.
        timeout: seconds for one scoring.
        kwargs: settings of the data set, for example min_terms=2.
    """

    feedback_reveals_target = True  # under feedback = "answer"

    def __init__(
        self,
        dataset: str,
        *,
        train_size: int = 500,
        test_size: int = 100,
        seed: int = 0,
        system: System = "short",
        answer: Form = "tags",
        reward: Reward = "score",
        format_credit: float = 0.0,
        feedback: Feedback = "verdict",
        timeout: float = 10.0,
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise MissingDependencyError(f"environment rg:{dataset}", extra="rg")
        named = {"system": System, "answer": Form, "reward": Reward, "feedback": Feedback}
        for key, value in (("system", system), ("answer", answer), ("reward", reward), ("feedback", feedback)):
            if value not in get_args(named[key]):
                raise ConfigError(f"rg: {key} = {value!r}", hint=f"one of {', '.join(get_args(named[key]))}")
        for key, size in (("train_size", train_size), ("test_size", test_size)):
            if size < 1:
                raise ConfigError(f"rg: {key} = {size}", hint="give at least 1")
        if not 0.0 <= format_credit < 1.0:
            raise ConfigError(f"rg: format_credit = {format_credit}", hint="at least 0 and below 1")
        self._name = dataset
        self._sizes = {"train": train_size, "test": test_size}
        self._seed = seed
        self._prompt = _SYSTEM[system].format(form=_IN_TAGS if answer == "tags" else "")
        self._tags = answer == "tags"
        self._reward = reward
        self._credit = format_credit
        self._feedback = feedback
        self._config = repr(kwargs)
        self._made: dict[str, list[Task]] = {}
        self._timeout = timeout

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._sizes:
            raise ConfigError(f"rg:{self._name} has no split {split!r}", hint=did_you_mean(split, self._sizes))
        if not self._made:
            test = self._generate("test")
            asked = {task.prompt[-1]["content"] for task in test}
            train = [task for task in self._generate("train") if task.prompt[-1]["content"] not in asked]
            if not train:
                raise ConfigError(
                    f"rg:{self._name}: every training question is also a test question",
                    hint="the generator has too few different questions: lower test_size or widen its settings",
                )
            self._made = {"train": train, "test": test}
        return self._made[split]

    def grade(self, task: Task, completion: str) -> Grade:
        text = final_text(completion)
        given, fault = self._read(text)
        formed = given is not None
        score = None if given is None else self._score(task, given)
        correct = score is not None and score >= 1.0
        success = formed if self._reward == "format" else correct
        base = {"score": score or 0.0, "correct": float(correct), "format": float(formed)}[self._reward]
        return Grade(
            reward=max(base, self._credit * formed),
            feedback="" if success else self._explain(task, given, fault, score),
            success=success,
            metrics={"correct": float(correct), "format": float(formed), "score": score or 0.0},
        )

    def close(self) -> None:
        _WORKERS.close()

    def _generate(self, split: str) -> list[Task]:
        size, seed = self._sizes[split], self._split_seed(split)
        try:
            names = _WORKERS.call(action="names")
            if self._name not in names:
                raise ConfigError(f"reasoning-gym has no data set {self._name!r}", hint=did_you_mean(self._name, names))
            items = _WORKERS.call(
                timeout=_GENERATE_S,
                action="generate",
                name=self._name,
                size=size,
                seed=seed,
                config=self._config,
                start=0,
                stop=size,
            )
        except WorkerFailure as failure:
            raise ConfigError(
                f"rg:{self._name}: could not make the {split} questions: {failure}",
                hint=f"its settings were {self._config}",
            ) from failure
        unique = {item["question"]: (index, item) for index, item in reversed(list(enumerate(items)))}
        return [self._task(split, index, item) for index, item in reversed(unique.values())]

    def _task(self, split: str, index: int, item: dict[str, Any]) -> Task:
        system = (Message(role="system", content=self._prompt),) if self._prompt else ()
        answer = item["answer"]
        shown = f"<answer>{answer}</answer>" if self._tags else answer
        return Task(
            id=f"{split}-{index}",
            prompt=(*system, Message(role="user", content=item["question"])),
            target=answer,
            demonstration=None if answer is None else shown,
            metadata={"split": split, "index": index},
        )

    def _split_seed(self, split: str) -> int:
        return self._seed + (_TEST_SEED if split == "test" else 0)

    def _read(self, text: str | None) -> tuple[str | None, str]:
        """The result in a response, or None and what is wrong with the form."""
        if text is None:
            return None, "The response ended before it gave an answer. Be shorter."
        if not text.strip():
            return None, "The response is empty."
        if not self._tags:
            return text.strip()[:_LONGEST], ""
        found = find_tags(text, "answer")
        if not found:
            return None, "There are no <answer> tags."
        if not found[-1].closed:
            return None, "The closing </answer> is missing."
        if len(found) > 1:
            return None, "There is more than one <answer>."
        given = found[0].content.strip()
        return (given[:_LONGEST], "") if given else (None, "There is nothing between the <answer> tags.")

    def _score(self, task: Task, given: str) -> float | None:
        split = task.metadata["split"]
        request = {
            "action": "score",
            "name": self._name,
            "size": self._sizes[split],
            "seed": self._split_seed(split),
            "config": self._config,
            "index": task.metadata["index"],
        }
        try:
            score = _WORKERS.call(timeout=self._timeout, **request, answer=given)
        except WorkerFailure as failure:
            if failure.kind == "raised":
                raise GradingError(f"rg:{self._name}: the scorer failed: {failure}") from failure
            self._check_scorer(task, request)
            return None
        return None if score is None else min(max(float(score), 0.0), 1.0)

    def _check_scorer(self, task: Task, request: dict[str, Any]) -> None:
        """After a scoring without end: is it this answer, or can nothing be scored here and now?"""
        try:
            _WORKERS.call(timeout=self._timeout, **request, answer=task.target or "0")
        except WorkerFailure as failure:
            raise GradingError(
                f"rg:{self._name}: the scorer cannot score the right answer either: {failure}"
            ) from failure

    def _explain(self, task: Task, given: str | None, fault: str, score: float | None) -> str:
        if self._feedback == "none":
            return ""
        if given is None:
            wanted = " Write the result once, as <answer>result</answer>." if self._tags else " Write the result."
            told = fault + wanted
        elif self._feedback == "format":
            return ""
        elif score is None:
            told = f"The result {quote(given)} cannot be read as an answer to this question."
        elif score >= 0.1:
            told = f"The result {quote(given)} is not right, but close: {score:.2g} of 1."
        else:
            told = f"The result {quote(given)} is wrong."
        if self._feedback == "answer" and task.target is not None:
            told += f" The right result is {task.target}"
        return told
