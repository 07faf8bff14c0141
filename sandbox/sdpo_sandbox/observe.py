"""From what was observed of a process to a `RunResult`: the rules, in one place for all sandboxes.

Everything here treats the program's output and its result lines as hostile text.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sdpo.errors import ConfigError, SandboxError
from sdpo_sandbox.base import MIB, Call, Frame, Limits, Program, ProgramError, RunResult, Status, Test
from sdpo_sandbox.inside.values import decode

__all__ = ["Observation", "conclude", "make_job", "result_cap"]

_SLACK = 64 << 10  # of the result channel: nonce, error details


@dataclass(frozen=True, slots=True)
class Observation:
    """One process, seen from outside.

    Attributes:
        wait_status: as of wait(2).
        killed: "cpu" or "wall" when it was killed for a limit, else "".
        stdout, stderr, lines: what was read of the three files, capped.
        stdout_bytes, stderr_bytes: their full sizes.
    """

    wait_status: int
    killed: str
    cpu_s: float
    wall_s: float
    peak_bytes: int
    stdout: bytes
    stdout_bytes: int
    stderr: bytes
    stderr_bytes: int
    lines: bytes
    files: Mapping[str, bytes] = field(default_factory=dict)


def clean(text: str) -> str:
    """Without lone surrogates, which no UTF-8 file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def make_job(program: Program, test: Test, limits: Limits) -> dict[str, Any]:
    """What the process is told, `stdin` included.

    Raises:
        ConfigError: a test of the wrong kind for the program, or arguments that are not JSON.
    """
    call, stdin = None, ""
    if isinstance(test, Call):
        if program.fn_name is None:
            raise ConfigError("a Call for a stdin program", hint="set Program.fn_name or give the input as text")
        try:
            call = json.dumps({"args": list(test.args), "kwargs": dict(test.kwargs)})
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"arguments of {program.fn_name!r} are not JSON: {exc}") from exc
    elif program.fn_name is not None:
        raise ConfigError(f"text as the input of function {program.fn_name!r}", hint="give the arguments as a Call")
    else:
        stdin = clean(test)
    return {
        "code": clean(program.code),
        "prelude": program.prelude,
        "fn": program.fn_name,
        "call": call,
        "stdin": stdin,
        "nonce": secrets.token_hex(8),
        "result_bytes": limits.result_bytes,
    }


def result_cap(limits: Limits) -> int:
    """How much of the result channel is read."""
    return limits.result_bytes + _SLACK


def conclude(seen: Observation, job: Mapping[str, Any], limits: Limits) -> RunResult:
    """The result of a run.

    Raises:
        SandboxError: the process ended before the program began.
    """
    words = _words(seen.lines, job["nonce"])
    if words is not None and not words and not seen.killed:
        said = seen.stderr[:300].decode("utf-8", "replace").strip() or "no message"
        raise SandboxError(f"the program's process did not start (wait status {seen.wait_status}): {said}")
    died_by = os.WTERMSIG(seen.wait_status) if os.WIFSIGNALED(seen.wait_status) else None
    exit_code = os.WEXITSTATUS(seen.wait_status) if died_by is None else None
    status, value, error = _verdict(seen, words, limits, job["fn"] is not None, exit_code, died_by)
    stderr = _head_and_tail(seen.stderr, limits.stderr_bytes)
    return RunResult(
        status=status,
        stdout=seen.stdout[: limits.output_bytes].decode("utf-8", "replace"),
        stderr=stderr.decode("utf-8", "replace"),
        exit_code=None if seen.killed else exit_code,
        signal=None if seen.killed else died_by,
        cpu_s=seen.cpu_s,
        wall_s=seen.wall_s,
        peak_memory_mb=seen.peak_bytes / MIB,
        truncated=seen.stdout_bytes > limits.output_bytes or seen.stderr_bytes > len(stderr),
        value=value[0] if value else None,
        has_value=bool(value),
        error=error,
        files=seen.files,
    )


def _verdict(
    seen: Observation,
    words: list[tuple[str, str]] | None,
    limits: Limits,
    function: bool,
    exit_code: int | None,
    died_by: int | None,
) -> tuple[Status, tuple[Any] | None, ProgramError | None]:
    if seen.stdout_bytes > limits.output_bytes:
        return Status.OUTPUT_LIMIT, None, None
    if seen.killed or seen.cpu_s > limits.cpu_s or died_by == signal.SIGXCPU:
        return Status.TIME_LIMIT, None, None
    if words is None:
        return Status.PROTOCOL_ERROR, None, None
    kinds = [kind for kind, _ in words[1:]]
    if kinds == ["value"] and function and died_by is None:
        try:
            return Status.OK, (decode(words[1][1]),), None
        except ValueError:
            return Status.PROTOCOL_ERROR, None, None
    if kinds == ["large"] and function:
        return Status.OUTPUT_LIMIT, None, None
    if kinds in (["compile"], ["compile", "detail"], ["uncaught"], ["uncaught", "detail"]):
        error = _error(words[2][1]) if len(kinds) == 2 else None
        if kinds[0] == "compile":
            return Status.COMPILE_ERROR, None, error
        lacks_memory = error is not None and error.type == "MemoryError"
        return Status.MEMORY_LIMIT if lacks_memory else Status.RUNTIME_ERROR, None, error
    if kinds:
        return Status.PROTOCOL_ERROR, None, None
    if died_by is not None:
        return Status.RUNTIME_ERROR, None, ProgramError("Signal", _signal_name(died_by))
    if function:
        return Status.RUNTIME_ERROR, None, ProgramError("SystemExit", "the process ended before the function returned")
    return (Status.OK if exit_code == 0 else Status.NONZERO_EXIT), None, None


def _signal_name(number: int) -> str:
    try:
        return f"died by {signal.Signals(number).name}"
    except ValueError:
        return f"died by signal {number}"


def _words(lines: bytes, nonce: str) -> list[tuple[str, str]] | None:
    """(kind, rest) of each line, "ready" first; empty when the process never got so far, None when the program wrote."""
    if not lines:
        return []
    text = lines.decode("ascii", "replace")
    if not text.endswith("\n"):
        return None
    words = []
    for line in text[:-1].split("\n"):
        mark, _, rest = line.partition(" ")
        kind, _, content = rest.partition(" ")
        if mark != nonce:
            return None
        words.append((kind, content))
    return words if words[0][0] == "ready" else None


def _error(text: str) -> ProgramError:
    """The details of an exception, as far as they are what they should be."""
    try:
        told = json.loads(text)
        frames = tuple(Frame(int(line), str(name)[:200]) for line, name in told["frames"][:20])
        return ProgramError(str(told["type"])[:200], str(told["message"])[:2000], frames)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return ProgramError("Exception", "")


def _head_and_tail(data: bytes, most: int) -> bytes:
    if len(data) <= most:
        return data
    return data[: math.ceil(most / 2)] + data[len(data) - most // 2 :]
