r"""Multiple-choice questions: the part that SciKnowEval, GPQA and MMLU-Pro share.

A grade separates two things that published graders mix up: whether a letter could be read (any usual way of giving
one, `sdpo_envs.grading.choice`) and whether it was given in the form that the prompt asks for. `reward` says which of
the two is paid; both are in the metrics:

    correct   the letter is right
    format    the answer has the asked form, and only once
    parsed    one letter could be read

Feedback is about the form, and by option about the verdict; it never names a letter that the response did not name.

Not covered: several correct letters that must all be named, free-text answers.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from sdpo.env import Env
from sdpo.errors import ConfigError, did_you_mean
from sdpo.types import Grade, Message, Task
from sdpo_envs.grading.choice import Choice, extract_choice
from sdpo_envs.grading.text import final_text, quote

__all__ = [
    "FORMS",
    "LETTERS",
    "Feedback",
    "Form",
    "MultipleChoice",
    "Question",
    "Reward",
    "listed",
    "one_of",
    "remove_duplicates",
]

LETTERS = "ABCDEFGHIJ"
Reward = Literal["correct", "strict", "format"]
Feedback = Literal["none", "format", "verdict", "reason"]


@dataclass(frozen=True, slots=True)
class Question:
    """One multiple-choice question.

    Attributes:
        id: unique within its environment.
        split: "train" or "test".
        text: the question without its options.
        options: the options' texts, A first; two to ten.
        answer: the right letter.
        reason: why it is right, if the data say so (the feedback "reason").
        system, user: the prompt as the data's authors wrote it, where the data have it.
        metadata: what else is known, for example the domain.
    """

    id: str
    split: str
    text: str
    options: tuple[str, ...]
    answer: str
    reason: str = ""
    system: str | None = None
    user: str | None = None
    metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if not 2 <= len(self.options) <= len(LETTERS):
            raise ConfigError(f"question {self.id}: {len(self.options)} options", hint="2 to 10 can be lettered")
        if len(self.answer) != 1 or self.answer not in self.letters:
            raise ConfigError(
                f"question {self.id}: the answer is {self.answer!r}",
                hint=f"one of {', '.join(self.letters)}; leave questions with several answers out",
            )

    @property
    def letters(self) -> str:
        """The options' letters."""
        return LETTERS[: len(self.options)]

    @property
    def accepted(self) -> list[str]:
        """The answer's letter and those of options with the very same text."""
        right = _same(self.options[LETTERS.index(self.answer)])
        return [letter for letter, text in zip(self.letters, self.options, strict=True) if _same(text) == right]


@dataclass(frozen=True, slots=True)
class Form:
    """How an answer is to be given.

    Attributes:
        pattern: matches a well-formed answer, the letter as group 1.
        begins: matches whatever begins such an answer; a response has the form when it holds exactly one.
        write: the form with {letter} in it, for prompts and feedback.
        name: what feedback calls it.
    """

    pattern: re.Pattern[str]
    begins: re.Pattern[str]
    write: str
    name: str


FORMS = {
    "tag": Form(
        re.compile(r"<answer>\s*([A-J])\s*</answer>"),
        re.compile(r"<answer>"),
        "<answer>{letter}</answer>",
        "<answer> tags",
    ),
    "boxed": Form(re.compile(r"\\boxed\{([A-J])\}"), re.compile(r"\\boxed"), r"\boxed{{{letter}}}", r"\boxed{}"),
    "phrase": Form(
        re.compile(r"[Tt]he answer is \(([A-J])\)"),
        re.compile(r"the answer is \(", re.IGNORECASE),
        "the answer is ({letter})",
        'the words "the answer is (…)"',
    ),
}


class MultipleChoice(Env):
    """Grades and feedback for lettered questions; subclasses bring the questions (`load`) and the prompt.

    Args:
        form: "tag", "boxed" or "phrase": the form that the prompt asks for.
        reward: what is paid. "correct": the right letter, however it was given. "strict": the right letter in the asked
            form. "format": any single letter in the asked form (for teaching a small model the form alone).
        format_credit: reward below 1 for an answer in the asked form that does not earn 1.
        feedback: "none"; "format": what is wrong with the form; "verdict": also that the letter is not right;
            "reason": also the question's reason, unless it gives the answer away.
    """

    def __init__(
        self,
        *,
        form: str = "tag",
        reward: Reward = "correct",
        format_credit: float = 0.0,
        feedback: Feedback = "format",
    ) -> None:
        one_of("form", form, tuple(FORMS))
        one_of("reward", reward, get_args(Reward))
        one_of("feedback", feedback, get_args(Feedback))
        if not 0.0 <= format_credit < 1.0:
            raise ConfigError(
                f"format_credit = {format_credit}", hint="at least 0 and below 1, the reward of a success"
            )
        self._form = FORMS[form]
        self._reward = reward
        self._credit = format_credit
        self._feedback = feedback
        self.duplicates = 0

    @abstractmethod
    def load(self) -> Sequence[Question]:
        """All questions of all splits, with unique ids. Called once, when the first task is asked for."""

    @cached_property
    def questions(self) -> list[Question]:
        """What `load` found, without repeated questions."""
        questions, self.duplicates = remove_duplicates(self.load())
        if len({question.id for question in questions}) < len(questions):
            raise ConfigError(
                f"{self._name()}: two questions have the same id", hint="ids must be unique in all splits"
            )
        return questions

    def prompt(self, question: Question) -> tuple[Message, ...]:
        """The chat that asks one question. Subclasses override it."""
        return (Message(role="user", content=f"{question.text}\n\n{listed(question)}"),)

    def tasks(self, split: str) -> Sequence[Task]:
        splits = {question.split for question in self.questions}
        if split not in splits:
            raise ConfigError(f"{self._name()} has no split {split!r}", hint=did_you_mean(split, splits))
        return [self._task(question) for question in self.questions if question.split == split]

    def describe(self) -> str:
        counts = Counter(question.split for question in self.questions)
        sizes = ", ".join(f"{count} {split}" for split, count in counts.items())
        return f"{super().describe()}\n\nQuestions: {sizes}. Removed as duplicates: {self.duplicates}."

    def task_from(self, row: Mapping[str, Any]) -> Task:
        """A task for `sdpo env grade`: `options` (letters), `gold`, and `option_texts` by letter if known."""
        letters = [str(letter) for letter in row["options"]]
        texts = row.get("option_texts") or {}
        options = tuple(str(texts.get(letter, f"option {letter}")) for letter in letters)
        answer = str(row["gold"]).strip().upper()
        return self._task(Question("case", "case", str(row.get("question", "")), options, answer))

    def grade(self, task: Task, completion: str) -> Grade:
        letters = LETTERS[: len(task.metadata["options"])]
        texts = dict(zip(letters, task.metadata["options"], strict=True))
        choice = extract_choice(completion, letters, texts)
        well_formed = _well_formed(self._form, completion, letters)
        correct = choice.letter is not None and choice.letter in task.metadata["accepted"]
        success = {"correct": correct, "strict": correct and well_formed, "format": well_formed}[self._reward]
        return Grade(
            reward=1.0 if success else self._credit * well_formed,
            feedback="" if success else self._explain(task, choice, well_formed, correct),
            success=success,
            metrics={
                "correct": float(correct),
                "format": float(well_formed),
                "parsed": float(choice.letter is not None),
            },
        )

    def _task(self, question: Question) -> Task:
        answer = self._form.write.format(letter=question.answer)
        return Task(
            id=question.id,
            prompt=self.prompt(question),
            target=question.answer,
            demonstration=f"{question.reason}\n\n{answer}" if question.reason else answer,
            metadata={
                **(question.metadata or {}),
                "options": list(question.options),
                "accepted": question.accepted,
                "reason": question.reason,
            },
        )

    def _explain(self, task: Task, choice: Choice, well_formed: bool, correct: bool) -> str:
        if self._feedback == "none":
            return ""
        parts = [] if well_formed else [self._explain_form(task, choice)]
        if self._feedback in ("verdict", "reason") and choice.letter and not correct:
            parts.append(f"{choice.letter} is not the right option.")
            if self._feedback == "reason" and (reason := _discreet(task)):
                parts.append(reason)
        return " ".join(parts)

    def _explain_form(self, task: Task, choice: Choice) -> str:
        options = ", ".join(LETTERS[: len(task.metadata["options"])])
        wanted = f"End with one letter in this form: {self._form.write.format(letter='X')}, X being one of {options}."
        if choice.letter:
            mine = self._form.write.format(letter=choice.letter)
            return f"The answer {choice.letter} is not in the required form. It must be written once, as {mine}"
        if choice.problem == "empty":
            return f"The response is empty. {wanted}"
        if choice.problem == "unfinished":
            return f"The response ended before the answer was complete. Be shorter. {wanted}"
        if choice.problem == "several":
            return f"The response gives several answers ({', '.join(choice.letters)}). Choose one. {wanted}"
        if choice.problem == "unknown" and choice.said:
            return f"{quote(choice.said)} is not the letter of an option. {wanted}"
        return f"The response has no answer in {self._form.name}. {wanted}"

    def _name(self) -> str:
        return type(self).__name__


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ConfigError when a named setting has a value that does not exist."""
    if value not in allowed:
        raise ConfigError(f"{key} = {value!r}", hint=f"one of {', '.join(allowed)}")


def listed(question: Question) -> str:
    """The options, one a line: "A: ..."."""
    return "\n".join(f"{letter}: {text}" for letter, text in zip(question.letters, question.options, strict=True))


def remove_duplicates(questions: Sequence[Question]) -> tuple[list[Question], int]:
    """Keep each question (text and options) once; a training question that is also a test question goes.

    Returns:
        The questions left, in order, and how many went.
    """
    seen: set[tuple[str, ...]] = set()
    kept: set[int] = set()
    for i in sorted(range(len(questions)), key=lambda i: questions[i].split != "test"):
        key = (_same(questions[i].text), *map(_same, questions[i].options))
        if key not in seen:
            seen.add(key)
            kept.add(i)
    return [questions[i] for i in sorted(kept)], len(questions) - len(kept)


def _well_formed(form: Form, completion: str, letters: str) -> bool:
    text = final_text(completion)
    if text is None:
        return False
    found = form.pattern.findall(text)
    return len(found) == 1 and found[0] in letters and len(form.begins.findall(text)) == 1


def _discreet(task: Task) -> str:
    """The question's reason, if it gives neither the letter nor the text of the right option away."""
    reason: str = task.metadata["reason"]
    for letter in task.metadata["accepted"]:
        text = task.metadata["options"][LETTERS.index(letter)]
        article = r"(?!\s[a-z])" if letter in "AI" else ""
        if _same(text) in _same(reason) or re.search(rf"(?<!\w){letter}(?!\w){article}", reason):
            return ""
    return reason


def _same(text: str) -> str:
    return " ".join(text.split()).casefold()
