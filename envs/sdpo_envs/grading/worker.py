"""Grading in child processes that can be killed.

Symbolic algebra on text that a policy wrote can take for ever, take all memory, or crash the interpreter, and libraries
that guard themselves with signals work in the main thread only. So such graders run here: a few child processes, JSON
lines in both directions, a wall-clock limit for each call, SIGKILL past it, a fresh process for the next call. A child
gets no environment variables of the host, may not start processes, open sockets or write files, and has bounded memory.

This is a guard against accidents and against the known ways of libraries that `eval`. It is not a sandbox: the audit
hook is in the same interpreter. Programs that a policy writes belong into `sdpo_sandbox`.

    workers = Workers("sdpo_envs.grading.equivalence:answer", timeout=5.0)
    workers.call(gold="1/2", given="0.5")
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from sdpo.errors import GradingError

__all__ = ["WorkerFailure", "Workers"]

_START_S = 120.0
_FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill", "os.remove", "os.rename",
    "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.putenv", "subprocess.",
    "socket.", "shutil.", "ctypes.", "pty.", "urllib.", "ftplib.", "http.", "sys.addaudithook",
)  # fmt: skip


class WorkerFailure(Exception):
    """A call gave no value.

    Attributes:
        kind: "timeout", "died" (crash or out of memory), or "raised" (the function raised; the message says what).
    """

    def __init__(self, kind: Literal["timeout", "died", "raised"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Workers:
    """A pool of child processes that run one function; safe to call from any thread.

    Args:
        function: "package.module:function"; takes and returns JSON values by keyword.
        timeout: seconds of wall-clock time for one call.
        size: at most so many children, which start when first needed; None takes half the cores, at most 8.
        memory_mb: address space of a child.
    """

    def __init__(self, function: str, *, timeout: float, size: int | None = None, memory_mb: int = 2048) -> None:
        self.function = function
        self.timeout = timeout
        self.size = size or max(2, min(8, (os.cpu_count() or 2) // 2))
        self.memory_mb = memory_mb
        self._open()

    def _open(self) -> None:
        self._idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(self.size):
            self._idle.put(None)

    def call(self, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Run the function in a child.

        Raises:
            WorkerFailure: no value; the child is replaced where needed.
            GradingError: no child could be started.
        """
        child = self._idle.get()
        try:
            if child is None:
                child = _Child(self.function, self.memory_mb)
            return child.ask(arguments, timeout or self.timeout)
        except WorkerFailure as failure:
            if failure.kind != "raised" and child is not None:
                child.kill()
                child = None
            raise
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """End the children, each after its call; a later call starts new ones."""
        for child in [self._idle.get() for _ in range(self.size)]:
            if child is not None:
                child.kill()
            self._idle.put(None)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_idle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class _Child:
    """One process and its two pipes."""

    def __init__(self, function: str, memory_mb: int) -> None:
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "PYTHONHASHSEED": "0",  # iteration over sets of text is then the same in every run
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        command = [sys.executable, "-B", "-m", "sdpo_envs.grading.worker", function, str(memory_mb)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as exc:
            raise GradingError(f"could not start a grading process: {exc}") from exc
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        try:
            started = json.loads(self._line(_START_S))
        except (WorkerFailure, ValueError) as exc:
            self.kill()
            raise GradingError(f"the grading process for {function} did not start: {exc}") from exc
        if "error" in started:
            self.kill()
            raise GradingError(f"the grading process for {function} did not start: {started['error']}")

    def ask(self, arguments: dict[str, Any], timeout: float) -> Any:
        try:
            self._in.write(json.dumps(arguments).encode() + b"\n")
            self._in.flush()
        except OSError as exc:
            raise WorkerFailure("died", "the grading process ended between two calls") from exc
        try:
            answer = json.loads(self._line(timeout))
        except ValueError as exc:
            raise WorkerFailure("died", "the grading process did not answer in JSON") from exc
        if "error" in answer:
            raise WorkerFailure("raised", str(answer["error"]))
        return answer["value"]

    def _line(self, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        read = bytearray()
        while not read.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._out], [], [], left)[0]:
                raise WorkerFailure("timeout", f"no result within {timeout:g} s")
            piece = os.read(self._out.fileno(), 1 << 16)
            if not piece:
                raise WorkerFailure("died", "the grading process crashed or ran out of memory")
            read += piece
        return bytes(read)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._in.close()
        self._out.close()


def _forbid(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_FORBIDDEN):
        raise PermissionError(f"{event} is not allowed in a grading process")
    if event == "open":
        _, mode, flags = (*arguments, None, None)[:3]
        writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
        if writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            raise PermissionError("a grading process may not write files")


def _serve(name: str, memory_mb: int) -> None:
    """The child: answer requests from standard input until it closes."""
    import resource

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    requests = sys.stdin.buffer

    def reply(record: dict[str, Any]) -> None:
        answers.write(json.dumps(record).encode() + b"\n")
        answers.flush()

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        module, _, attribute = name.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except Exception as exc:  # reported to the parent, which raises
        reply({"error": f"{type(exc).__name__}: {exc}"})
        return
    sys.addaudithook(_forbid)
    reply({"value": "ready"})
    for line in requests:
        try:
            record = {"value": function(**json.loads(line))}
            json.dumps(record)
        except MemoryError:
            os._exit(1)  # half an interpreter is no grader; the parent sees "died"
        except Exception as exc:  # reported to the parent, which raises
            record = {"error": f"{type(exc).__name__}: {exc}"[:500]}
        reply(record)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
