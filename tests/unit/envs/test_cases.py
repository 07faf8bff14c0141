"""The recorded grader cases, where they are there: every strict one gives the expected verdict, through `task_from`."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sdpo.env import Env
from sdpo.types import Grade
from sdpo_envs.bfcl import Bfcl
from sdpo_envs.math import Math
from sdpo_envs.science import Science

CASES = Path(__file__).resolve().parents[3].parent / "shared" / "cases" / "graders.jsonl"
DECIDED_OTHERWISE = {
    "math-num-unit-kilo": "units are not converted",
    "mcq-multi-select": "a question with several answers is refused when it is loaded",
}

pytestmark = pytest.mark.skipif(not CASES.is_file(), reason=f"no cases at {CASES}")


def cases(kind: str) -> list[dict[str, Any]]:
    if not CASES.is_file():
        return []
    found = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    return [case for case in found if case["env"] == kind and case["id"] not in DECIDED_OTHERWISE]


@pytest.fixture(scope="module")
def environments() -> dict[str, Any]:
    return {"mcq": Science("nowhere"), "math": Math(path="nowhere", timeout=2), "tool": Bfcl("nowhere")}


@pytest.mark.parametrize("kind", ["mcq", "math", "tool"])
def test_verdicts(kind: str, environments: dict[str, Any]) -> None:
    env = environments[kind]
    wrong = []
    for case in cases(kind):
        expected = case["expected"]
        start = time.monotonic()
        grade = in_thread(env, case["input"]) if case["input"].get("run_in_thread") else judged(env, case["input"])
        seconds = time.monotonic() - start
        faults = []
        if (grade.success is True) is not expected["correct"]:
            faults.append(f"success {grade.success}, expected {expected['correct']}")
        faults += [
            f"feedback lacks {text!r}"
            for text in expected.get("feedback_should_contain", [])
            if text not in grade.feedback
        ]
        faults += [f"took {seconds:.1f} s"] if seconds > expected.get("max_wall_s", 60) else []
        faults += [f"{path} exists" for path in expected.get("host_must_not_exist", []) if os.path.exists(path)]
        if faults:
            wrong.append((case["id"], case["tier"], faults, grade))
    assert wrong == []
    assert len(cases(kind)) > 60


def judged(env: Env, row: dict[str, Any]) -> Grade:
    grade = env.grade(env.task_from(row), row["response"])  # type: ignore[attr-defined]
    assert isinstance(grade, Grade)
    return grade


def in_thread(env: Env, row: dict[str, Any]) -> Grade:
    box: list[Grade] = []
    thread = threading.Thread(target=lambda: box.append(judged(env, row)))
    thread.start()
    thread.join(60)
    return box[0]
