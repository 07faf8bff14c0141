"""The client of Sandbox Fusion: batched requests on a plain server, and faults of a server, which are never verdicts."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from sdpo.errors import ConfigError, SandboxError
from sdpo_sandbox import Call, Limits, Program, RunResult, Status
from sdpo_sandbox.client import FusionSandbox
from sdpo_sandbox.driver import DRIVER, RESULT_PATH

from .plain_server import PlainServer, plain_server, run_code

T = TypeVar("T")
QUICK = Limits(cpu_s=2, wall_s=4)


def go(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def client(server: PlainServer, **options: Any) -> FusionSandbox:
    return FusionSandbox(server.url, **{"pause_s": 0.01, **options})


async def all_of(sandbox: FusionSandbox, program: Program, tests: Any, limits: Limits = QUICK) -> list[RunResult]:
    async with sandbox:
        return [r async for r in sandbox.run_many(program, tests, limits)]


async def one(sandbox: FusionSandbox, code: str, stdin: str = "", **more: Any) -> RunResult:
    async with sandbox:
        return await sandbox.run(code, stdin, QUICK, **more)


def test_twenty_tests_are_three_requests() -> None:
    with plain_server() as server:
        results = go(all_of(client(server), Program("print(int(input()) + 1)"), [str(i) for i in range(20)]))
    assert [r.stdout for r in results] == [f"{i + 1}\n" for i in range(20)]
    assert all(r.status is Status.OK for r in results)
    assert len(server.requests) == 3
    assert all(r["code"] == DRIVER and r["language"] == "python" for r in server.requests)


def test_leaving_after_the_first_failure_sends_no_more() -> None:
    async def first(sandbox: FusionSandbox) -> RunResult:
        async with sandbox:
            async for result in sandbox.run_many(Program("1/0"), ["x"] * 50, QUICK):
                return result
        raise AssertionError

    with plain_server() as server:
        result = go(first(client(server)))
        assert result.status is Status.RUNTIME_ERROR
        assert len(server.requests) == 1


def test_functions_and_errors_come_through_whole() -> None:
    with plain_server() as server:
        program = Program("def f(a):\n    return (a, {a: [1.5, None]})", fn_name="f")
        assert go(all_of(client(server), program, [Call([1])]))[0].value == (1, {1: [1.5, None]})
        result = go(one(client(server), "print('x')\nraise ValueError('no')"))
    assert (result.status, result.stdout) == (Status.RUNTIME_ERROR, "x\n")
    assert result.error is not None
    assert (result.error.type, result.error.message, result.error.frames[0].line) == ("ValueError", "no", 2)
    assert 'File "main.py", line 2' in result.stderr


def test_output_is_not_cut_where_the_server_cuts() -> None:
    with plain_server() as server:
        result = go(one(client(server), "print('x' * 3000000)"))
    assert len(result.stdout) == 3_000_001
    assert not result.truncated


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import time\ntime.sleep(60)", Status.TIME_LIMIT),
        ("while True: pass", Status.TIME_LIMIT),
        ("b = bytearray(1 << 31)", Status.MEMORY_LIMIT),
        ("def f(:", Status.COMPILE_ERROR),
        ("import sys\nsys.exit(4)", Status.NONZERO_EXIT),
        ("import os\nos.kill(os.getpid(), 11)", Status.RUNTIME_ERROR),
        ("print('x' * (17 << 20))", Status.OUTPUT_LIMIT),
    ],
)
def test_each_test_has_its_own_limits(code: str, status: Status) -> None:
    with plain_server() as server:
        limits = Limits(cpu_s=1, wall_s=2, memory_mb=512)
        assert go(all_of(client(server), Program(code), [""], limits))[0].status is status


def test_a_hanging_test_does_not_cost_the_rest_of_its_chunk() -> None:
    program = Program("import time\nn = int(input())\nif n == 1: time.sleep(60)\nprint(n)")
    with plain_server() as server:
        begun = time.monotonic()
        results = go(all_of(client(server), program, ["0", "1", "2", "3"], Limits(cpu_s=0.5, wall_s=1)))
        assert time.monotonic() - begun < 10
    assert [r.status for r in results] == [Status.OK, Status.TIME_LIMIT, Status.OK, Status.OK]


def test_a_background_child_does_not_outlive_its_test() -> None:
    code = "import os, time\npid = os.fork()\nif pid == 0: time.sleep(60)\nprint(pid, flush=True)\nos._exit(0)"
    with plain_server() as server:
        begun = time.monotonic()
        child = int(go(one(client(server), code)).stdout)
        assert time.monotonic() - begun < 10
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _alive(child):
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as file:
            return "State:\tZ" not in file.read()
    except OSError:
        return False


def test_files_go_in_and_come_out_and_do_not_flow_between_tests() -> None:
    program = Program(
        "import os\nprint(open('in.txt').read(), os.path.exists('out.txt'))\nopen('out.txt', 'w').write(input())",
        files={"in.txt": b"hello"},
        fetch=("out.txt", "missing"),
    )
    with plain_server() as server:
        results = go(all_of(client(server), program, ["a", "b"]))
        with pytest.raises(ConfigError, match="outside the working directory"):
            go(all_of(client(server), Program("", files={"../x": b""}), [""]))
    assert [r.stdout for r in results] == ["hello False\n"] * 2
    assert [r.files for r in results] == [{"out.txt": b"a"}, {"out.txt": b"b"}]


def test_expected_outputs_have_no_place_in_the_request() -> None:
    with plain_server() as server:
        go(all_of(client(server), Program("print(input())"), ["input"]))
        job = json.loads(base64.b64decode(server.requests[0]["files"]["sdpo_sandbox/job.json"]))
    assert set(job) == {"nonce", "jobs", "limits", "files", "fetch", "most_bytes"}
    assert set(job["jobs"][0]) == {"code", "prelude", "fn", "call", "stdin", "nonce", "result_bytes"}


# -- faults ---------------------------------------------------------------------------------------------------------------


def test_overload_and_restarts_are_waited_out() -> None:
    faults = {1: 503, 2: 503, 3: 429, 4: "drop"}
    with plain_server(lambda n, _: faults.get(n)) as server:
        assert go(one(client(server), "print(1)")).stdout == "1\n"
        assert len(server.requests) == 5


def test_a_server_that_answers_every_third_request_is_enough() -> None:
    async def many(sandbox: FusionSandbox) -> list[RunResult]:
        async with sandbox:
            return await asyncio.gather(*(sandbox.run(f"print({i})", "", QUICK) for i in range(6)))

    with plain_server(lambda n, _: None if n % 3 == 0 else 502) as server:
        results = go(many(client(server, attempts=12, concurrency=2)))
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(6)]


@pytest.mark.parametrize(
    "fault",
    [
        500,
        504,
        "drop",
        {
            "status": "SandboxError",
            "message": "overlay failed",
            "compile_result": None,
            "run_result": None,
            "files": {},
        },
        {
            "status": "Success",
            "message": "",
            "run_result": {"status": "Finished", "return_code": 0, "stdout": ""},
            "files": {},
        },
        {"status": "Success", "files": {RESULT_PATH: "not base64!"}},
        {"status": "Success", "files": {RESULT_PATH: base64.b64encode(b'{"nonce": "old", "seen": [1]}').decode()}},
        {"status": "Success", "files": {RESULT_PATH: base64.b64encode(b"[]").decode()}},
        {"pong": 1},
        [],
        b"<html>proxy</html>",
    ],
)
def test_a_fault_that_stays_is_an_error_and_no_verdict(fault: Any) -> None:
    with plain_server(lambda n, _: fault) as server:
        with pytest.raises(SandboxError, match=server.url):
            go(one(client(server, attempts=3), "print(1)"))
        assert len(server.requests) == 3


def test_an_answer_without_output_is_asked_for_again() -> None:
    def lose(n: int, request: dict[str, Any]) -> Any:
        return {**run_code(request), "files": {}} if n == 1 else None

    with plain_server(lose) as server:
        assert go(one(client(server), "print(1)")).stdout == "1\n"
        assert len(server.requests) == 2


def test_a_server_that_is_not_there() -> None:
    begun = time.monotonic()
    with pytest.raises(SandboxError, match="ConnectError"):
        go(one(FusionSandbox("http://127.0.0.1:9", attempts=3, pause_s=0.01), "print(1)"))
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(("status", "says"), [(401, "token"), (404, "Sandbox Fusion"), (422, "HTTP 422"), (413, "413")])
def test_refusals_are_not_tried_again(status: int, says: str) -> None:
    with plain_server(lambda n, _: status) as server:
        with pytest.raises(SandboxError, match=says):
            go(one(client(server), "print(1)"))
        assert len(server.requests) == 1


def test_after_some_failures_the_circuit_opens_until_a_ping_is_answered() -> None:
    async def use(server: PlainServer) -> None:
        async with client(server, attempts=1) as sandbox:
            for _ in range(3):
                with pytest.raises(SandboxError, match="attempts"):
                    await sandbox.run("print(1)")
            assert server.pings == 0
            assert (await sandbox.run("print(1)", "", QUICK)).stdout == "1\n"
            assert server.pings == 1
            assert (await sandbox.run("print(1)", "", QUICK)).stdout == "1\n"
            assert server.pings == 1

    with plain_server(lambda n, _: 503 if n <= 3 else None) as server:
        go(use(server))

    async def dead() -> float:
        async with FusionSandbox("http://127.0.0.1:9", attempts=2, pause_s=0.01) as sandbox:
            for _ in range(3):
                with pytest.raises(SandboxError):
                    await sandbox.run("print(1)")
            begun = time.monotonic()
            with pytest.raises(SandboxError, match="does not answer"):
                await sandbox.run("print(1)")
            return time.monotonic() - begun

    assert go(dead()) < 2


def test_requests_at_a_time_are_bounded() -> None:
    now = peak = 0

    def count(n: int, request: dict[str, Any]) -> Any:
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        time.sleep(0.1)
        now -= 1
        return run_code(request)

    async def many(sandbox: FusionSandbox) -> None:
        async with sandbox:
            await asyncio.gather(*(sandbox.run("print(1)", "", QUICK) for _ in range(8)))

    with plain_server(count) as server:
        go(many(client(server, concurrency=3)))
    assert 1 < peak <= 3


def test_one_client_serves_one_loop_after_the_other() -> None:
    with plain_server() as server:
        sandbox = client(server)
        for i in range(3):
            assert go(sandbox.run(f"print({i})", "", QUICK)).stdout == f"{i}\n"
        go(sandbox.close())
        with pytest.raises(SandboxError, match="closed"):
            go(sandbox.run("print(1)"))


def test_the_token_is_sent() -> None:
    with plain_server() as server:
        go(one(client(server, token="secret"), "print(1)"))
        assert server.requests[0]["_authorization"] == "Bearer secret"
        go(one(client(server), "print(1)"))
        assert server.requests[1]["_authorization"] is None


def test_plain_requests() -> None:
    with plain_server() as server:
        sandbox = client(server, batched=False)
        results = go(all_of(sandbox, Program("print(int(input()) + 1)"), ["1", "2"]))
        assert [r.stdout for r in results] == ["2\n", "3\n"]
        assert server.requests[0]["code"] == "print(int(input()) + 1)"
        big = go(one(client(server, batched=False), "print('x' * 400000)"))
        assert big.truncated
        with pytest.raises(ConfigError, match="functions need"):
            go(all_of(client(server, batched=False), Program("", fn_name="f"), [Call()]))


def test_other_languages_are_plain_requests() -> None:
    def bash(n: int, request: dict[str, Any]) -> Any:
        assert request["language"] == "bash"
        return {
            "status": "Failed",
            "run_result": {"status": "Finished", "execution_time": 0.1, "return_code": 2, "stdout": "a", "stderr": "b"},
            "files": {},
        }

    with plain_server(bash) as server:
        result = go(one(client(server), "exit 2", language="bash"))
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (Status.NONZERO_EXIT, 2, "a", "b")


@pytest.mark.parametrize("options", [{"url": "host:8080"}, {"concurrency": 0}, {"attempts": 0}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FusionSandbox(**{"url": "http://x", **options})
