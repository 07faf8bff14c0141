"""Compare calls with the expected ones, and say what is wrong with a call without saying what is expected.

Each expected call is matched with one call that was made, name and own arguments together; nothing is merged. Order
counts by option. Values compare by type: 5 equals 5.0, but true is not 1, and "1" is not 1 - except where the tool's
documentation types the argument and the given value has that type (golds are not always careful), or by option where it
is not typed. An argument given as null counts as left out. Expected calls may be optional, and an expected argument may
have several allowed values (BFCL); then texts compare as BFCL does, without case, blanks and punctuation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from sdpo_envs.grading.text import quote
from sdpo_envs.grading.tools import Call, Parameter, Tool

__all__ = ["Allowed", "Comparison", "Expected", "compare"]

_LOOSE = re.compile(r"[ ,./\-_*^]")


@dataclass(frozen=True, slots=True)
class Allowed:
    """Several values that one argument may have; `optional` when it may be left out."""

    values: tuple[Any, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Expected:
    """A call that should be made; argument values are JSON values or `Allowed`."""

    name: str
    arguments: Mapping[str, Any]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict.

    Attributes:
        equal: every expected call was made, and nothing else.
        matched: how many expected calls were made.
        faults: sentences on what is wrong, without the expected values; one a call, then one on what is missing.
    """

    equal: bool
    matched: int
    faults: tuple[str, ...] = ()


class _Values:
    """Equality of argument values under the options."""

    def __init__(self, tools: Mapping[str, Tool], numeric_strings: bool) -> None:
        self.tools = tools
        self.numeric_strings = numeric_strings

    def call(self, made: Call, expected: Expected) -> bool:
        return made.name == expected.name and not self.wrong_arguments(made, expected)

    def wrong_arguments(self, made: Call, expected: Expected) -> list[str]:
        """Names of arguments that are missing, superfluous or of another value."""
        given = {name: value for name, value in made.arguments.items() if value is not None}
        wanted = {name: value for name, value in expected.arguments.items() if value is not None}
        tool = self.tools.get(made.name)
        parameters = (tool.parameters if tool else None) or {}
        wrong = [name for name in given if name not in wanted]
        for name, value in wanted.items():
            if name in given:
                if not self.value(given[name], value, parameters.get(name, Parameter())):
                    wrong.append(name)
            elif not (isinstance(value, Allowed) and value.optional):
                wrong.append(name)
        return wrong

    def value(self, given: Any, wanted: Any, parameter: Parameter) -> bool:
        if isinstance(wanted, Allowed):
            return any(_loosely(given, value) for value in wanted.values)
        if self._number_as_text(given, wanted) and (
            parameter.type in _types_of(given) if parameter.type else self.numeric_strings
        ):
            return True
        return _same(given, wanted)

    def _number_as_text(self, given: Any, wanted: Any) -> bool:
        text, number = (given, wanted) if isinstance(given, str) else (wanted, given)
        if not isinstance(text, str) or isinstance(number, bool) or not isinstance(number, (int, float)):
            return False
        try:
            return (int(text) if isinstance(number, int) and len(text) < 40 else float(text)) == number
        except ValueError:
            return False


def compare(
    calls: Sequence[Call],
    expected: Sequence[Expected],
    tools: Sequence[Tool] = (),
    *,
    ordered: bool = False,
    numeric_strings: bool = False,
) -> Comparison:
    """Compare the calls made with the calls expected.

    Args:
        tools: what may be called; used to explain, and to decide between "1" and 1.
        ordered: calls must come in the expected order.
        numeric_strings: "1" equals 1 where the documentation does not say which it should be.
    """
    known = {tool.name: tool for tool in tools}
    values = _Values(known, numeric_strings)
    if len(calls) > 10 * (len(expected) + 2):
        return Comparison(False, 0, (f"There are {len(calls)} calls, far more than the request needs.",))
    fits = [[values.call(made, wanted) for wanted in expected] for made in calls]
    pairs = _in_order(fits, expected) if ordered else _any_order(fits, expected)
    used = set(pairs.values())
    needed = [j for j, wanted in enumerate(expected) if not wanted.optional]
    matched = sum(j in used for j in needed)
    if len(pairs) == len(calls) and matched == len(needed):
        return Comparison(True, matched)
    spare = [wanted for j, wanted in enumerate(expected) if j not in used]
    faults = [
        _explain(made, number, spare, known, values) for number, made in enumerate(calls, 1) if number - 1 not in pairs
    ]
    if not faults or len(calls) < len(needed):
        faults.append(_missing(calls, needed, fits, expected, ordered))
    return Comparison(False, matched, tuple(faults))


def _any_order(fits: Sequence[Sequence[bool]], expected: Sequence[Expected]) -> dict[int, int]:
    """A largest matching of calls to expected calls, by augmenting paths; required ones are tried first."""
    owner: dict[int, int] = {}
    order = sorted(range(len(expected)), key=lambda j: expected[j].optional)

    def place(i: int, tried: set[int]) -> bool:
        for j in order:
            if fits[i][j] and j not in tried:
                tried.add(j)
                if j not in owner or place(owner[j], tried):
                    owner[j] = i
                    return True
        return False

    for i in range(len(fits)):
        place(i, set())
    return {i: j for j, i in owner.items()}


def _in_order(fits: Sequence[Sequence[bool]], expected: Sequence[Expected]) -> dict[int, int]:
    """Each call takes the next expected call that it fits; only optional ones may be skipped."""
    pairs: dict[int, int] = {}
    j = 0
    for i, row in enumerate(fits):
        at = j
        while at < len(expected) and not row[at] and expected[at].optional:
            at += 1
        if at < len(expected) and row[at]:
            pairs[i] = at
            j = at + 1
    return pairs


def _explain(made: Call, number: int, spare: Sequence[Expected], tools: Mapping[str, Tool], values: _Values) -> str:
    where = f"Call {number}"
    if tools and made.name not in tools:
        close = get_close_matches(made.name, tools, n=1, cutoff=0.8)
        hint = f"did you mean {close[0]}?" if close else f"the tools are {', '.join(tools)}."
        return f"{where}: there is no tool {quote(made.name)}; {hint}"
    if made.name in tools and (fault := tools[made.name].fault(made)):
        return f"{where}: {fault}"
    same_name = [wanted for wanted in spare if wanted.name == made.name]
    if not same_name:
        return f"{where}: {quote(made.name)} is not the tool to call here, or not once more."
    wanted = min(same_name, key=lambda one: len(values.wrong_arguments(made, one)))
    wrong = values.wrong_arguments(made, wanted)
    superfluous = [name for name in wrong if name not in wanted.arguments]
    absent = [name for name in wrong if name in wanted.arguments and made.arguments.get(name) is None]
    other = [name for name in wrong if name not in superfluous and name not in absent]
    parts = []
    if other:
        parts.append(f"the value of {_names(other)} is not what the user asked for")
    if absent:
        parts.append(f"the argument {_names(absent)} is missing")
    if superfluous:
        parts.append(f"the argument {_names(superfluous)} should not be given")
    return f"{where} ({quote(made.name)[1:-1]}): {'; '.join(parts) or 'it comes at the wrong place'}."


def _missing(
    calls: Sequence[Call],
    needed: Sequence[int],
    fits: Sequence[Sequence[bool]],
    expected: Sequence[Expected],
    ordered: bool,
) -> str:
    if not calls:
        return "No tool was called, but the request needs one."
    if ordered and len(_any_order(fits, expected)) == len(calls) >= len(needed):
        return "The calls are right, but in the wrong order."
    return f"{len(calls)} of the calls that the request needs were made; at least one is missing."


def _names(names: Sequence[str]) -> str:
    return ", ".join(quote(name)[1:-1] for name in names[:5])


def _types_of(value: Any) -> tuple[str, ...]:
    return ("string",) if isinstance(value, str) else ("number", "integer") if isinstance(value, int) else ("number",)


def _same(given: Any, wanted: Any) -> bool:
    """JSON equality: numbers by value, booleans are not numbers, lists in order, objects without order."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_same(value, wanted[key]) for key, value in given.items())
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    return bool(given == wanted)


def _loosely(given: Any, allowed: Any, *, choices: bool = True) -> bool:
    """BFCL's comparison with one allowed value. With `choices`, the values of an allowed object (also of objects in an
    allowed list) are themselves lists of allowed values, in which "" means that the key may be left out."""
    if isinstance(given, str) and isinstance(allowed, str):
        return _plain(given) == _plain(allowed)
    if isinstance(given, list) and isinstance(allowed, list):
        return len(given) == len(allowed) and all(
            _loosely(one, other, choices=choices) for one, other in zip(given, allowed, strict=True)
        )
    if not isinstance(given, dict) or not isinstance(allowed, dict):
        return _same(given, allowed)
    if not given.keys() <= allowed.keys():
        return False
    for key, value in allowed.items():
        values = value if choices and isinstance(value, list) else [value]
        if key not in given:
            if "" not in values:
                return False
        elif not any(_loosely(given[key], one, choices=False) for one in values):
            return False
    return True


def _plain(text: str) -> str:
    return _LOOSE.sub("", text).lower().replace("'", '"')
