"""Read the calls out of a response, in the four ways that models are trained to write them.

    react      Action: f            one pair of lines a call; the input is JSON, perhaps over several lines or fenced
               Action Input: {...}
    hermes     <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    qwen_xml   <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    python     [f(x=1), g(y="a")]   literals by keyword

"auto" takes the first of them whose marks stand in the response. JSON is decoded, never cut out with a pattern, so that
nested objects and braces in strings survive. What is written inside the thinking is a draft. One malformed call makes
the whole response malformed: there is no guessing what it might have meant.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sdpo_envs.grading.text import final_text, quote
from sdpo_envs.grading.tools import Call, Tool, strict_json, type_name

__all__ = ["FORMATS", "Format", "Parsed", "parse_calls"]

Format = Literal["react", "hermes", "qwen_xml", "python", "auto"]
FORMATS: tuple[str, ...] = get_args(Format)

_ACTION = re.compile(
    r"^[ \t>#*_\-]{0,8}Action(?: \d{1,3})?[ \t]?[*_]{0,3}:[*_]{0,3}(?!_)[ \t]{0,8}(.*)$", re.IGNORECASE
)
_INPUT = re.compile(r"[ \t>#*_\-]{0,8}Action[ _]?Input(?: \d{1,3})?[ \t]?[*_]{0,3}:[*_]{0,3}", re.IGNORECASE)
_FENCE = re.compile(r"^[ \t]*```[A-Za-z0-9_+-]*[ \t]*$")
_FUNCTION = re.compile(r"<function=([^>\n]{1,200})>")
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>")
_SPACE = re.compile(r"\s*")
_LONGEST_PYTHON = 20_000


@dataclass(frozen=True, slots=True)
class Parsed:
    """The calls of a response.

    Attributes:
        calls: in the order written; only those before the fault when there is one.
        fault: what is malformed, as a sentence; empty when nothing is.
        empty: the response has nothing that looks like a call.
    """

    calls: tuple[Call, ...] = ()
    fault: str = ""

    @property
    def empty(self) -> bool:
        return not self.calls and not self.fault


class _Malformed(ValueError):
    """A call that cannot be read; the message is for the feedback."""


def parse_calls(response: str, form: str = "auto", tools: Sequence[Tool] = ()) -> Parsed:
    """The calls that a response makes.

    Args:
        response: anything a model wrote.
        form: one of `FORMATS`.
        tools: what may be called; gives qwen_xml its types and python its positions' names in feedback.
    """
    text = final_text(response)
    if text is None:
        return Parsed(fault="The response ended inside its thinking, before any call.")
    if not text.strip():
        return Parsed(fault="The response is empty.")
    text = text.replace("\r\n", "\n")
    known = {tool.name: tool for tool in tools}
    readers: dict[str, Callable[[str, Mapping[str, Tool], list[Call]], None]]
    readers = {"react": _react, "hermes": _hermes, "qwen_xml": _qwen_xml, "python": _python}
    calls: list[Call] = []
    try:
        readers[_detect(text) if form == "auto" else form](text, known, calls)
    except _Malformed as exc:
        return Parsed(tuple(calls), str(exc))
    return Parsed(tuple(calls))


def _detect(text: str) -> str:
    if "<function=" in text:
        return "qwen_xml"
    if "<tool_call>" in text:
        return "hermes"
    if any(_ACTION.match(line) for line in text.split("\n")):
        return "react"
    return "python"


def _react(text: str, tools: Mapping[str, Tool], calls: list[Call]) -> None:
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    number = 0
    while number < len(lines):
        line = lines[number]
        if _INPUT.match(line):
            raise _Malformed("There is an Action Input without an Action line before it.")
        action = _ACTION.match(line)
        if action is None:
            number += 1
            continue
        split = _INPUT.search(action.group(1))
        name = _bare(action.group(1)[: split.start()] if split else action.group(1))
        following = number + 1
        while following < len(lines) and (not lines[following].strip() or _FENCE.match(lines[following])):
            following += 1
        begins = None
        if split:
            begins = starts[number] + action.start(1) + split.end()
        elif following < len(lines) and (marked := _INPUT.match(lines[following])):
            begins = starts[following] + marked.end()
        if not name or (begins is None and " " in name):
            number += 1  # prose that begins with "Action:", or a heading
            continue
        if begins is None:
            calls.append(_without_input(name, tools))
            number += 1
            continue
        arguments, end = _input(text, begins, name, len(calls) + 1)
        calls.append(Call(name, arguments))
        while number < len(lines) and starts[number] < end:
            number += 1


def _without_input(name: str, tools: Mapping[str, Tool]) -> Call:
    parameters = tools[name].parameters if name in tools else {}
    if parameters:
        raise _Malformed(
            f"The call of {name} has no Action Input line; {name} has parameters: {', '.join(parameters)}."
        )
    return Call(name, {})


def _input(text: str, start: int, name: str, number: int) -> tuple[Mapping[str, Any], int]:
    opening = re.compile(r"\s*(?:```[A-Za-z0-9_+-]*\s*|[*_`]{1,3}\s*)?").match(text, start)
    assert opening is not None
    return _json_object(text, opening.end(), f"The Action Input of call {number} ({_short(name)})")


def _json_object(text: str, start: int, what: str) -> tuple[Mapping[str, Any], int]:
    if start >= len(text):
        raise _Malformed(f"{what} is missing; it must be a JSON object.")
    try:
        value, end = strict_json(text, start)
    except ValueError as exc:
        raise _Malformed(f"{what} is not valid JSON: {exc}.") from None
    if not isinstance(value, dict):
        raise _Malformed(f"{what} must be a JSON object, not {type_name(value)}.")
    return value, end


def _hermes(text: str, tools: Mapping[str, Tool], calls: list[Call]) -> None:
    mark, close = "<tool_call>", "</tool_call>"
    at = text.find(mark)
    while at >= 0:
        number = len(calls) + 1
        record, end = _json_object(text, _after_space(text, at + len(mark)), f"The content of tool call {number}")
        name = record.get("name")
        if not isinstance(name, str) or not name:
            raise _Malformed(f'The "name" of tool call {number} must be a text.')
        arguments = record.get("arguments", record.get("parameters", {}))
        if isinstance(arguments, str):
            arguments, _ = _json_object(arguments.strip(), 0, f'The "arguments" of tool call {number} ({_short(name)})')
        if not isinstance(arguments, dict):
            raise _Malformed(f'The "arguments" of tool call {number} ({_short(name)}) must be a JSON object.')
        end = _after_space(text, end)
        if end < len(text) and not text.startswith(close, end):
            rest = quote(text[end : end + 100], 20)
            raise _Malformed(f"After the JSON of tool call {number} there must be </tool_call>, not {rest}.")
        calls.append(Call(name, arguments))
        at = text.find(mark, end)


def _qwen_xml(text: str, tools: Mapping[str, Tool], calls: list[Call]) -> None:
    at = text.find("<function=")
    while at >= 0:
        header = _FUNCTION.match(text, at)
        if header is None:
            raise _Malformed("A <function=...> is not finished.")
        name = header.group(1).strip()
        close = text.find("</function>", header.end())
        if close < 0:
            raise _Malformed(f"The call of {_short(name)} has no </function>.")
        calls.append(Call(name, _xml_arguments(text[header.end() : close], name, tools.get(name))))
        at = text.find("<function=", close)


def _xml_arguments(body: str, name: str, tool: Tool | None) -> dict[str, Any]:
    marks = list(_PARAMETER.finditer(body))
    arguments: dict[str, Any] = {}
    ends = [*(mark.start() for mark in marks[1:]), len(body)]
    for mark, end in zip(marks, ends, strict=False):
        value = body[mark.end() : end]
        value = value.rsplit("</parameter>", 1)[0]
        key = mark.group(1).strip()
        if key in arguments:
            raise _Malformed(f"The call of {_short(name)} has the parameter {_short(key)} twice.")
        known = tool.parameters.get(key) if tool and tool.parameters else None
        arguments[key] = _xml_value(value.removeprefix("\n").removesuffix("\n"), known.type if known else "")
    return arguments


def _xml_value(text: str, kind: str) -> Any:
    """A parameter's text as the type that the schema gives it; text where it is not of that type."""
    if kind == "string":
        return text
    lowered = text.strip().lower()
    if kind == "boolean" and lowered in ("true", "false"):
        return lowered == "true"
    try:
        value, end = strict_json(text.strip())
    except ValueError:
        return text
    return value if end == len(text.strip()) else text


def _python(text: str, tools: Mapping[str, Tool], calls: list[Call]) -> None:
    candidates = _python_candidates(text)
    problem = ""
    for candidate in candidates:
        if len(candidate) > _LONGEST_PYTHON:
            problem = problem or "The call is too long."
            continue
        try:
            tree = ast.parse(candidate, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
            problem = problem or f"The call is not valid Python: {getattr(exc, 'msg', None) or type(exc).__name__}."
            continue
        nodes = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
        if nodes and all(isinstance(node, ast.Call) for node in nodes):
            calls += [_python_call(node, tools) for node in nodes if isinstance(node, ast.Call)]
            return
    if problem:
        raise _Malformed(problem)


def _python_candidates(text: str) -> list[str]:
    """Where a list of calls may stand: the whole text, fenced blocks, lines that begin like one. Prose is not one."""
    looks = re.compile(r"\[?\s*[A-Za-z_][\w.\-]*\(")
    whole = text.strip()
    blocks = [part.partition("\n")[2].strip() for part in text.split("```")[1::2]]
    lines = [line.strip() for line in text.split("\n")]
    found = [piece for piece in [whole, *blocks, *lines] if looks.match(piece)]
    return list(dict.fromkeys(found))[:50]


def _python_call(node: ast.Call, tools: Mapping[str, Tool]) -> Call:
    try:
        name = ast.unparse(node.func)
    except RecursionError:
        name = ""
    if not re.fullmatch(r"[A-Za-z_][\w.]{0,200}", name):
        raise _Malformed("A call must begin with the name of a tool.")
    if node.args:
        known = tools[name].parameters if name in tools else None
        names = f", for example {next(iter(known))}=..." if known else ""
        raise _Malformed(f"The arguments of {name} must be given by name{names}.")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise _Malformed(f"The arguments of {name} must be given by name, each once.")
        arguments[keyword.arg] = _literal(keyword.value, f"The argument {keyword.arg} of {name}")
    return Call(name, arguments)


def _literal(node: ast.expr, what: str) -> Any:
    try:
        return _jsonlike(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise _Malformed(
            f"{what} must be a plain value: a text, a number, True, False, None, a list or a dict."
        ) from None


def _jsonlike(value: Any) -> Any:
    """A Python literal as JSON has it. Raises ValueError for what JSON has not (bytes, sets, complex numbers)."""
    if isinstance(value, (list, tuple)):
        return [_jsonlike(item) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a key is not text")
        return {key: _jsonlike(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return value
    raise ValueError(f"{type(value).__name__} is not JSON")


def _after_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def _bare(name: str) -> str:
    return name.strip().strip("*`\"' ").rstrip(".,;:").strip("*`\"' ")


def _short(name: str) -> str:
    return quote(name, 60)[1:-1]
