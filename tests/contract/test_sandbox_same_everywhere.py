"""One program, one result, whatever sandbox runs it: local, local behind the client, and a plain Sandbox Fusion server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from sdpo_sandbox import COMPETITION_PRELUDE, Call, Limits, Program, RunResult
from sdpo_sandbox.base import Sandbox
from sdpo_sandbox.client import FusionSandbox
from sdpo_sandbox.local import LocalSandbox
from sdpo_sandbox.transport import LocalTransport

from ..unit.sandbox.plain_server import plain_server

LIMITS = Limits(cpu_s=1, wall_s=1.5, memory_mb=512, output_bytes=100_000, stderr_bytes=4000)


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[dict[str, Sandbox]]:
    with ExitStack() as stack:
        local = LocalSandbox(slots=2)
        stack.callback(lambda: asyncio.run(local.close()))
        server = stack.enter_context(plain_server())
        yield {
            "local": local,
            "transport": FusionSandbox("http://local", transport=LocalTransport(local)),
            "fusion": FusionSandbox(server.url, pause_s=0.01),
        }


PROGRAMS: dict[str, tuple[Program, list[Any]]] = {
    "sum": (Program("print(sum(map(int, input().split())))"), ["1 2", "3 4", "x"]),
    "unicode": (Program("print(input()[::-1])"), ["héllo ∑", "😀a"]),
    "crlf": (Program("import sys\nprint(repr(sys.stdin.read()))"), ["a\r\nb\r", "\n"]),
    "exit code": (Program("import sys\nsys.exit(int(input()))"), ["0", "1", "255", "256"]),
    "exit text": (Program("import sys\nsys.exit('bye')"), [""]),
    "syntax error": (Program("x = (1,\n"), [""]),
    "nul": (Program("x = '\0'"), [""]),
    "deep error": (Program("def f(n): return f(n + 1)\nf(0)"), [""]),
    "chained error": (Program("try:\n    1/0\nexcept ZeroDivisionError:\n    raise KeyError('k')"), [""]),
    "stderr": (Program("import sys\nprint('warn', file=sys.stderr)"), [""]),
    "much stderr": (Program("import sys\nsys.stderr.write('a' * 5000 + 'b' * 5000)"), [""]),
    "no stdin": (Program("print(input())"), [""]),
    "too much output": (Program("print('x' * 200000)"), [""]),
    "memory": (Program("b = bytearray(1 << 30)"), [""]),
    "cpu": (Program("while True: pass"), [""]),
    "wall": (Program("import time\nprint(1, flush=True)\ntime.sleep(60)"), [""]),
    "signal": (Program("import os\nos.kill(os.getpid(), 11)"), [""]),
    "prelude": (Program("print(gcd(12, 18), Counter('aab')['a'])", prelude=COMPETITION_PRELUDE), [""]),
    "function": (
        Program("def f(a, b=2): return (a, {b: {a}})", fn_name="f"),
        [Call([1]), Call([1, 3]), Call((), {"a": 5})],
    ),
    "floats": (Program("def f(): return [0.1 + 0.2, float('inf'), -0.0, 1e300]", fn_name="f"), [Call()]),
    "big integer": (Program("def f(): return -7**9000", fn_name="f"), [Call()]),
    "method": (
        Program("class Solution:\n    def f(self, x): return x[::-1]", fn_name="f"),
        [Call(["ab"]), Call([[1, 2]])],
    ),
    "no function": (Program("def g(): pass", fn_name="f"), [Call()]),
    "bad value": (Program("def f(): return object()", fn_name="f"), [Call()]),
    "large value": (Program("def f(): return 'x' * (8 << 20)", fn_name="f"), [Call()]),
    "exit in function": (Program("import sys\ndef f(): sys.exit(0)", fn_name="f"), [Call()]),
    "leaves early": (Program("import os\ndef f(): os._exit(0)", fn_name="f"), [Call()]),
    "surrogate": (Program("print(len(input()))"), ["\ud800"]),
    "no tests": (Program("print(1)"), []),
    "files": (
        Program("print(open('a').read())\nopen('b', 'w').write('out')", files={"a": b"in"}, fetch=("b",)),
        ["", ""],
    ),
}


def told(result: RunResult) -> dict[str, Any]:
    """What depends neither on the clock nor on how deep the stack is below the program."""
    fields = ("status", "stdout", "stderr", "exit_code", "signal", "truncated", "value", "has_value", "error", "files")
    facts = {name: getattr(result, name) for name in fields}
    return {**facts, "stderr": re.sub(r"\[\d+ more frames\]", "[more frames]", result.stderr)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_result_everywhere(name: str, sandboxes: dict[str, Sandbox]) -> None:
    program, tests = PROGRAMS[name]

    async def results(sandbox: Sandbox) -> list[dict[str, Any]]:
        return [told(r) async for r in sandbox.run_many(program, tests, LIMITS)]

    found = {kind: asyncio.run(results(sandbox)) for kind, sandbox in sandboxes.items()}
    assert len(found["local"]) == len(tests)
    assert found["transport"] == found["local"]
    assert found["fusion"] == found["local"]


def test_all_of_them_are_sandboxes(sandboxes: dict[str, Sandbox]) -> None:
    assert all(isinstance(sandbox, Sandbox) for sandbox in sandboxes.values())
