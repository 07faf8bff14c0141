"""MMLU-Pro: questions of fourteen subjects with up to ten options (arXiv 2406.01574).

Splits as on the hub: "test" (12,032 questions) and "validation" (70). Zero-shot: no examples in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sdpo.errors import ConfigError, did_you_mean
from sdpo.types import Message
from sdpo_envs.multiple_choice import Feedback, MultipleChoice, Question, Reward, listed
from sdpo_envs.rows import Row, field, hub_rows, json_files, read_rows

__all__ = ["CATEGORIES", "MmluPro"]

CATEGORIES = (
    "biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history", "law",
    "math", "other", "philosophy", "physics", "psychology",
)  # fmt: skip
_HUB = ("TIGER-Lab/MMLU-Pro", "b189ec765aa7ed75c8acfea42df31fdae71f97be")
_ASK = 'Think step by step and end with "the answer is (X)", X being one of {letters}.'


class MmluPro(MultipleChoice):
    """MMLU-Pro; splits "test" and "validation" (local rows may name others).

    Args:
        path: file or folder of JSON lines with `question`, `options` (a list), `answer` (a letter), `category`; optional
            `split`, `question_id`, `cot_content`.
        category: one subject or a list of them; None takes all.
        reward, format_credit, feedback: see `sdpo_envs.multiple_choice.MultipleChoice`; the form is "the answer is (X)".
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        category: str | Sequence[str] | None = None,
        reward: Reward = "correct",
        format_credit: float = 0.0,
        feedback: Feedback = "format",
    ) -> None:
        super().__init__(form="phrase", reward=reward, format_credit=format_credit, feedback=feedback)
        self._path = path
        self._categories = [category] if isinstance(category, str) else list(category or CATEGORIES)
        for name in self._categories:
            if name not in CATEGORIES:
                raise ConfigError(f"mmlu_pro: no category {name!r}", hint=did_you_mean(name, CATEGORIES))

    def load(self) -> Sequence[Question]:
        if self._path is None:
            name, revision = _HUB
            splits = ("validation", "test")
            rows = [
                (f"{name} {split}", split, row) for split in splits for row in hub_rows(name, None, split, revision)
            ]
        else:
            files = json_files(Path(self._path).expanduser())
            rows = [(str(file), str(row.get("split") or "test"), row) for file in files for row in read_rows(file)]
        return [
            _question(row, split, f"{where}, row {number}", number)
            for number, (where, split, row) in enumerate(rows, 1)
            if row.get("category", "other") in self._categories
        ]

    def prompt(self, question: Question) -> tuple[Message, ...]:
        ask = _ASK.format(letters=", ".join(question.letters))
        return (Message(role="user", content=f"{question.text}\n\n{listed(question)}\n\n{ask}"),)


def _question(row: Row, split: str, where: str, number: int) -> Question:
    return Question(
        id=f"{split}-{row.get('question_id', number)}",
        split=split,
        text=str(field(row, ("question",), where)).strip(),
        options=tuple(str(text) for text in field(row, ("options",), where)),
        answer=str(field(row, ("answer",), where)).strip().upper(),
        reason=str(row.get("cot_content") or ""),
        metadata={"category": str(row.get("category", "other"))},
    )
