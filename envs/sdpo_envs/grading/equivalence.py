r"""Are two mathematical answers the same?

    equivalent("\frac{1}{2}", "0.5", algebra)

Cheap and exact things are decided here: equal notation, rational numbers (as fractions, never as floats), units, per cent,
lists, tuples, intervals, sets, ratios and matrices element by element. Leaves that need algebra go to `algebra`, which runs
math-verify in a grading process (`sdpo_envs.grading.algebra`).

Decisions: 50 % equals 50 and 0.5; a unit may be left out, but not be another one; several candidates are not the one
answer that was asked for; a tolerance, if given, is relative to the right answer and never accepts infinity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from sdpo.errors import ConfigError
from sdpo_envs.grading.math_answer import Parts, normalise, number, parts, split_unit

__all__ = ["Algebra", "Tolerance", "equivalent"]

_MOST_ITEMS = 100
_SPACE = re.compile(r"(?<!\d) | (?!\d)")
_TWO_NUMBERS = re.compile(r"\d \d")
_RELATION = re.compile(r"[<>=]|\\[lg]e(?![a-z])")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a number may be off: |given - gold| <= max(abs, rel * |gold|)."""

    rel: float = 0.0
    abs: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rel", self.rel), ("abs", self.abs)):
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"tolerance {name} = {value}", hint="a finite number, at least 0")

    def accepts(self, gold: Fraction, given: Fraction) -> bool:
        """Exact comparison of exact numbers."""
        return abs(given - gold) <= max(Fraction(self.abs), Fraction(self.rel) * abs(gold))


Algebra = Callable[[str, str, Tolerance], bool]
"""Whether two normalised expressions (gold, given) are equal."""


def equivalent(gold: str, given: str, algebra: Algebra, tolerance: Tolerance | None = None) -> bool:
    """Whether an answer equals the right one.

    Args:
        gold, given: as written, LaTeX or plain.
        algebra: decides what needs a computer-algebra system.
        tolerance: none compares exactly.
    """
    return _same(normalise(gold), normalise(given), algebra, tolerance or Tolerance())


def _same(gold: str, given: str, algebra: Algebra, tolerance: Tolerance) -> bool:
    if not gold or not given:
        return False
    if _compact(gold) == _compact(given):
        return True
    if gold.replace(" ", "").isalpha() and given.replace(" ", "").isalpha():
        return gold.casefold() == given.casefold()
    exact = _numbers(gold, given, tolerance)
    if exact is not None:
        return exact
    wanted, told = parts(gold), parts(given)
    if told is not None:
        if wanted is not None:
            return _same_parts(wanted, told, algebra, tolerance)
        return _RELATION.search(gold) is not None and algebra(gold, given, tolerance)  # 0 < x < 1 is (0, 1)
    if (r"\pm" in given and r"\pm" not in gold) or _TWO_NUMBERS.search(given):
        return False
    (gold_value, gold_unit), (given_value, given_unit) = split_unit(gold), split_unit(given)
    if gold_unit and given_unit and gold_unit != given_unit:
        return False
    if "%" in (gold_unit, given_unit):
        return _per_cent((gold_value, gold_unit), (given_value, given_unit), tolerance) or False
    return algebra(gold_value if given_unit or gold_unit else gold, given_value, tolerance)


def _compact(text: str) -> str:
    """Without spaces, except those between two digits."""
    return _SPACE.sub("", text)


def _numbers(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """The verdict when both are numbers, perhaps with units; None when one is not."""
    (gold_text, gold_unit), (given_text, given_unit) = split_unit(gold), split_unit(given)
    wanted, told = number(gold_text), number(given_text)
    if wanted is None or told is None:
        return None
    if "%" in (gold_unit, given_unit):
        return _per_cent((gold_text, gold_unit), (given_text, given_unit), tolerance)
    if gold_unit and given_unit and gold_unit != given_unit:
        return False
    return tolerance.accepts(wanted, told)


def _per_cent(gold: tuple[str, str], given: tuple[str, str], tolerance: Tolerance) -> bool | None:
    wanted, told = number(gold[0]), number(given[0])
    if wanted is None or told is None:
        return None
    if gold[1] == given[1]:
        return tolerance.accepts(wanted, told)
    if gold[1] == "%" and not given[1]:
        return tolerance.accepts(wanted, told) or tolerance.accepts(wanted / 100, told)
    if given[1] == "%" and not gold[1]:
        return tolerance.accepts(wanted, told) or tolerance.accepts(wanted, told / 100)
    return False


def _same_parts(gold: Parts, given: Parts, algebra: Algebra, tolerance: Tolerance) -> bool:
    if gold.ordered != given.ordered or (gold.ordered and gold.kind != given.kind):
        return False
    wanted, told = list(gold.items), list(given.items)
    if not gold.ordered:
        wanted, told = list(dict.fromkeys(wanted)), list(dict.fromkeys(told))
    if len(wanted) != len(told) or len(wanted) > _MOST_ITEMS:
        return False
    if gold.ordered:
        return all(_same(normalise(a), normalise(b), algebra, tolerance) for a, b in zip(wanted, told, strict=True))
    for item in wanted:
        found = next(
            (i for i, other in enumerate(told) if _same(normalise(item), normalise(other), algebra, tolerance)), -1
        )
        if found < 0:
            return False
        told.pop(found)
    return True
