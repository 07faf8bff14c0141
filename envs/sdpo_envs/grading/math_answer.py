r"""The final answer in a response, and the part of comparing answers that needs no algebra.

`final_answer` finds the answer: the last `\boxed{...}` wherever it stands, its braces balanced; without a box (where that
is allowed) the last explicit statement. `normalise` rewrites notation that says the same thing, `number` reads a number
exactly, `parts` takes lists, tuples, intervals, sets and matrices apart. What is left for a computer-algebra system is
done by `sdpo_envs.grading.equivalence`, in another process.

Not covered: conversion of units; answers in words beyond comparing the words.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from sdpo_envs.grading.text import final_text, find_boxes, find_tags

__all__ = ["FinalAnswer", "Parts", "final_answer", "normalise", "number", "parts", "split_unit"]

Problem = Literal["", "empty", "unfinished", "none", "too long"]
LONGEST = 10_000

_BOX_WITHOUT_BRACES = re.compile(r"\\boxed\s?([^\s{$.,;]{1,50})")
_STATED = re.compile(
    r"(?:####|\b(?:final )?answer(?: is| to the \w{1,20} is)?\s?[:=]?|\bresult\s?(?:is|:|=))[ \t*:]{0,6}([^\n]{1,300})",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_END = r"(?![a-zA-Z])"
_LAYOUT = r"\\(?:left|right|[bB]igg?|displaystyle|textstyle|limits|ensuremath|q?quad|[,;:!])"
_AS_TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname|rm|bf)"
_NOTATION: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(_LAYOUT + _END), " "),
    (re.compile(r"\\[dtc]frac" + _END), r"\\frac"),
    (re.compile(_AS_TEXT + _END + r"\s?"), r"\\text"),
    (re.compile(rf"\\(?:cdot|times|ast){_END}|[×·⋅∗]"), "*"),
    (re.compile(r"\\leq?" + _END), r"\\le "),
    (re.compile(r"\\geq?" + _END), r"\\ge "),
    (re.compile(rf"\\(?:approx|simeq|sim){_END}|≈"), ""),
    (re.compile(rf"\^\s?\{{?\s?\\circ\s?\}}?|°|\\degree{_END}"), r"\\text{°}"),
    (re.compile(r"\\%|％"), "%"),
    (re.compile(r"\\\$|[$€£]|\\(?=\s)|\\[()\[\]]"), ""),
    (re.compile(r"\\varnothing" + _END), r"\\emptyset"),
    (re.compile(r"∞"), r"\\infty"),
    (re.compile(r"π"), r"\\pi "),
    (re.compile(r"√\s?(\w+)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt\s?([0-9a-zA-Z])"), r"\\sqrt{\1}"),
)
_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3})((?:\{,\}|,|[  ])\d{3})+(?![\d])")
_NUMBER = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)(?:[eE]([+-]?\d{1,5})|\*10\^?\{?([+-]?\d{1,5})\}?)?")
_LETTER_X_TIMES = re.compile(r"(?<=\d)\s?[xX]\s?(?=10\s?\^?\{?[-+]?\d)")
_FRACTION = re.compile(r"([+-]?)\\frac\{([+-]?\d+)\}\{([+-]?\d+)\}|([+-]?\d+)/([+-]?\d+)")
_MIXED = re.compile(r"([+-]?)(\d+)\s?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<=\s)(\d+)/(\d+))")
_REPEATING = re.compile(r"([+-]?)(\d{0,50})\.(\d{0,50})\\overline\{?(\d{1,50})\}?")
_SHORT_FRAC = re.compile(r"\\frac\s*(?:(\d)|\{([^{}]*)\})\s*(?:(\d)|\{([^{}]*)\})")
_TEXT_UNIT = re.compile(r"\\text\{\s*([^{}\\]{0,40})\}(?:\^\{?(-?\d)\}?)?$")
_UNIT_WORDS = re.compile(r"(?:[A-Za-zµΩ°]+(?:\^?-?\d)?[ ./*]{0,2}){1,4}\.?")
_PLAIN_UNIT = re.compile(
    r"\s?(cm|mm|km|kg|mg|lbs?|ft|mph|km/h|m/s|ml|hz|°|(?:degree|dollar|cent|second|minute|hour|day|week|month|year|inch|"
    r"meter|metre|mile|gram|liter|litre|pound|point|unit|student|people|person|percent)(?:e?s)?"
    r"|inches|feet|foot)(?:\^\{?(\d)\}?)?$",
    re.IGNORECASE,
)
_PLAIN_WORDS = re.compile(r"(?<=\d) (?!sinh|cosh|tanh|sqrt|log|mod)([a-z]{4,20}(?: [a-z]{2,20}){0,2})$")
_MATRIX = re.compile(r"\\begin\{([pbvV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_OR = re.compile(
    r"\\text\{\s*(?:or|and)\s*\}|(?<![A-Za-z])(?:or|and)(?![A-Za-z])|\\(?:lor|land)(?![A-Za-z])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """What a response gives as its answer.

    Attributes:
        text: the answer as written; empty when there is none.
        boxed: whether it stood in a box.
        problem: why there is none.
    """

    text: str = ""
    boxed: bool = False
    problem: Problem = ""


@dataclass(frozen=True, slots=True)
class Parts:
    """An answer of several values.

    Attributes:
        kind: its brackets, for example "(]"; "{}" for a set, "," for a plain list (both without order), ":" for a ratio,
            "matrix:RxC" for a matrix, row by row.
        items: the values as text.
    """

    kind: str
    items: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        return self.kind not in ("{}", ",")


def final_answer(response: str, *, require_boxed: bool = False) -> FinalAnswer:
    r"""The answer that a response commits to.

    Args:
        require_boxed: accept a `\boxed{}` only; otherwise also "#### 5", "the answer is 5", an <answer> tag, nothing but
            a number or, last, a number in bold.
    """
    if not response.strip():
        return FinalAnswer(problem="empty")
    text = final_text(response)
    if text is None:
        return FinalAnswer(problem="unfinished")
    boxes = find_boxes(text)
    bare = [m for m in _BOX_WITHOUT_BRACES.finditer(text) if not m.group(1).startswith("{")]
    if boxes and boxes[-1].end < 0:
        return FinalAnswer(problem="unfinished")
    if bare and (not boxes or bare[-1].start() > boxes[-1].start):
        return FinalAnswer(bare[-1].group(1), True)
    if boxes:
        content = boxes[-1].content(text).strip()
        if len(content) > LONGEST:
            return FinalAnswer(problem="too long")
        return FinalAnswer(content, True) if content else FinalAnswer(problem="none")
    if require_boxed:
        return FinalAnswer(problem="none")
    return _stated(text)


def _stated(text: str) -> FinalAnswer:
    tags = find_tags(text, "answer")
    if tags and tags[-1].closed and tags[-1].content.strip():
        content = tags[-1].content.strip()
        return FinalAnswer(content) if len(content) <= LONGEST else FinalAnswer(problem="too long")
    stated = [m.group(1) for m in _STATED.finditer(text)]
    for said in reversed(stated):
        answer = re.split(r"(?<=[^\d])\.(?:\s|$)|\.\s*$|\.\s|;", said.strip().strip("*"))[0].strip(" *:=")
        if answer:
            return FinalAnswer(answer)
    whole = text.strip()
    if len(whole) < 100 and number(normalise(whole)) is not None:
        return FinalAnswer(whole)
    bold = [m.group(1) for m in _BOLD.finditer(text) if re.search(r"\d", m.group(1))]
    return FinalAnswer(bold[-1].strip(" .")) if bold else FinalAnswer(problem="none")


def normalise(text: str) -> str:
    """The same answer in one notation: no layout commands, no currency, ASCII digits and signs, fractions with braces."""
    text = _raised(text)
    text = text.replace("−", "-").replace("–", "-").replace("\\ ", " ").replace("~", " ")
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"\\,(?=\d{3}(?!\d))", " ", text)
    for pattern, replacement in _NOTATION:
        text = pattern.sub(replacement, text)
    text = _LETTER_X_TIMES.sub("*", text)
    text = re.sub(r"\s+", " ", text).strip()
    if text[:1] not in "([" and not text.startswith(r"\{"):
        text = _THOUSANDS.sub(lambda m: re.sub(r"[{},  ]", "", m.group()), text)
    text = _SHORT_FRAC.sub(lambda m: rf"\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    text = (
        re.sub(r"^(?:[A-Za-z](?:\([a-z]\))?|\\[a-z]+)\s?(?:=|\\in(?![a-z])|∈)\s?", "", text)
        if text.count("=") < 2
        else text
    )
    text = re.sub(r"(?<=\d)\*? \*|\s?\*\s?", "*", text)
    text = text.strip().rstrip(".").strip()
    return _unwrap(text)


def number(text: str) -> Fraction | None:
    """A normalised text as an exact number: integers, decimals, E notation, fractions, mixed numbers."""
    text = text.strip()
    mixed = _MIXED.fullmatch(text)
    if mixed:
        numerator, denominator = int(mixed[3] or mixed[5]), int(mixed[4] or mixed[6])
        if denominator == 0:
            return None
        value = int(mixed[2]) + Fraction(numerator, denominator)
        return -value if mixed[1] == "-" else value
    if re.search(r"\d \d", text):
        return None
    text = text.replace(" ", "")
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        numerator, denominator = int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5])
        if denominator == 0:
            return None
        return Fraction(numerator, denominator) * (-1 if fraction[1] == "-" else 1)
    repeating = _REPEATING.fullmatch(text)
    if repeating:
        before, after, period = repeating[2] or "0", repeating[3], repeating[4]
        nines = (10 ** len(period) - 1) * 10 ** len(after)
        value = Fraction(f"{before}.{after}0") + Fraction(int(period), nines)
        return -value if repeating[1] == "-" else value
    plain = _NUMBER.fullmatch(text)
    if not plain or len(text) > 1000:
        return None
    exponent = int(plain[3] or plain[4] or 0)
    if abs(exponent) > 5000:
        return None
    value = Fraction(plain[2]) * Fraction(10) ** exponent
    return -value if plain[1] == "-" else value


def split_unit(text: str) -> tuple[str, str]:
    """A normalised text without its unit, and the unit in the singular ("" for none, "%" for per cent).

    Only what is set as text or is a well-known unit is one: "5m" is a product, "5 apples" is not.
    """
    if text.endswith("%"):
        return text[:-1].strip(), "%"
    match = _TEXT_UNIT.search(text)
    if match is not None:
        words = match[1].strip()
        if not words or not _UNIT_WORDS.fullmatch(words) or _OR.search(match.group()):
            return text, ""
    else:
        match = _PLAIN_UNIT.search(text[-40:]) or _PLAIN_WORDS.search(text[-80:])
        if match is None:
            return text, ""
        words = match[1]
    power = match[2] if match.re.groups > 1 else None
    value = text[: len(text) - len(match.group())].strip()
    if not value or (words == "°" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", value)):
        return text, ""
    unit = re.sub(r"[\s.]", "", words).lower() if len(words) > 3 else re.sub(r"[\s.]", "", words)
    unit = "%" if unit.startswith("percent") else unit.removesuffix("s") if len(unit) > 2 else unit
    return value, unit + (power or "")


def parts(text: str) -> Parts | None:
    """A normalised text as several values, or None for a single one."""
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        cells = [[cell.strip() for cell in row.split("&")] for row in rows]
        return Parts(f"matrix:{len(cells)}x{len(cells[0]) if cells else 0}", tuple(c for row in cells for c in row))
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return Parts("{}", tuple(_split(text[2:-2], ",")))
    if text[:1] in "([" and text[-1:] in ")]" and _encloses(text):
        items = _split(text[1:-1], ",")
        if len(items) > 1:
            return Parts(text[0] + text[-1], tuple(items))
    items = [piece for whole in _OR.split(text) for piece in _split(whole, ",") if piece]
    if len(items) > 1:
        return Parts(",", tuple(items))
    ratio = _split(text, ":")
    if len(ratio) > 1 and all(ratio):
        return Parts(":", tuple(ratio))
    return None


def _split(text: str, mark: str) -> list[str]:
    """Split where no bracket is open."""
    items, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == mark and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
    return [*items, text[start:].strip()]


def _encloses(text: str) -> bool:
    """Whether the first bracket closes with the last character. "(1,2],[3,4)" does not."""
    depth = 0
    for i, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return i == len(text) - 1
    return False


def _unwrap(text: str) -> str:
    r"""Without brackets around the whole, `\text{}` around the whole, or an inner box."""
    while True:
        inner = re.fullmatch(r"\\text\{([^{}]*)\}|\\(?:boxed|fbox)\{(.*)\}", text, re.DOTALL)
        if inner:
            text = (inner[1] or inner[2] or "").strip()
        elif text[:1] + text[-1:] in ("()", "{}") and len(text) > 2 and _encloses(text):
            bare = _strip_brackets(text)
            if len(_split(bare, ",")) > 1:
                return f"({bare})" if text[0] == "(" else bare
            text = bare
        else:
            return text


def _strip_brackets(text: str) -> str:
    """Without all the round brackets or braces that enclose the whole text, in linear time."""
    partner: dict[int, int] = {}
    opened: list[int] = []
    for i, char in enumerate(text):
        if char in "([{":
            opened.append(i)
        elif char in ")]}" and opened:
            partner[opened.pop()] = i
    start, end = 0, len(text)
    while end - start > 2 and text[start] in "({" and partner.get(start) == end - 1:
        start, end = start + 1, end - 1
        while start < end and text[start] == " ":
            start += 1
        while end > start and text[end - 1] == " ":
            end -= 1
    return text[start:end]


def _raised(text: str) -> str:
    return re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}", text)
