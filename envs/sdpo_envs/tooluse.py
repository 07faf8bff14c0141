"""Tool calls in one turn: ToolAlpaca questions as the papers use them (2601.20802, 4.1; 2601.19897), and the grader that
all tool environments share.

Nothing is executed: the calls of the response are compared with the expected ones (`sdpo_envs.grading.tool_match`).
Rows whose expected calls are not JSON (ToolAlpaca has some with placeholders for earlier results) cannot be answered by
anyone and are left out; `Tooluse.unusable` counts them. Not covered: several turns, simulated tool results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from sdpo.env import Env
from sdpo.errors import ConfigError, did_you_mean
from sdpo.types import Grade, Message, Task
from sdpo_envs.grading.tool_formats import FORMATS, parse_calls
from sdpo_envs.grading.tool_match import Allowed, Expected, compare
from sdpo_envs.grading.tools import Tool, strict_json, tools_from_documentation, tools_from_schemas
from sdpo_envs.rows import Row, field, json_files, read_rows

__all__ = ["ToolCalls", "Tooluse", "render"]

Feedback = Literal["none", "detail"]

_WRITE = {
    "react": "the two lines `Action: NAME` and `Action Input: {...}` with a JSON object",
    "hermes": '<tool_call>{"name": "NAME", "arguments": {...}}</tool_call>',
    "qwen_xml": "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
    "python": "a list [NAME(key=value)] with arguments by name",
}


class ToolCalls(Env):
    """Grades calls; subclasses bring the tasks.

    A task's target is a list of expected calls: {"name", "arguments"} with exact values, or {"name", "choices"} with a
    list of allowed values for each argument ("" among them: it may be left out); optionally "optional". Its metadata has
    the tools' JSON schemas as "tools", or the prompt has their documentation.

    Args:
        format: how calls are written: react, hermes, qwen_xml, python, or auto (whichever the response uses).
        ordered: calls must come in the expected order.
        numeric_strings: "1" equals 1 where the documentation does not say which it should be.
        feedback: "none" (as in the paper's runs), or "detail": what is wrong with each call.
        reveal_gold: the feedback ends with the expected calls.
    """

    feedback_reveals_target = True  # under reveal_gold

    def __init__(
        self,
        *,
        format: str,
        ordered: bool = False,
        numeric_strings: bool = False,
        feedback: Feedback = "detail",
        reveal_gold: bool = False,
    ) -> None:
        for key, value, allowed in (("format", format, FORMATS), ("feedback", feedback, get_args(Feedback))):
            if value not in allowed:
                raise ConfigError(f"{type(self).__name__}: {key} = {value!r}", hint=f"one of {', '.join(allowed)}")
        self._format = format
        self._ordered = ordered
        self._numeric_strings = numeric_strings
        self._feedback = feedback
        self._reveal = reveal_gold

    def grade(self, task: Task, completion: str) -> Grade:
        form = str(task.metadata.get("format", self._format))
        tools = _tools(task)
        expected = [_expected(item) for item in task.target]
        parsed = parse_calls(completion, form, tools)
        result = compare(parsed.calls, expected, tools, ordered=self._ordered, numeric_strings=self._numeric_strings)
        success = result.equal and not parsed.fault
        needed = sum(not one.optional for one in expected)
        return Grade(
            reward=float(success),
            feedback="" if success else self._explain(form, parsed.fault, parsed.empty, result.faults, task),
            success=success,
            metrics={
                "format": float(not parsed.fault and not (parsed.empty and needed)),
                "calls_right": result.matched / needed if needed else float(success),
            },
        )

    def task_from(self, row: Mapping[str, Any]) -> Task:
        """A task for `sdpo env grade`: `gold` calls, optionally `tools` schemas and `format`."""
        return Task(
            id="case",
            prompt=(Message(role="user", content=str(row.get("question", "case"))),),
            target=_gold(row["gold"], "gold"),
            metadata={"format": row.get("format", self._format), "tools": row.get("tools", [])},
        )

    def _explain(self, form: str, fault: str, empty: bool, faults: Sequence[str], task: Task) -> str:
        if self._feedback == "none":
            return ""
        if fault:
            told = fault
        elif empty:
            ways = _WRITE.get(form) or " or ".join(_WRITE.values())
            told = f"The response calls no tool, but the request needs one. A call is written as {ways}."
        else:
            told = " ".join(faults)
        if self._reveal:
            told += f" The right calls are: {json.dumps(task.target, ensure_ascii=False)}"
        return told


class Tooluse(ToolCalls):
    """ToolAlpaca: a question, documented tools, and the calls that answer it; splits "train" and "test".

    There is no copy on the hub that has the papers' prompts: `path` points to their files (github.com/lasgroup/SDPO,
    datasets/tooluse), a folder with train and test files or one file. Rows have `prompt` and `answer` (calls as
    {"Action", "Action_Input"} or {"name", "arguments"}); optional `system`, `split`, `idx` or `id`, and an expert's
    `golden_response` or `demonstration`.

    Args:
        path: folder or file; the split is the row's, else "test" where the file's name says so, else "train".
        test_path: file of the test split; questions in it are removed from the training split.
        format, ordered, numeric_strings, feedback, reveal_gold: see `ToolCalls`.
    """

    def __init__(
        self,
        path: str,
        test_path: str | None = None,
        *,
        format: str = "react",
        ordered: bool = False,
        numeric_strings: bool = False,
        feedback: Feedback = "detail",
        reveal_gold: bool = False,
    ) -> None:
        super().__init__(
            format=format,
            ordered=ordered,
            numeric_strings=numeric_strings,
            feedback=feedback,
            reveal_gold=reveal_gold,
        )
        self._paths = [(path, "")] + ([(test_path, "test")] if test_path else [])
        self.unusable = 0
        self.duplicates = 0

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self._splits:
            raise ConfigError(f"tooluse has no split {split!r}", hint=did_you_mean(split, self._splits))
        return self._splits[split]

    def describe(self) -> str:
        sizes = ", ".join(f"{len(tasks)} {split}" for split, tasks in self._splits.items())
        return (
            f"{super().describe()}\n\nQuestions: {sizes}. Left out: {self.unusable} without usable calls, "
            f"{self.duplicates} duplicates."
        )

    @cached_property
    def _splits(self) -> dict[str, list[Task]]:
        splits: dict[str, dict[str, Task]] = {}
        for path, split in self._paths:
            for file in json_files(Path(path).expanduser()):
                for number, row in enumerate(read_rows(file), 1):
                    own = split or str(row.get("split") or ("test" if "test" in file.stem else "train"))
                    self._add(splits.setdefault(own, {}), row, own, f"{file}, row {number}", number)
        for prompt in splits.get("test", {}):
            if splits.get("train", {}).pop(prompt, None) is not None:
                self.duplicates += 1
        return {split: list(tasks.values()) for split, tasks in splits.items() if tasks}

    def _add(self, tasks: dict[str, Task], row: Row, split: str, where: str, number: int) -> None:
        prompt = str(field(row, ("prompt",), where))
        try:
            target = _gold(field(row, ("answer",), where), where)
        except _Unusable:
            self.unusable += 1
            return
        if prompt in tasks:
            self.duplicates += 1
            return
        shown = row.get("golden_response") or row.get("demonstration")
        system = (Message(role="system", content=row["system"]),) if row.get("system") else ()
        tasks[prompt] = Task(
            id=f"{split}-{row.get('id', row.get('idx', number))}",
            prompt=(*system, Message(role="user", content=prompt)),
            target=target,
            demonstration=("\n".join(shown) if isinstance(shown, list) else shown) or render(target, "react"),
        )


class _Unusable(ConfigError):
    """An expected call that is not one: no response could match it."""


def render(target: Sequence[Mapping[str, Any]], form: str) -> str:
    """Expected calls as a response that makes them; of several allowed values the first."""
    calls = [(one["name"], _values(one)) for one in target]
    if form in ("react", "auto"):
        return "\n".join(f"Action: {name}\nAction Input: {json.dumps(values)}" for name, values in calls)
    if form == "python":
        written = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls
        ]
        return f"[{', '.join(written)}]"
    if form == "hermes":
        return "\n".join(f"<tool_call>{json.dumps({'name': n, 'arguments': v})}</tool_call>" for n, v in calls)
    return "\n".join(
        f"<tool_call><function={name}>"
        + "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>"
            for key, value in values.items()
        )
        + "</function></tool_call>"
        for name, values in calls
    )


def _values(call: Mapping[str, Any]) -> dict[str, Any]:
    if "arguments" in call:
        return dict(call["arguments"])
    return {name: _first_value(values[0]) for name, values in call["choices"].items() if values and "" not in values}


def _first_value(value: Any) -> Any:
    """An allowed value of a BFCL gold as a plain one: in its objects every value is a list of allowed ones."""
    if isinstance(value, list):
        return [_first_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    choices = {key: listed if isinstance(listed, list) else [listed] for key, listed in value.items()}
    return {key: listed[0] for key, listed in choices.items() if listed and "" not in listed}


def _tools(task: Task) -> list[Tool]:
    if "tools" in task.metadata:
        return tools_from_schemas(task.metadata["tools"])
    return tools_from_documentation(task.prompt[-1]["content"])


def _expected(item: Mapping[str, Any]) -> Expected:
    arguments = dict(item.get("arguments", {}))
    for name, values in item.get("choices", {}).items():
        left_out = not values or "" in values or None in values
        arguments[name] = Allowed((*values,) if values else ([],), optional=left_out)
    return Expected(item["name"], arguments, optional=bool(item.get("optional")))


def _gold(answer: Any, where: str) -> list[dict[str, Any]]:
    """Expected calls from what data sets write: a list or its JSON, {"Action", "Action_Input"} or {"name",
    "arguments"}, inputs as objects or their JSON; a name that begins with "[Optional]" is optional.

    Raises:
        _Unusable: it is something else; names the row.
    """
    calls = _decoded(answer, where)
    if not isinstance(calls, list):
        raise _Unusable(f"{where}: the answer is not a list of calls", hint='[{"name": ..., "arguments": {...}}]')
    found = []
    for call in calls:
        name = call.get("Action", call.get("name")) if isinstance(call, dict) else None
        if not isinstance(name, str) or not name:
            raise _Unusable(f"{where}: an expected call has no name", hint='"Action" or "name"')
        arguments = _decoded(call.get("Action_Input", call.get("arguments", {})), where)
        if not isinstance(arguments, dict):
            raise _Unusable(f"{where}: the input of {name} is not a JSON object", hint="an object of arguments")
        optional = name.startswith("[Optional]")
        found.append({"name": name.removeprefix("[Optional]").strip(), "arguments": arguments, "optional": optional})
    return found


def _decoded(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        decoded, end = strict_json(value.strip())
    except ValueError as exc:
        raise _Unusable(f"{where}: an expected call is not JSON: {exc}") from None
    if end != len(value.strip()):
        raise _Unusable(f"{where}: text follows the JSON of an expected call")
    return decoded
