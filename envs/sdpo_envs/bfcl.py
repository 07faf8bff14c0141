"""The Berkeley Function-Calling Leaderboard's single-turn categories, from the `bfcl-eval` package or local files.

The questions and the lists of allowed values are BFCL's, and so is the comparison of texts (case, blanks and punctuation
do not count). Differences to its checker: calls match in any order only where a category has several, and a response has
to be well-formed as a whole. Not covered: multi-turn, agentic and executable categories, other languages than Python.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sdpo.errors import ConfigError, did_you_mean
from sdpo.types import Message, Task
from sdpo_envs.rows import Row, field, json_files, read_rows
from sdpo_envs.tooluse import Feedback, ToolCalls, render

__all__ = ["CATEGORIES", "Bfcl"]

CATEGORIES = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "irrelevance",
    "live_irrelevance",
)

_FORMS = {
    "python": "a list such as [name(argument=value), other_name(argument=value)], arguments by name",
    "hermes": '<tool_call>{"name": name, "arguments": {...}}</tool_call>, one for each call',
    "qwen_xml": "<tool_call><function=name><parameter=argument>value</parameter></function></tool_call>",
    "react": "two lines for each call, `Action: name` and `Action Input: {...}` with the arguments as a JSON object",
}
_SYSTEM = """You can call functions to do what the user asks. Write the calls as {form}. Write nothing else. If no
function fits, say so without a call.

The functions, as JSON:
{functions}"""


class Bfcl(ToolCalls):
    """BFCL single turn; splits "train" and "test" (one question in five, by a seeded shuffle of each category).

    Args:
        path: file or folder of JSON lines that have `question`, `function` and `ground_truth`, optionally `category` and
            `split`; None reads the installed `bfcl-eval` package.
        categories: one or several of simple_python, multiple, parallel, parallel_multiple, live_simple, live_multiple,
            live_parallel, live_parallel_multiple, irrelevance, live_irrelevance.
        seed: of the division.
        format: how the prompt asks for calls: python, hermes, qwen_xml or react.
        numeric_strings, feedback, reveal_gold: see `sdpo_envs.tooluse.ToolCalls`.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        categories: str | Sequence[str] = ("simple_python", "multiple", "parallel", "parallel_multiple"),
        seed: int = 0,
        format: str = "python",
        numeric_strings: bool = False,
        feedback: Feedback = "detail",
        reveal_gold: bool = False,
    ) -> None:
        if format not in _FORMS:
            raise ConfigError(f"bfcl: format = {format!r}", hint=f"one of {', '.join(_FORMS)}")
        super().__init__(format=format, numeric_strings=numeric_strings, feedback=feedback, reveal_gold=reveal_gold)
        self._categories = [categories] if isinstance(categories, str) else list(categories)
        for category in self._categories:
            if category not in CATEGORIES:
                raise ConfigError(f"bfcl: no category {category!r}", hint=did_you_mean(category, CATEGORIES))
        self._path = path
        self._seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._splits:
            raise ConfigError(f"bfcl has no split {split!r}", hint=did_you_mean(split, self._splits))
        return self._splits[split]

    @cached_property
    def _splits(self) -> dict[str, list[Task]]:
        splits: dict[str, list[Task]] = {"train": [], "test": []}
        rows = _local(self._path) if self._path else _package(self._categories)
        for category in self._categories:
            mine = [row for row in rows if row["category"] == category]
            test = set(random.Random(f"{self._seed}/{category}").sample(range(len(mine)), len(mine) // 5))
            for i, row in enumerate(mine):
                task = self._task(row)
                splits[str(row.get("split") or ("test" if i in test else "train"))].append(task)
        if not any(splits.values()):
            raise ConfigError(f"bfcl: no question of {', '.join(self._categories)} in {self._path or 'bfcl-eval'}")
        return splits

    def _task(self, row: Row) -> Task:
        turns = row["question"]
        messages = turns[0] if turns and isinstance(turns[0], list) else turns
        functions = row["function"]
        target = [{"name": name, "choices": choices} for call in row["ground_truth"] for name, choices in call.items()]
        system = _SYSTEM.format(form=_FORMS[self._format], functions=json.dumps(functions, indent=1))
        own = [m["content"] for m in messages if m["role"] == "system"]
        rest = [Message(role=m["role"], content=m["content"]) for m in messages if m["role"] != "system"]
        return Task(
            id=str(row["id"]),
            prompt=(Message(role="system", content="\n\n".join([*own, system])), *rest),
            target=target,
            demonstration=render(target, self._format) if target else "None of the functions fits the request.",
            metadata={"tools": functions, "category": row["category"]},
        )


def _local(path: str) -> list[Row]:
    rows = []
    for file in json_files(Path(path).expanduser()):
        for number, row in enumerate(read_rows(file), 1):
            where = f"{file}, row {number}"
            for name in ("question", "function", "ground_truth", "id"):
                field(row, (name,), where)
            rows.append({**row, "category": row.get("category") or str(row["id"]).rsplit("_", 1)[0]})
    return rows


def _package(categories: Sequence[str]) -> list[Row]:
    """The package's questions joined with its answers; read as files, without importing the package."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "bfcl without path needs the bfcl-eval package", hint="pip install --no-deps bfcl-eval, or give path="
        )
    data = Path(spec.submodule_search_locations[0]) / "data"
    rows: list[Row] = []
    for category in categories:
        file = f"BFCL_v4_{category}.json"
        answers: dict[str, Any] = {}
        if "irrelevance" not in category:
            answers = {row["id"]: row["ground_truth"] for row in read_rows(data / "possible_answer" / file)}
        for row in read_rows(data / file):
            rows.append({**row, "category": category, "ground_truth": answers.get(row["id"], [])})
    return rows
