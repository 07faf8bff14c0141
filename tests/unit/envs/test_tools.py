"""Tool calls: reading them in four forms, comparing them, and the two environments."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo.env_check import check_env
from sdpo.errors import ConfigError
from sdpo.types import Grade, Task
from sdpo_envs.bfcl import Bfcl
from sdpo_envs.grading.tool_formats import FORMATS, parse_calls
from sdpo_envs.grading.tool_match import Allowed, Expected, compare
from sdpo_envs.grading.tools import Call, strict_json, tools_from_documentation, tools_from_schemas
from sdpo_envs.tooluse import Tooluse, render

SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "data"

SCHEMAS = [
    {
        "name": "book",
        "parameters": {
            "type": "dict",
            "properties": {
                "room": {"type": "integer"},
                "guest": {"type": "string"},
                "view": {"type": "string", "enum": ["sea", "yard"]},
                "extras": {"type": "object"},
            },
            "required": ["room", "guest"],
        },
    },
    {"type": "function", "function": {"name": "list-rooms", "parameters": {"type": "object", "properties": {}}}},
]
TOOLS = tools_from_schemas(SCHEMAS)

DOCUMENTED = """Your tools:
Name: Hotel
Documentation:
book: Book a room.
Parameters: {"room": "Required. integer.", "view": "string. One of: [sea, yard]. The view.", "n": "Array[string]."}
Output: Done.
 - Format: application/json
list-rooms: Rooms that are free.
Parameters: {}
Output: A list.
Question: Book a room with the view: sea
"""


def calls(response: str, form: str = "react") -> list[tuple[str, Any]]:
    parsed = parse_calls(response, form, TOOLS)
    assert parsed.fault == "", parsed.fault
    return [(call.name, call.arguments) for call in parsed.calls]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('Action: f\nAction Input: {"x": {"y": [1, {"z": "}"}]}}', [("f", {"x": {"y": [1, {"z": "}"}]}})]),
        ('Action: get-user.v2\nAction Input: {"a": "{b}"}', [("get-user.v2", {"a": "{b}"})]),
        ('**Action:** f\n**Action Input:** {"a": 1}', [("f", {"a": 1})]),
        ('Action: `f`\nAction Input:\n```json\n{\n "a": 1\n}\n```\nDone.', [("f", {"a": 1})]),
        (
            'Action 1: f\nAction Input 1: {"a": 1}\nAction 2: g\nAction Input 2: {"a": 2}',
            [("f", {"a": 1}), ("g", {"a": 2})],
        ),
        ('Thought: now Action: f would do.\nAction: f\n\nAction Input: {"a": 1}', [("f", {"a": 1})]),
        ('Action: f Action Input: {"a": 1}', [("f", {"a": 1})]),
        ('Action: f\r\nAction Input: {"a": 1}\r\n', [("f", {"a": 1})]),
        (
            'Action: f\nAction Input: {"a": "Action: g\\nAction Input: {}"}',
            [("f", {"a": "Action: g\nAction Input: {}"})],
        ),
        ("Action: list-rooms", [("list-rooms", {})]),
        ("Action: I will look it up first.", []),
        ("no call", []),
    ],
)
def test_react(response: str, expected: list[Any]) -> None:
    assert calls(response) == expected


@pytest.mark.parametrize(
    ("form", "response", "words"),
    [
        ("react", 'Action: f\nAction Input: {"a": 1', "Action Input of call 1 (f) is not valid JSON"),
        ("react", 'Action: f\nAction Input: [{"a": 1}]', "must be a JSON object, not array"),
        ("react", 'Action: f\nAction Input: {"a": 1, "a": 2}', "stands twice"),
        ("react", 'Action: f\nAction Input: {"a": NaN}', "NaN is not JSON"),
        ("react", 'Action: f\nAction Input: {"a": 1e999}', "too large"),
        ("react", "Action: f\nAction Input: {'a': 1}", "not valid JSON"),
        ("react", "Action: book", "no Action Input line; book has parameters: room, guest, view, extras"),
        ("react", 'Action Input: {"a": 1}', "without an Action line"),
        ("react", "<think>Action: f", "inside its thinking"),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}, {"name": "g"}</tool_call>',
            "there must be </tool_call>",
        ),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', '"name" of tool call 1 must be a text'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ("hermes", "<tool_call>", "is missing"),
        ("qwen_xml", "<function=f><parameter=a>1</parameter>", "no </function>"),
        ("qwen_xml", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "twice"),
        ("python", "[f(1)]", "must be given by name"),
        ("python", "[f(**{'a': 1})]", "by name"),
        ("python", "[f(a=open('x'))]", "plain value"),
        ("python", "[f(a={1, 2})]", "plain value"),
        ("python", "[f(a=1]", "not valid Python"),
        ("python", "[f(a=1, a=2)]", "each once"),
        ("python", " \n", "is empty"),
    ],
)
def test_malformed_calls_say_what_and_where(form: str, response: str, words: str) -> None:
    assert words in parse_calls(response, form, TOOLS).fault


def test_other_forms() -> None:
    assert calls('text <tool_call>{"name": "f", "arguments": "{\\"a\\": {\\"b\\": 1}}"}</tool_call>', "hermes") == [
        ("f", {"a": {"b": 1}})
    ]
    assert calls("[a.b(x=-1, y=[1, (2, None)], z={'k': True})]", "python") == [
        ("a.b", {"x": -1, "y": [1, [2, None]], "z": {"k": True}})
    ]
    assert calls("Sure:\n```python\nf(a=1)\n```", "python") == [("f", {"a": 1})]
    given_xml = {"room": "007", "guest": "12", "extras": '{"a": 1}'}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in given_xml.items())
    xml = f"<function=book>{inner}</function>"
    assert calls(xml, "qwen_xml") == [("book", {"room": "007", "guest": "12", "extras": {"a": 1}})]
    assert calls("<function=f><parameter=a>1<parameter=b>x y</function>", "qwen_xml") == [("f", {"a": 1, "b": "x y"})]


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "auto"])
def test_auto_recognises_each_form(form: str) -> None:
    response = render([{"name": "f", "arguments": {"a": 1, "b": "x"}}, {"name": "g", "arguments": {}}], form)
    assert calls(response, "auto") == [("f", {"a": 1, "b": "x"}), ("g", {})]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), JSON, max_size=3),
    st.sampled_from(["react", "hermes"]),
)
def test_whatever_json_can_say_survives(arguments: dict[str, Any], form: str) -> None:
    assert calls(render([{"name": "f", "arguments": arguments}], form), form) == [("f", arguments)]


@given(st.text(max_size=200), st.sampled_from(FORMATS))
def test_reading_never_raises(text: str, form: str) -> None:
    parse_calls(text, form, TOOLS)


HOSTILE = [
    "Action: " * 25_000, "Action: f\n" * 20_000, "Action: f\n" + "\n" * 200_000,
    'Action: f\nAction Input: ' + '{"a":' * 40_000,
    "<tool_call>" * 18_000, "<tool_call>" + " " * 200_000, '<tool_call>{"name": "f"}</tool_call>' * 6_000,
    "<function=f>" + "<parameter=a>" * 15_000 + "</function>", "<function=f>" + " " * 200_000 + "</function>",
    "[f(a=" + "(" * 19_000, "[f(a=" + "-" * 19_000 + "1)]", "f(" * 90_000, "f(a=1)\n" * 28_000, "```\nf(" * 30_000,
    "a.b" + ".c" * 9_000 + "(x=1)", "[f(a=" + "[" * 9_000 + "]" * 9_000 + ")]", "Action Input" * 16_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:14])
@pytest.mark.parametrize("form", ["auto", "python"])
def test_long_hostile_text_is_linear(text: str, form: str) -> None:
    start = time.monotonic()
    parsed = parse_calls(text, form, TOOLS)
    compare(parsed.calls, [Expected("f", {"a": 1})], TOOLS)
    assert time.monotonic() - start < 10  # seconds on a busy machine


def test_strict_json_bounds_depth_and_numbers() -> None:
    assert strict_json('{"a": 9007199254740993} rest') == ({"a": 9007199254740993}, 23)
    for text in ('{"a": 1' + "0" * 500 + "}", "[" * 200 + "]" * 200, "[" * 100_000):
        with pytest.raises(ValueError, match=r"too large|deep"):
            strict_json(text)


def verdict(made: list[tuple[str, Any]], expected: list[Expected], **options: Any) -> bool:
    return compare([Call(*one) for one in made], expected, TOOLS, **options).equal


F1, G2 = Expected("f", {"a": 1}), Expected("g", {"b": 2})


def test_each_call_keeps_its_own_arguments() -> None:
    assert verdict([("f", {"a": 1}), ("g", {"b": 2})], [F1, G2])
    assert not verdict([("f", {"b": 2}), ("g", {"a": 1})], [F1, G2])  # swapped
    same = [Expected("f", {"id": 1}), Expected("f", {"id": 2})]
    assert not verdict([("f", {"id": 999}), ("f", {"id": 2})], same)  # a merged object would hide the first
    assert verdict([("f", {"id": 2}), ("f", {"id": 1})], same)
    assert not verdict([("f", {"a": 1}), ("f", {"a": 1})], [F1])
    assert not verdict([], [F1])
    assert verdict([], [])


def test_order_by_option() -> None:
    made = [("g", {"b": 2}), ("f", {"a": 1})]
    assert verdict(made, [F1, G2])
    assert not verdict(made, [F1, G2], ordered=True)
    assert verdict(made[::-1], [F1, G2], ordered=True)
    told = compare([Call(*one) for one in made], [F1, G2], ordered=True).faults
    assert "wrong" in told[-1] or "place" in told[-1]


def test_optional_calls() -> None:
    may = Expected("g", {"b": 2}, optional=True)
    for ordered in (False, True):
        assert verdict([("f", {"a": 1})], [may, F1], ordered=ordered)
        assert verdict([("g", {"b": 2}), ("f", {"a": 1})], [may, F1], ordered=ordered)
        assert not verdict([("g", {"b": 2})], [may, F1], ordered=ordered)


@pytest.mark.parametrize(
    ("given_value", "wanted", "equal"),
    [
        (5.0, 5, True), (5, 5.0, True), (True, 1, False), (1, True, False), (False, 0, False), ("1", 1, False),
        (1, "1", False),
        (9007199254740992, 9007199254740993, False), (9007199254740992.0, 9007199254740993, False), ([1, 2], [2, 1], False),
        ({"a": [True]}, {"a": [1]}, False), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ("Paris", "paris", False),
        ("", "", True),
        (None, "", False),
    ],
)  # fmt: skip
def test_values_compare_by_type(given_value: Any, wanted: Any, equal: bool) -> None:
    assert verdict([("f", {"x": given_value})], [Expected("f", {"x": wanted})]) is equal


def test_numbers_as_text() -> None:
    assert verdict([("h", {"x": "1"})], [Expected("h", {"x": 1})], numeric_strings=True)  # undocumented: by option
    assert verdict([("h", {"x": 1})], [Expected("h", {"x": "1"})], numeric_strings=True)
    assert not verdict([("h", {"x": "one"})], [Expected("h", {"x": 1})], numeric_strings=True)
    guest = {"room": 1, "guest": "12"}
    assert verdict(
        [("book", guest)], [Expected("book", {"room": 1, "guest": 12})]
    )  # the schema wants text: the gold is careless
    assert not verdict(
        [("book", {"room": "1", "guest": "a"})], [Expected("book", {"room": 1, "guest": "a"})], numeric_strings=True
    )


def test_null_is_left_out() -> None:
    assert verdict([("f", {"a": 1, "b": None})], [F1])
    assert not verdict([("f", {"a": None})], [F1])


def test_allowed_values() -> None:
    wanted = Expected("f", {"place": Allowed(("New York", "NYC")), "unit": Allowed(("km", ""), optional=True)})
    assert verdict([("f", {"place": "new-york", "unit": "KM"})], [wanted])
    assert verdict([("f", {"place": "NYC"})], [wanted])
    assert not verdict([("f", {"place": "Boston"})], [wanted])
    assert not verdict([("f", {"unit": "km"})], [wanted])
    nested = Expected("f", {"o": Allowed(({"a": [1, 2], "b": ["x", ""]},))})
    assert verdict([("f", {"o": {"a": 2}})], [nested])
    assert not verdict([("f", {"o": {"a": 3}})], [nested])
    assert not verdict([("f", {"o": {"a": 1, "c": 1}})], [nested])


def test_many_to_many_finds_the_matching() -> None:
    wanted = [Expected("f", {"x": Allowed((1, 2))}), Expected("f", {"x": Allowed((1,))})]
    assert verdict([("f", {"x": 1}), ("f", {"x": 2})], wanted)  # the first call must give way


def test_documentation_in_words() -> None:
    book, rooms = tools_from_documentation(DOCUMENTED)
    assert (book.name, rooms.name) == ("book", "list-rooms")
    assert book.parameters is not None
    room, view, names = book.parameters.values()
    assert (room.type, room.required, view.allowed, names.type) == ("integer", True, ("sea", "yard"), "array")
    assert tools_from_documentation("f: broken.\nParameters: {oops\n")[0].parameters is None


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (("boook", {"room": 1, "guest": "a"}), 'no tool "boook"; did you mean book?'),
        (("fly", {}), "the tools are book, list-rooms"),
        (
            ("book", {"room": 1, "guest": "a", "floor": 2}),
            "no parameter 'floor'; its parameters: room, guest, view, extras",
        ),
        (("book", {"room": 1}), "required argument guest of book is missing"),
        (("book", {"room": "one", "guest": "a"}), "argument room of book must be of type integer, not string"),
        (("book", {"room": 1, "guest": "a", "view": "sky"}), "must be one of sea, yard"),
        (("list-rooms", {}), "not the tool to call here"),
        (("book", {"room": 1, "guest": "a", "view": "sea"}), "the value of room, guest is not what the user asked for"),
        (("book", {"room": 4, "guest": "Ann"}), "the argument view is missing"),
    ],
)
def test_feedback_names_the_fault_and_not_the_gold(made: tuple[str, Any], words: str) -> None:
    wanted = [Expected("book", {"room": 4, "guest": "Ann", "view": "sea"})]
    result = compare([Call(*made)], wanted, TOOLS)
    assert not result.equal
    assert words in result.faults[0]
    assert "Ann" not in " ".join(result.faults)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def alpaca(question: str, gold: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": f"{DOCUMENTED}{question}", "answer": gold if isinstance(gold, str) else json.dumps(gold), **more}


ROOM = [{"Action": "book", "Action_Input": '{"room": 4, "view": "sea"}'}]


def grade(env: Tooluse | Bfcl, task: Task, text: str) -> Grade:
    result = env.grade(task, text)
    assert isinstance(result, Grade)
    return result


def test_tooluse(tmp_path: Path) -> None:
    rows = [
        alpaca("one", ROOM, idx=1),
        alpaca(
            "two",
            [{"name": "list-rooms", "arguments": {}}, {"Action": "[Optional]book", "Action_Input": {"room": 1}}],
            idx=2,
        ),
        alpaca("three", '[{"Action": "book", "Action_Input": "{\\"room\\": ${room}}"}]', idx=3),
        alpaca("four", '[{"Action_Input": "{}"}]', idx=4),
        alpaca("five", '[{"Action": "book", "Action_Input": "[1]"}]', idx=5),
        alpaca("six", "not json", idx=6),
    ]
    env = Tooluse(write(tmp_path / "train.jsonl", rows), write(tmp_path / "eval.jsonl", [alpaca("one", ROOM, idx=1)]))
    assert [task.id for task in env.tasks("train")] == ["train-2"]
    assert [task.id for task in env.tasks("test")] == ["test-1"]
    assert (env.unusable, env.duplicates) == (4, 1)
    (two,), (one,) = env.tasks("train"), env.tasks("test")
    assert grade(env, one, one.demonstration or "").success
    assert grade(env, two, "Action: list-rooms").success
    assert grade(env, two, 'Action: list-rooms\nAction: book\nAction Input: {"room": 1}').success
    wrong = grade(env, one, 'Action: book\nAction Input: {"room": 5, "view": "sea"}')
    assert (wrong.reward, wrong.metrics["format"]) == (0.0, 1.0)
    assert "value of room" in wrong.feedback
    assert "4" not in wrong.feedback.replace("Call 1", "")
    assert "calls no tool" in grade(env, one, "I would book it.").feedback
    assert [line for line in check_env(env) if line.verdict == "failed"] == []


def test_tooluse_feedback_levels(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [alpaca("one", ROOM)])
    silent, revealing = Tooluse(path, feedback="none"), Tooluse(path, reveal_gold=True)
    task = silent.tasks("train")[0]
    assert grade(silent, task, "nothing").feedback == ""
    assert '"room": 4' in grade(revealing, task, "nothing").feedback
    with pytest.raises(ConfigError, match="one of react"):
        Tooluse(path, format="xml")


def test_bfcl_rows(tmp_path: Path) -> None:
    gold = [{"book": {"room": [4], "guest": ["Ann", "Ann Lee"], "view": ["", "sea"]}}]
    rows = [
        {
            "id": "simple_python_0",
            "question": [[{"role": "user", "content": "Book"}]],
            "function": SCHEMAS[:1],
            "ground_truth": gold,
        },
        {
            "id": "irrelevance_0",
            "question": [[{"role": "user", "content": "Sing"}]],
            "function": SCHEMAS[:1],
            "ground_truth": [],
        },
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    for form in ("python", "hermes", "qwen_xml", "react"):
        env = Bfcl(path, categories=["simple_python", "irrelevance"], format=form)
        assert [line for line in check_env(env) if line.verdict == "failed" and "garbage" not in line.name] == []
        book, sing = env.tasks("train")
        assert not grade(env, book, "No.").success
        assert grade(env, sing, "I cannot sing.").success
        assert not grade(env, sing, "").success
        assert not grade(env, sing, book.demonstration or "").success
    env = Bfcl(path, categories="simple_python")
    assert grade(env, env.tasks("train")[0], "[book(room=4, guest='ann lee')]").success
    with pytest.raises(ConfigError, match="no category 'simple'"):
        Bfcl(path, categories="simple")


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data at {SHARED}")
def test_every_gold_matches_itself() -> None:
    env = Tooluse(str(SHARED / "toolalpaca_eval.jsonl"), str(SHARED / "tooluse_test_sdpo.jsonl"))
    assert (len(env.tasks("train")), len(env.tasks("test"))) == (112, 68)
    bfcl = Bfcl(str(SHARED / "bfcl_subset.jsonl"), categories=["simple_python", "multiple", "live_simple"])
    for one in (env, bfcl):
        tasks = [*one.tasks("train"), *one.tasks("test")]
        assert [task.id for task in tasks if not grade(one, task, task.demonstration or "").success] == []
        assert [task.id for task in tasks if grade(one, task, task.prompt[-1]["content"]).success] == []
