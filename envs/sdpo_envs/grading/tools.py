"""Tools and calls: what a tool accepts, what a response called, and whether the call fits the tool.

Schemas are JSON-schema objects ("object" or, as in BFCL, "dict"), or ToolAlpaca's documentation in words. Only what helps
to explain a call is read: names, types, enumerations, what is required. Not covered: full JSON-schema validation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Call", "Parameter", "Tool", "strict_json", "tools_from_documentation", "tools_from_schemas", "type_name"]

_TYPES = {
    "string": "string", "str": "string", "integer": "integer", "int": "integer", "long": "integer", "number": "number",
    "float": "number", "double": "number", "boolean": "boolean", "bool": "boolean", "array": "array", "list": "array",
    "tuple": "array", "object": "object", "dict": "object", "hashmap": "object",
}  # fmt: skip
_HEADER = re.compile(r"^([A-Za-z][\w.\-]*): ")
_NOT_TOOLS = {"Name", "Description", "Documentation", "Parameters", "Output", "Question"}
_ONE_OF = re.compile(r"One of: \[([^\]]*)\]", re.IGNORECASE)
_DEEPEST = 100


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the tool's name and its arguments, as JSON values."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """What is known of one parameter.

    Attributes:
        type: a JSON type, or "" when unknown.
        allowed: the values it may have; empty when any.
        required: False also when unknown.
    """

    type: str = ""
    allowed: tuple[Any, ...] = ()
    required: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called; `parameters` is None when its documentation could not be read."""

    name: str
    parameters: Mapping[str, Parameter] | None = field(default_factory=dict)

    def fault(self, call: Call) -> str:
        """What makes the call one that this tool does not accept; empty when it accepts it."""
        if self.parameters is None:
            return ""
        for name in call.arguments:
            if name not in self.parameters:
                known = ", ".join(self.parameters) or "none"
                return f"{self.name} has no parameter {_cut(name)}; its parameters: {known}."
        for name, parameter in self.parameters.items():
            if parameter.required and name not in call.arguments:
                return f"the required argument {name} of {self.name} is missing."
            if name in call.arguments and (told := _misfit(call.arguments[name], parameter)):
                return f"the argument {name} of {self.name} {told}."
        return ""


def tools_from_schemas(schemas: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Tools of JSON schemas, bare or in OpenAI's {"type": "function", "function": ...}."""
    tools = []
    for outer in schemas:
        schema = outer.get("function", outer)
        body = schema.get("parameters") or {}
        required = set(body.get("required") or ())
        properties = body.get("properties") or {}
        parameters = {name: _parameter(value, name in required) for name, value in properties.items()}
        tools.append(Tool(str(schema["name"]), parameters))
    return tools


def tools_from_documentation(prompt: str) -> list[Tool]:
    """Tools of a ToolAlpaca prompt: a line "name: what it does", later a line "Parameters: {...}" that describes each
    parameter in words ("Required. integer. ... One of: [a, b]")."""
    tools: list[Tool] = []
    name = ""
    for line in prompt.split("\n"):
        if line.startswith("Parameters: ") and name:
            tools.append(Tool(name, _described(line[len("Parameters: ") :])))
            name = ""
        elif (header := _HEADER.match(line)) and header.group(1) not in _NOT_TOOLS:
            name = header.group(1)
    return tools


def strict_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Decode one JSON value at `start`; text may follow it.

    Stricter than `json`: no NaN or infinity, no key twice in an object; and safe: nesting is bounded.

    Returns:
        The value and the position after it.

    Raises:
        ValueError: it is not JSON; the message says what and at which character.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as exc:
        near = text[max(start, exc.pos - 15) : exc.pos + 15].replace("\n", " ")
        raise ValueError(f"{exc.msg} at character {exc.pos - start + 1}, near {near!r}") from None
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEEPEST} deep") from None
    if _depth(value) > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    return value, end


def type_name(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _parameter(schema: Mapping[str, Any], required: bool) -> Parameter:
    kind = _TYPES.get(str(schema.get("type", "")).lower(), "")
    allowed = tuple(schema.get("enum") or ())
    if any(_misfit(value, Parameter(kind)) for value in allowed):
        kind = ""  # the schema contradicts itself, for example a "string" that may be True
    return Parameter(kind, allowed, required)


def _described(text: str) -> Mapping[str, Parameter] | None:
    try:
        record, _ = strict_json(text)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    found = {}
    for name, description in record.items():
        words = str(description)
        required = words.lower().startswith("required")
        first = re.sub(r"^(?:required|optional)[.,;]?\s*", "", words, flags=re.IGNORECASE)
        kind = re.match(r"[A-Za-z]+", first)
        listed = _ONE_OF.search(words)
        found[name] = Parameter(
            type=_TYPES.get(kind.group().lower(), "") if kind else "",
            allowed=tuple(item.strip().strip("'\"") for item in listed.group(1).split(",")) if listed else (),
            required=required,
        )
    return found


def _misfit(value: Any, parameter: Parameter) -> str:
    given = type_name(value)
    wanted = parameter.type
    fits = given == wanted or (wanted == "number" and given == "integer")
    fits = fits or (wanted == "integer" and isinstance(value, float) and value.is_integer())
    if wanted and not fits and value is not None:
        return f"must be of type {wanted}, not {given}"
    if parameter.allowed and given in ("string", "integer") and value not in parameter.allowed and value != "":
        return f"must be one of {', '.join(map(str, parameter.allowed))}, not {_cut(str(value))}"
    return ""


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…").replace("<|", "< |").replace("|>", "| >")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > 400:
        raise ValueError(f"a number of {len(text)} digits is too large")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {_cut(twice)} stands twice in one object")
    return record


def _depth(value: Any) -> int:
    deepest = 0
    stack = [(value, 1)]
    while stack:
        item, level = stack.pop()
        deepest = max(deepest, level)
        if isinstance(item, dict):
            stack += [(inner, level + 1) for inner in item.values()]
        elif isinstance(item, list):
            stack += [(inner, level + 1) for inner in item]
    return deepest


_DECODER = json.JSONDecoder(
    parse_constant=_refuse, parse_float=_float, parse_int=_int, object_pairs_hook=_object, strict=True
)
