"""The HTTP server: what it refuses, what it survives, and how it stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from sdpo_sandbox import Call, Limits, Program, Status
from sdpo_sandbox.client import FusionSandbox
from sdpo_sandbox.local import LocalSandbox
from sdpo_sandbox.transport import LocalTransport

pytest.importorskip("starlette")
from sdpo_sandbox.server import create_app

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]


def go(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def post(sandbox: LocalSandbox, *bodies: Any, headers: Any = None, **options: Any) -> list[httpx.Response]:
    """Requests at once."""
    transport = httpx.ASGITransport(create_app(sandbox, **options))
    async with httpx.AsyncClient(transport=transport, base_url="http://sandbox", timeout=60) as client:
        return await asyncio.gather(
            *(
                client.post("/run_code", headers=headers, **({"content": b} if isinstance(b, bytes) else {"json": b}))
                for b in bodies
            )
        )


def body(code: str, **more: Any) -> dict[str, Any]:
    return {"code": code, "language": "python", **more}


def test_the_token(sandbox: LocalSandbox) -> None:
    for headers, status in (
        (None, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "secret"}, 401),
        ({"Authorization": "Bearer secret"}, 200),
    ):
        (answer,) = go(post(sandbox, body("print(1)"), headers=headers, token="secret"))
        assert answer.status_code == status


def test_a_body_that_is_too_large(sandbox: LocalSandbox) -> None:
    small, large = go(post(sandbox, body("print(1)"), body("#" * 2000), max_body_bytes=1000))
    assert (small.status_code, large.status_code) == (200, 413)

    async def chunked() -> int:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 100

        transport = httpx.ASGITransport(create_app(sandbox, max_body_bytes=1000))
        async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as client:
            return (await client.post("/run_code", content=parts())).status_code

    assert go(chunked()) == 413


def test_a_full_queue(sandbox: LocalSandbox) -> None:
    answers = go(post(sandbox, *[body("import time\ntime.sleep(0.3)")] * 6, queue=4))
    statuses = sorted(a.status_code for a in answers)
    assert statuses == [200] * 4 + [429] * 2
    assert all(a.headers["Retry-After"] == "1" for a in answers if a.status_code == 429)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"code": 1, "language": "python"}',
        b'{"code": "1", "language": "python", "run_timeout": "soon"}',
        b'{"code": "1", "language": "python", "files": {"a": 5}}',
        b'{"code": "1", "language": "python", "run_timeout": Infinity, "stdin": 7}',
    ],
)
def test_nonsense_is_answered_422(sandbox: LocalSandbox, raw: bytes) -> None:
    (answer,) = go(post(sandbox, raw))
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"][0] == "body"


@pytest.mark.parametrize(
    "request_",
    [
        body("print(1)", run_timeout=1e400),
        json.dumps(body("print(1)")).replace("print(1)", "print('\\\\ud800')").encode(),
        b'{"code": "print(\\"\\ud800\\")", "language": "python", "stdin": "\\udfff"}',
        body("1", files={"../x": "eA=="}),
        body("1", files={"a/../../x": "eA=="}),
        body("1", files={"a": "not base64"}),
        body("1", fetch_files=["x"] * 100 + ["a\0b"]),
        body("1", files={"sdpo_sandbox/job.json": "eA=="}),
    ],
)
def test_hostile_requests_never_break_it(sandbox: LocalSandbox, request_: Any) -> None:
    raw = request_ if isinstance(request_, bytes) else json.dumps(request_).encode()
    (answer,) = go(post(sandbox, raw))
    assert answer.status_code in (200, 422)
    (after,) = go(post(sandbox, body("print('alive')")))
    assert after.json()["run_result"]["stdout"] == "alive\n"


def test_limits_are_capped(sandbox: LocalSandbox) -> None:
    caps = Limits(cpu_s=0.3, wall_s=0.5, memory_mb=64, output_bytes=1000)
    begun = time.monotonic()
    spin, eat, talk = go(
        post(
            sandbox,
            body("import time\ntime.sleep(60)", run_timeout=1000),
            body("b = bytearray(256 << 20)", memory_limit_MB=100_000),
            body("print('x' * 5000)"),
            caps=caps,
        )
    )
    assert time.monotonic() - begun < 20
    assert spin.json()["run_result"]["status"] == "TimeLimitExceeded"
    assert "MemoryError" in eat.json()["run_result"]["stderr"]
    assert talk.json()["run_result"]["truncated"] is True
    assert len(talk.json()["run_result"]["stdout"]) == 1000


def test_the_client_works_through_the_transport(sandbox: LocalSandbox) -> None:
    async def use() -> None:
        async with FusionSandbox("http://local", transport=LocalTransport(sandbox)) as client:
            assert await client.ping()
            program = Program("def f(a): return (a, {a})", fn_name="f")
            results = [r async for r in client.run_many(program, [Call([i]) for i in range(5)])]
            assert [r.value for r in results] == [(i, {i}) for i in range(5)]
            assert all(0 < r.cpu_s < 1 for r in results)
            forked = await client.run("import os\nos.fork()")
            assert forked.error is not None
            assert forked.error.type == "PermissionError"

    go(use())


def test_a_driver_of_another_version_is_told_so(sandbox: LocalSandbox) -> None:
    from sdpo_sandbox import driver

    packed, _ = driver.pack(Program(""), [], Limits())
    packed["files"]["sdpo_sandbox/inside/values.py"] = "eA=="
    (answer,) = go(post(sandbox, packed))
    assert answer.json()["status"] == "SandboxError"
    assert "another version" in answer.json()["message"]


@pytest.fixture
def served() -> Any:
    """A real server process."""
    pytest.importorskip("uvicorn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "sandbox")]),
        "SDPO_SANDBOX_TOKEN": "secret",
    }
    command = [
        sys.executable,
        "-c",
        "from sdpo_sandbox.cli import app; app()",
        "serve",
        "--port",
        str(port),
        "--slots",
        "1",
    ]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                assert httpx.get(f"{url}/v1/ping", timeout=2).json() == "pong"
                break
            except httpx.TransportError:
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.wait()


def test_it_serves_and_stops_gracefully(served: Any) -> None:
    url, process = served

    async def use() -> None:
        async with FusionSandbox(url, token="secret") as client:
            assert (await client.run("print(input())", "over http")).stdout == "over http\n"
            results = [r async for r in client.run_many(Program("print(int(input()) ** 2)"), ["2", "3", "4"])]
            assert [r.stdout for r in results] == ["4\n", "9\n", "16\n"]
            last = asyncio.create_task(client.run("import time\ntime.sleep(1)\nprint('finished')"))
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            result = await last
            assert (result.status, result.stdout) == (Status.OK, "finished\n")

    asyncio.run(use())
    assert process.wait(timeout=20) in (0, -signal.SIGTERM)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/v1/ping")
