"""A Sandbox Fusion server as a sandbox: over HTTP, one batched request a program.

Faults of the transport and of the server (refused, reset, timed out, 429, 5xx, status SandboxError, an answer without its
mark) are tried again with growing, random pauses; then they raise `SandboxError`. They are never a verdict. When several
requests in a row have failed for good, further ones fail at once until the server answers a ping again.
"""

from __future__ import annotations

import asyncio
import base64
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from sdpo.errors import ConfigError, SandboxError
from sdpo_sandbox.base import DEFAULT_LIMITS, Limits, Program, ProgramError, RunResult, Status, Test
from sdpo_sandbox.driver import RESULT_PATH, pack, unpack_result
from sdpo_sandbox.observe import clean, conclude, make_job
from sdpo_sandbox.workspace import check_paths

__all__ = ["FusionSandbox"]

Answer = TypeVar("Answer")

_FIRST_CHUNK, _CHUNK = 2, 16
_MARGIN_S, _CONNECT_S, _PING_S = 30.0, 10.0, 5.0
_FAILURES_TO_OPEN, _OPEN_S = 3, 30.0
_OUTPUT_CUT = 190_000  # from here on the real server may have cut the output of a plain request, or hung over it


class _Transient(Exception):
    """Worth another attempt."""


class FusionSandbox:
    """Client of a Sandbox Fusion server, or of `sdpo sandbox serve`.

    Args:
        url: base URL, such as "http://host:8080".
        concurrency: requests at a time.
        token: sent as a bearer token.
        attempts: how often a request is tried.
        pause_s: upper bound of the first pause between attempts; it doubles each time, up to 20 s.
        batched: send the driver; otherwise a plain request a test, for servers on which it cannot run. Plain requests take
            stdin programs only, their output is cut where the server cuts, and its wall clock judges.
        transport: for httpx; None means the network.

    Raises:
        ConfigError: not a URL, or another value that makes no sense.
    """

    def __init__(
        self,
        url: str,
        concurrency: int = 16,
        token: str = "",
        attempts: int = 5,
        pause_s: float = 0.5,
        batched: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"sandbox url {url!r}", hint="use http://host:port")
        if concurrency < 1 or attempts < 1:
            raise ConfigError(f"concurrency = {concurrency}, attempts = {attempts}", hint="use at least 1")
        self._url = url.rstrip("/")
        self._concurrency = concurrency
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._attempts = attempts
        self._pause_s = pause_s
        self._batched = batched
        self._transport = transport
        self._closed = False
        self._failures = 0
        self._open_until = 0.0
        # Connections belong to an event loop, and a trainer may use one after the other.
        self._sessions: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    async def run(
        self,
        code: str,
        stdin: str = "",
        limits: Limits = DEFAULT_LIMITS,
        files: Mapping[str, bytes] | None = None,
        language: str = "python",
        fetch: Sequence[str] = (),
    ) -> RunResult:
        """See `Sandbox.run`. Languages other than Python are plain requests."""
        program = Program(code, files=files or {}, fetch=tuple(fetch), language=language)
        async for result in self.run_many(program, [stdin], limits):
            return result
        raise AssertionError("one test, no result")

    async def run_many(
        self, program: Program, tests: Sequence[Test], limits: Limits = DEFAULT_LIMITS
    ) -> AsyncIterator[RunResult]:
        """See `Sandbox.run_many`. Tests go in chunks, a small one first: most wrong programs fail at once."""
        jobs = [make_job(program, test, limits) for test in tests]
        check_paths([*program.files, *program.fetch])
        done, size = 0, _FIRST_CHUNK
        while done < len(jobs):
            chunk = jobs[done : done + size]
            if program.language == "python" and self._batched:
                results = await self._batch(program, chunk, limits)
            else:
                results = [await self._plain(program, chunk[0]["stdin"], limits)]
            for result in results:
                yield result
            done += len(results)
            size = _CHUNK

    async def ping(self) -> bool:
        """Whether the server answers."""
        client, _ = self._session()
        try:
            return (await client.get("/v1/ping", timeout=_PING_S)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _batch(self, program: Program, jobs: Sequence[Mapping[str, Any]], limits: Limits) -> list[RunResult]:
        body, nonce = pack(program, jobs, limits)

        def read(response: dict[str, Any]) -> list[RunResult]:
            content = (response.get("files") or {}).get(RESULT_PATH)
            if content is None:
                told = response.get("run_result") or {}
                said = str(told.get("stderr") or told.get("status") or response)[-300:]
                raise _Transient(f"the driver gave no result: {said.strip()}")
            seen = unpack_result(content, nonce)[: len(jobs)]
            return [conclude(one, job, limits) for one, job in zip(seen, jobs, strict=False)]

        return await self._request(body, read)

    async def _plain(self, program: Program, stdin: str, limits: Limits) -> RunResult:
        if program.fn_name is not None:
            raise ConfigError(
                f"function {program.fn_name!r} in a plain request of language {program.language!r}",
                hint="functions need language python and batched = true",
            )
        body = {
            "code": clean(program.code),
            "language": program.language,
            "stdin": stdin,
            "run_timeout": limits.wall,
            "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
            "fetch_files": list(program.fetch),
        }
        return await self._request(body, _plain_result)

    async def _request(self, body: Mapping[str, Any], read: Callable[[dict[str, Any]], Answer]) -> Answer:
        client, gate = self._session()
        await self._check_open()
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=self._pause_s, max=20),
            retry=retry_if_exception_type(_Transient),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    async with gate:
                        answer = _readable(read, await self._post(client, body))
        except _Transient as exc:
            self._failures += 1
            if self._failures >= _FAILURES_TO_OPEN:
                self._open_until = time.monotonic() + _OPEN_S
            raise SandboxError(
                f"sandbox {self._url}: {exc} ({self._attempts} attempts)", hint="is the server up, and not overloaded?"
            ) from exc
        self._failures = 0
        return answer

    async def _check_open(self) -> None:
        if self._failures >= _FAILURES_TO_OPEN and time.monotonic() < self._open_until:
            if not await self.ping():
                raise SandboxError(f"sandbox {self._url} does not answer", hint="is the server up?")
            self._failures = 0

    async def _post(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> dict[str, Any]:
        timeout = httpx.Timeout(body["run_timeout"] + _MARGIN_S, connect=_CONNECT_S, pool=None)
        try:
            response = await client.post("/run_code", json=body, timeout=timeout)
        except httpx.TransportError as exc:
            raise _Transient(f"{type(exc).__name__} {exc}".strip()) from exc
        if response.status_code == 429 or response.status_code >= 500:
            raise _Transient(f"HTTP {response.status_code}")
        if response.status_code != 200:
            hint = "set token" if response.status_code in (401, 403) else "is this a Sandbox Fusion server?"
            raise SandboxError(
                f"sandbox {self._url} refuses the request: HTTP {response.status_code} {response.text[:200]}", hint=hint
            )
        try:
            data: dict[str, Any] = response.json()
            if data["status"] == "SandboxError":
                raise _Transient(f"SandboxError: {str(data['message'])[-300:]}")
        except (ValueError, KeyError, TypeError) as exc:
            raise _Transient(f"not an answer of Sandbox Fusion: {response.text[:200]}") from exc
        return data

    def _session(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        if self._closed:
            raise SandboxError("the sandbox is closed")
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            client = httpx.AsyncClient(
                base_url=self._url,
                headers=self._headers,
                transport=self._transport,
                limits=httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency),
            )
            self._sessions[loop] = client, asyncio.Semaphore(self._concurrency)
        return self._sessions[loop]

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        self._closed = True
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session[0].aclose()

    async def __aenter__(self) -> FusionSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _readable(read: Callable[[dict[str, Any]], Answer], response: dict[str, Any]) -> Answer:
    """An answer that cannot be read is the server's fault, and asked for again."""
    try:
        return read(response)
    except SandboxError as exc:
        raise _Transient(str(exc)) from exc


def _plain_result(response: dict[str, Any]) -> RunResult:
    """A plain request's answer, as far as the server tells: CPU time and memory it does not."""
    files = {name: base64.b64decode(content) for name, content in (response.get("files") or {}).items()}
    compiled, ran = response.get("compile_result"), response.get("run_result")
    if ran is None:
        if compiled is None:
            raise _Transient("an answer without results")
        said = str(compiled.get("stderr") or compiled.get("status"))
        return RunResult(Status.COMPILE_ERROR, stderr=said, error=ProgramError("CompileError", said[:2000]))
    code, stdout, stderr = ran["return_code"], str(ran["stdout"]), str(ran["stderr"])
    error = _python_error(stderr) if code == 1 else None
    if ran["status"] == "TimeLimitExceeded":
        status = Status.TIME_LIMIT
    elif error is not None:
        status = {"SyntaxError": Status.COMPILE_ERROR, "MemoryError": Status.MEMORY_LIMIT}.get(
            error.type, Status.RUNTIME_ERROR
        )
    elif code is None or code < 0:
        status = Status.RUNTIME_ERROR
    else:
        status = Status.OK if code == 0 else Status.NONZERO_EXIT
    return RunResult(
        status,
        stdout=stdout,
        stderr=stderr,
        exit_code=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        wall_s=float(ran["execution_time"]),
        truncated=bool(ran.get("truncated")) or len(stdout.encode("utf-8", "replace")) >= _OUTPUT_CUT,
        error=error,
        files=files,
    )


def _python_error(stderr: str) -> ProgramError | None:
    """The exception at the end of a Python traceback. A program can print such a text, to its own loss."""
    lines = stderr.splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    after = next((line for line in lines[frames[-1] + 1 :] if not line.startswith(" ")), "") if frames else ""
    name, _, message = after.partition(": ")
    return ProgramError(name.rpartition(".")[2], message[:2000]) if name.replace(".", "_").isidentifier() else None
