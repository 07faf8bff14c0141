"""The computer algebra behind `equivalence`, for a grading process: math-verify's parser and comparison, with an exact
comparison of numbers in front, because floating point takes small different numbers for equal.

Imported in grading processes only: nothing here bounds time or memory.
"""

from __future__ import annotations

import re
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

__all__ = ["equal"]

_DIGITS = 60
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\\text\{°\}")
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_CONFIG = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_NORMALIZATION)]


def equal(gold: str, given: str, rel: float, absolute: float) -> bool | None:
    """Whether two normalised expressions are equal.

    Args:
        rel, absolute: the tolerance for numbers.

    Returns:
        None when the gold expression cannot be read.
    """
    wanted = _parsed(gold)
    if wanted is None:
        return None
    told = _parsed(given)
    if told is None:
        return False
    if isinstance(wanted, sympy.Eq) and isinstance(told, sympy.Eq):
        return _same_equation(wanted, told)
    if isinstance(wanted, sympy.Expr) and isinstance(told, sympy.Expr) and wanted.is_number and told.is_number:
        return _same_number(wanted, told, rel, absolute)
    return bool(verify(wanted, told, allow_set_relation_comp=True, timeout_seconds=None))


def _parsed(text: str) -> Any:
    latex = _DEGREES.sub(r"(\1 \\cdot \\frac{\\pi}{180})", text).replace("*", r"\cdot ").replace("%", "")
    found = parse(
        f"${latex}$", _CONFIG, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )
    value = next((one for one in found if not isinstance(one, str)), None)
    if not isinstance(value, sympy.Expr):
        return value
    return value.subs({symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"})


def _same_number(wanted: sympy.Expr, told: sympy.Expr, rel: float, absolute: float) -> bool:
    wanted, told = (sympy.nsimplify(one, rational=True) for one in (wanted, told))
    if wanted == told:
        return True
    if wanted.is_finite is False or told.is_finite is False:
        return False
    if wanted.is_Rational and told.is_Rational:
        return bool(abs(told - wanted) <= max(sympy.Rational(str(absolute)), sympy.Rational(str(rel)) * abs(wanted)))
    difference = abs(sympy.N(told - wanted, _DIGITS))
    size = abs(sympy.N(wanted, _DIGITS))
    allowed = max(absolute, rel * size, size * sympy.Float(10) ** (15 - _DIGITS))
    return bool(difference <= allowed)


def _same_equation(wanted: sympy.Eq, told: sympy.Eq) -> bool:
    """Equations with the same solutions: one side minus the other is the same up to a constant factor."""
    one, other = wanted.lhs - wanted.rhs, told.lhs - told.rhs
    if one == 0 or other == 0:
        return bool(one == other)
    ratio = sympy.simplify(one / other)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)
