"""SciKnowEval, level L3: undergraduate multiple choice in biology, chemistry, materials and physics (2601.20802, 4.1).

Two faults of the data are dealt with: a test question that also stands in the training split is removed from the latter
(`duplicates` counts), and where several options have the text of the right one, each of their letters is right. The hub
has one split only; it is divided here by a seeded shuffle, 9 to 1 in each domain, which is not the division of the
paper's authors: give `path` to their files for that.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from sdpo.errors import ConfigError, did_you_mean
from sdpo.types import Message, Task
from sdpo_envs.multiple_choice import (
    LETTERS,
    Feedback,
    MultipleChoice,
    Question,
    Reward,
    listed,
    one_of,
)
from sdpo_envs.rows import Row, field, hub_rows, json_files, read_rows

__all__ = ["DOMAINS", "Science"]

DOMAINS = ("biology", "chemistry", "material", "physics")
System = Literal["paper", "short", "data"]

_HUB = ("hicai-zju/SciKnowEval", "v2", "test", "92ef969ad0a8bd6e195e0ac18af2c46e307e0cc2")
_TYPES = ("mcq-4-choices", "mcq-2-choices")
_OPTION = re.compile(r"^([A-J])[:.)] ?(.*)$")

_PAPER = """You are given a question and {count} options. Choose the right one. Reply in this form:
<reasoning>
your reasoning
</reasoning>
<answer>
the letter of the right option
</answer>

Inside <answer> write one of the letters {letters} and nothing else, not the text of the option."""
_SHORT = "Choose the right option. Reply with its letter only, in this form: <answer>X</answer>. X is one of {letters}."


class Science(MultipleChoice):
    """SciKnowEval L3 by domain; splits "train" and "test".

    Args:
        path: a file or folder of JSON lines; None loads the hub's data. Accepted rows: `question`, `options` (a list)
            and `answer` (a letter); the hub's (`question`, `choices`, `answerKey`); the authors' (`prompt` with lettered
            option lines, `answer`); all with optional `split`, `domain`, `reason`, `id` or `idx`. Split and domain
            default to the words found in the path ("physics/train.json"), the split else to "train".
        domains: one of biology, chemistry, material, physics, or a list of them.
        system: "paper": reasoning first, then the letter in <answer> tags; "short": only the letter in tags, for small
            models; "data": system prompt and question exactly as the file has them.
        train_size, test_size: so many questions from a seeded shuffle; None takes all, in the data's order.
        seed: of the shuffle, and of the division of hub data.
        reward, format_credit, feedback: see `sdpo_envs.multiple_choice.MultipleChoice`.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        domains: str | Sequence[str] = DOMAINS,
        system: System = "paper",
        train_size: int | None = None,
        test_size: int | None = None,
        seed: int = 0,
        reward: Reward = "correct",
        format_credit: float = 0.0,
        feedback: Feedback = "format",
    ) -> None:
        one_of("system", system, get_args(System))
        wanted = [domains] if isinstance(domains, str) else list(domains)
        for domain in wanted:
            if domain not in DOMAINS:
                raise ConfigError(f"science: no domain {domain!r}", hint=did_you_mean(domain, DOMAINS))
        self._path = path
        self._domains = wanted
        self._system = system
        self._sizes = {"train": train_size, "test": test_size}
        for split, size in self._sizes.items():
            if size is not None and size < 1:
                raise ConfigError(f"science: {split}_size = {size}", hint="give at least 1")
        self._seed = seed
        super().__init__(reward=reward, format_credit=format_credit, feedback=feedback)

    def load(self) -> Sequence[Question]:
        found = _local(Path(self._path).expanduser()) if self._path else _hub(self._seed)
        chosen = [question for question in found if (question.metadata or {})["domain"] in self._domains]
        if not chosen:
            wanted, where = ", ".join(self._domains), self._path or _HUB[0]
            raise ConfigError(f"science: no question of {wanted} in {where}", hint="check domains and path")
        return chosen

    def tasks(self, split: str) -> Sequence[Task]:
        tasks = list(super().tasks(split))
        size = self._sizes.get(split)
        if size is not None:
            random.Random(f"{self._seed}/{split}").shuffle(tasks)
        return tasks[:size]

    def prompt(self, question: Question) -> tuple[Message, ...]:
        if self._system == "data":
            if question.user is None:
                raise ConfigError(
                    "science: these rows bring no prompt of their own", hint='system = "paper" or "short"'
                )
            system = question.system or ""
            user = question.user
        else:
            template = _PAPER if self._system == "paper" else _SHORT
            letters = ", ".join(question.letters)
            system = template.format(count={2: "two", 4: "four"}.get(len(question.options), "several"), letters=letters)
            user = f"{question.text}\n\n{listed(question)}"
        before = (Message(role="system", content=system),) if system.strip() else ()
        return (*before, Message(role="user", content=user))


def _local(path: Path) -> list[Question]:
    files = json_files(path) if path.is_file() or not path.is_dir() else _science_files(path)
    questions = []
    for file in files:
        place = file.relative_to(path.parent).with_suffix("").as_posix().lower() if file != path else file.stem.lower()
        for number, row in enumerate(read_rows(file), 1):
            questions.append(_question(row, f"{file}, row {number}", place, number))
    return questions


def _science_files(folder: Path) -> list[Path]:
    """Files that name a domain, in the folder itself or in a sub-folder of a domain's name. A file that holds train and
    test together ("physics/physics.json") is left out where both stand beside it."""
    files = [p for p in folder.rglob("*.json*") if p.suffix in (".json", ".jsonl")]
    named = [p for p in files if any(d in p.relative_to(folder.parent).as_posix().lower() for d in DOMAINS)]
    divided = {p.parent for p in named if p.stem == "train"} & {p.parent for p in named if p.stem == "test"}
    chosen = sorted(p for p in named if p.parent not in divided or p.stem in ("train", "test"))
    return chosen or json_files(folder)


def _question(row: Row, where: str, place: str, number: int) -> Question:
    domain = str(row.get("domain") or next((d for d in DOMAINS if d in place), "")).lower()
    if not domain:
        raise ConfigError(f"{where}: no domain in the row nor in the path", hint=f"one of {', '.join(DOMAINS)}")
    split = str(row.get("split") or ("test" if "test" in place.split("/")[-1] else "train"))
    user = row.get("prompt") if isinstance(row.get("prompt"), str) else None
    if "question" in row:
        text, options = str(row["question"]), _options(field(row, ("options", "choices"), where))
    else:
        text, options = _split_prompt(str(field(row, ("prompt",), where)), where)
    name = row.get("id", row.get("idx", number))
    return Question(
        id=f"{domain}-{split}-{name}",
        split=split,
        text=text,
        options=options,
        answer=str(field(row, ("answer", "answerKey"), where)).strip().upper(),
        reason=str(row.get("reason") or ""),
        system=row.get("system"),
        user=user,
        metadata={"domain": domain},
    )


def _options(value: Any) -> tuple[str, ...]:
    texts: Iterable[Any] = value["text"] if isinstance(value, dict) else value
    return tuple(str(text) for text in texts)


def _split_prompt(prompt: str, where: str) -> tuple[str, tuple[str, ...]]:
    """Question and options of a prompt that ends in lettered lines, perhaps with an instruction after them."""
    lines = prompt.rstrip().split("\n")
    starts = [i for i, line in enumerate(lines) if (m := _OPTION.match(line)) and m.group(1) == "A"]
    if not starts:
        raise ConfigError(f"{where}: no line 'A: ...' in the prompt", hint="give `question` and `options` instead")
    options: list[str] = []
    for line in lines[starts[-1] :]:
        match = _OPTION.match(line)
        if match and match.group(1) == LETTERS[len(options)]:
            options.append(match.group(2).strip())
    return "\n".join(lines[: starts[-1]]).strip(), tuple(options)


def _hub(seed: int) -> list[Question]:
    name, config, split, revision = _HUB
    rows = [
        row
        for row in hub_rows(name, config, split, revision)
        if row["details"]["level"] == "L3" and row["type"] in _TYPES and str(row["domain"]).lower() in DOMAINS
    ]
    random.Random(f"{seed}/division").shuffle(rows)
    questions = []
    for domain in DOMAINS:
        mine = [row for row in rows if str(row["domain"]).lower() == domain]
        for number, row in enumerate(mine):
            part = "test" if number < len(mine) // 10 else "train"
            questions.append(_question({**row, "split": part}, f"{name}, row {number}", "", number))
    return questions
