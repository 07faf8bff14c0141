"""The side of the reasoning-gym adapter that runs in a grading process.

reasoning-gym's scorers give the attempt to `eval` (matrix and board puzzles) or to `sympy.parse_expr`, which evaluates
too (countdown, puzzle24, integration, polynomials). Before any of them runs, both names are replaced here by versions
that take literals and plain arithmetic only, unless the text is the puzzle's own.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym
import sympy
from reasoning_gym.factory import DATASETS

__all__ = ["run"]

_NAMES = {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "pi", "abs"}
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]|__|[\[\]{}'\"`;:=@\\]|\blambda\b")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_parse = sympy.parse_expr
_own: frozenset[str] | None = None  # the texts of the puzzle that is being scored


def _parse_expr(text: str, *args: Any, **kwargs: Any) -> Any:
    if _own is not None and text not in _own:
        allowed = _NAMES | {str(name) for name in kwargs.get("local_dict") or ()}
        names = set(_IDENTIFIER.findall(text))
        if len(text) > 2000 or _ATTRIBUTE.search(text) or any(len(name) > 1 and name not in allowed for name in names):
            raise ValueError("not an arithmetic expression")
    return _parse(text, *args, **kwargs)


def _eval(text: str, *args: Any) -> Any:
    return eval(text, *args) if _own is None or text in _own else ast.literal_eval(text)


def _guard() -> None:
    sympy.parse_expr = _parse_expr
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym."):
            module.__dict__["eval"] = _eval
            if module.__dict__.get("parse_expr") is _parse:
                module.__dict__["parse_expr"] = _parse_expr


_guard()


@lru_cache(maxsize=8)
def _dataset(name: str, size: int, seed: int, config: str) -> Any:
    return reasoning_gym.create_dataset(name, size=size, seed=seed, **ast.literal_eval(config))


def run(action: str, name: str = "", size: int = 0, seed: int = 0, config: str = "{}", **more: Any) -> Any:
    """One request: "names" lists the data sets, "generate" makes items `start` to `stop`, "score" judges an answer.

    Args:
        config: the data set's settings as a Python literal.
    """
    if action == "names":
        return sorted(DATASETS)
    dataset = _dataset(name, size, seed, config)
    if action == "generate":
        return [_item(dataset[index]) for index in range(more["start"], more["stop"])]
    return _score(dataset, dataset[more["index"]], more["answer"])


def _item(entry: Mapping[str, Any]) -> dict[str, Any]:
    answer = entry["answer"]
    return {"question": str(entry["question"]), "answer": None if answer is None else str(answer)}


def _score(dataset: Any, entry: dict[str, Any], answer: str) -> float | None:
    """The scorer's number; None when it could not read this answer although it can read the right one."""
    global _own
    _own = frozenset(_texts(entry))
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    except Exception:
        if entry["answer"] is not None:
            dataset.score_answer(answer=entry["answer"], entry=entry)  # if this raises too, the scorer is broken
        return None
    finally:
        _own = None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
