r"""GPQA: graduate-level questions in biology, physics and chemistry, four options (arXiv 2311.12022).

The data give one right and three wrong answers without letters. They are shuffled by a seed that belongs to the question,
so that labels do not change between runs, machines or subsets. The data set is gated: accept its terms on the hub and log
in, or give local rows. It has one split, used as "test" here; training on it needs rows of one's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from sdpo.types import Message
from sdpo_envs.multiple_choice import LETTERS, Feedback, MultipleChoice, Question, Reward, listed, one_of
from sdpo_envs.rows import Row, field, hub_rows, json_files, read_rows
from sdpo_envs.science import System

__all__ = ["Gpqa"]

_HUB = ("Idavidrein/gpqa", "train", "633f5ee89ab8ad4522a9f850766b73f62147ffdd")
_SUBSETS = ("gpqa_diamond", "gpqa_main", "gpqa_extended")
_ASK = {
    "paper": r"Reason step by step, then give the letter of the right option in \boxed{{}}: one of {letters}.",
    "short": r"Reply with the letter of the right option only, in the form \boxed{{X}}. X is one of {letters}.",
}


class Gpqa(MultipleChoice):
    """GPQA; split "test" (local rows may name others).

    Args:
        path: file or folder of JSON lines; rows have `Question`, `Correct Answer`, `Incorrect Answer 1` to `3`, as the
            hub's; optional `Explanation`, `High-level domain`, `split`, `Record ID`.
        subset: gpqa_diamond, gpqa_main or gpqa_extended, for the hub's data.
        domain: only questions of this domain ("Physics", ...).
        shuffle_seed: of the options' order.
        system: "paper": reasoning first; "short": only the letter, for small models.
        reward, format_credit, feedback: see `sdpo_envs.multiple_choice.MultipleChoice`; the form is \\boxed{X}.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        subset: str = "gpqa_diamond",
        domain: str | None = None,
        shuffle_seed: int = 0,
        system: System = "paper",
        reward: Reward = "correct",
        format_credit: float = 0.0,
        feedback: Feedback = "format",
    ) -> None:
        one_of("subset", subset, _SUBSETS)
        one_of("system", system, [name for name in get_args(System) if name in _ASK])
        super().__init__(form="boxed", reward=reward, format_credit=format_credit, feedback=feedback)
        self._path = path
        self._subset = subset
        self._domain = domain
        self._seed = shuffle_seed
        self._ask = _ASK[system]

    def load(self) -> Sequence[Question]:
        if self._path is None:
            name, split, revision = _HUB
            rows = [(name, row) for row in hub_rows(name, self._subset, split, revision)]
        else:
            files = json_files(Path(self._path).expanduser())
            rows = [(str(file), row) for file in files for row in read_rows(file)]
        questions = [
            self._question(row, f"{where}, row {number}", number) for number, (where, row) in enumerate(rows, 1)
        ]
        return [one for one in questions if self._domain in (None, (one.metadata or {})["domain"])]

    def prompt(self, question: Question) -> tuple[Message, ...]:
        ask = self._ask.format(letters=", ".join(question.letters))
        return (Message(role="user", content=f"{question.text}\n\n{listed(question)}\n\n{ask}"),)

    def _question(self, row: Row, where: str, number: int) -> Question:
        text = str(field(row, ("Question", "question"), where)).strip()
        right = str(field(row, ("Correct Answer",), where)).strip()
        options = [right, *(str(field(row, (f"Incorrect Answer {i}",), where)).strip() for i in (1, 2, 3))]
        order = random.Random(f"{self._seed}/{text}").sample(range(4), 4)
        return Question(
            id=str(row.get("Record ID", number)),
            split=str(row.get("split") or "test"),
            text=text,
            options=tuple(options[i] for i in order),
            answer=LETTERS[order.index(0)],
            reason=str(row.get("Explanation") or ""),
            metadata={"domain": str(row.get("High-level domain") or "")},
        )
