"""From an observation to a result: forged, cut and missing lines."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo.errors import ConfigError, SandboxError
from sdpo_sandbox.base import Call, Limits, Program, RunResult, Status
from sdpo_sandbox.observe import Observation, conclude, make_job

LIMITS = Limits(cpu_s=2, output_bytes=1000, result_bytes=1000, stderr_bytes=10)
FUNCTION = make_job(Program("", fn_name="f"), Call([1]), LIMITS) | {"nonce": "N"}
STDIN = make_job(Program(""), "", LIMITS) | {"nonce": "N"}


def seen(lines: str | bytes = "N ready\n", **changes: Any) -> Observation:
    facts: dict[str, Any] = {
        "wait_status": 0,
        "killed": "",
        "cpu_s": 0.1,
        "wall_s": 0.1,
        "peak_bytes": 1 << 20,
        "stdout": b"",
        "stdout_bytes": 0,
        "stderr": b"",
        "stderr_bytes": 0,
        "lines": lines.encode() if isinstance(lines, str) else lines,
    }
    return Observation(**(facts | changes))


def result(lines: str | bytes = "N ready\n", *, function: bool = True, **changes: Any) -> RunResult:
    return conclude(seen(lines, **changes), FUNCTION if function else STDIN, LIMITS)


def test_a_value() -> None:
    got = result('N ready\nN value {"t": [1, 2.0]}\n')
    assert (got.status, got.value, got.has_value) == (Status.OK, (1, 2.0), True)


def test_none_is_a_value_and_no_value_is_none() -> None:
    assert result("N ready\nN value null\n").has_value
    nothing = result("N ready\n")
    assert (nothing.status, nothing.has_value) == (Status.RUNTIME_ERROR, False)


@pytest.mark.parametrize(
    "lines",
    [
        "N ready\nN value 1\nN value 2\n",  # hedging
        "N ready\nN value 1\nN value 1\n",
        "N ready\nN value 1",  # cut
        "N ready\nvalue 1\n",  # no nonce
        "N ready\nM value 1\n",
        "N ready\nN value 1\ngarbage\n",
        "garbage\nN ready\nN value 1\n",
        "N value 1\n",  # nothing before it
        "N ready\nN ready\nN value 1\n",
        "N ready\nN value {\n",
        'N ready\nN value {"q": 1}\n',
        "N ready\nN value\n",
        "N ready\nN detail {}\n",
        "N ready\nN uncaught\nN value 1\n",
        "N ready\nN value 1\nN uncaught\n",
        b"N ready\n\xff\xfe\n",
        "N ready\n\n",
        "N ready\nN value " + "[" * 400 + "]" * 400 + "\n",
    ],
)
def test_anything_but_one_frame_is_a_protocol_error(lines: str | bytes) -> None:
    got = result(lines)
    assert got.status is Status.PROTOCOL_ERROR
    assert not got.has_value


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_whatever_a_program_writes_is_never_a_value_without_the_nonce(noise: bytes) -> None:
    got = result(b"N ready\n" + noise)
    assert not got.has_value
    assert got.status in (Status.PROTOCOL_ERROR, Status.RUNTIME_ERROR)


def test_a_stdin_program_cannot_return_a_value() -> None:
    assert result("N ready\nN value 1\n", function=False).status is Status.PROTOCOL_ERROR


def test_a_value_of_a_process_that_died_does_not_count() -> None:
    assert result("N ready\nN value 1\n", wait_status=signal.SIGSEGV).status is Status.PROTOCOL_ERROR


def test_errors_keep_their_details_as_far_as_they_are_sane() -> None:
    detail = {"type": "E" * 500, "message": "m" * 9000, "frames": [[3, "f"]] * 50}
    got = result(f"N ready\nN uncaught\nN detail {json.dumps(detail)}\n", wait_status=256)
    assert got.status is Status.RUNTIME_ERROR
    assert got.error is not None
    assert (len(got.error.type), len(got.error.message), len(got.error.frames)) == (200, 2000, 20)
    for broken in ("{", "[]", '{"type": 1}', '{"type": "E", "message": "", "frames": 5}', '{"frames": [[1]]}'):
        got = result(f"N ready\nN uncaught\nN detail {broken}\n")
        assert got.status is Status.RUNTIME_ERROR


def test_an_exception_counts_even_if_its_message_killed_the_process() -> None:
    assert result("N ready\nN uncaught\n", function=False).status is Status.RUNTIME_ERROR
    assert result("N ready\nN compile\n", function=False).status is Status.COMPILE_ERROR


def test_memory_errors_have_a_status_of_their_own() -> None:
    detail = json.dumps({"type": "MemoryError", "message": "", "frames": []})
    assert result(f"N ready\nN uncaught\nN detail {detail}\n").status is Status.MEMORY_LIMIT


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"wait_status": 0}, Status.OK),
        ({"wait_status": 3 << 8}, Status.NONZERO_EXIT),
        ({"wait_status": signal.SIGSEGV}, Status.RUNTIME_ERROR),
        ({"wait_status": signal.SIGXCPU}, Status.TIME_LIMIT),
        ({"killed": "wall", "wait_status": signal.SIGKILL}, Status.TIME_LIMIT),
        ({"cpu_s": 2.5}, Status.TIME_LIMIT),
        ({"stdout_bytes": 1001, "stdout": b"x" * 1000, "wait_status": 256}, Status.OUTPUT_LIMIT),
        ({"stdout_bytes": 1000, "stdout": b"x" * 1000}, Status.OK),
    ],
)
def test_the_ends_of_a_stdin_program(changes: dict[str, Any], status: Status) -> None:
    got = result(function=False, **changes)
    assert got.status is status
    assert got.truncated is (status is Status.OUTPUT_LIMIT)
    if "wait_status" in changes and os.WIFSIGNALED(changes["wait_status"]) and not changes.get("killed"):
        assert got.signal == changes["wait_status"]
        assert got.exit_code is None


def test_a_late_right_answer_is_late() -> None:
    assert result("N ready\nN value 1\n", cpu_s=2.01).status is Status.TIME_LIMIT


def test_a_process_that_never_began_is_our_fault() -> None:
    with pytest.raises(SandboxError, match="did not start"):
        result("", wait_status=256)
    assert result("", killed="wall", wait_status=9).status is Status.TIME_LIMIT


def test_stderr_keeps_head_and_tail() -> None:
    got = result(function=False, stderr=b"abcdefghijklmnopqrstuvwxyz", stderr_bytes=26)
    assert got.stderr == "abcdevwxyz"
    assert got.truncated


def test_invalid_utf8_is_replaced() -> None:
    assert result(function=False, stdout=b"a\xff", stdout_bytes=2).stdout == "a\ufffd"


def test_jobs_hold_no_surrogates_and_fit_their_program() -> None:
    job = make_job(Program("x = '\ud800'"), "\udfff", LIMITS)
    assert job["code"] == "x = '?'"
    assert job["stdin"] == "?"
    with pytest.raises(ConfigError, match="Call for a stdin program"):
        make_job(Program(""), Call([1]), LIMITS)
    with pytest.raises(ConfigError, match="text as the input of function"):
        make_job(Program("", fn_name="f"), "1", LIMITS)
    with pytest.raises(ConfigError, match="not JSON"):
        make_job(Program("", fn_name="f"), Call([{1, 2}]), LIMITS)


@pytest.mark.parametrize("bad", [{"cpu_s": float("nan")}, {"cpu_s": -1}, {"wall_s": float("inf")}, {"memory_mb": -5}])
def test_limits_are_finite(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Limits(**bad)
