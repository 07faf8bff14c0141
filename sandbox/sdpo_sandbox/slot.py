"""One slot of the local sandbox: a fork server and what the trusted side does for a run. Blocking; the pool has a thread
for each slot.

The descriptors of a run are memory files: no pipe can fill up, nobody has to read while the program runs, and what is
read is read after its death. The process is watched through its pidfd and its CPU clock, so that time is judged to the
hundredth of a second and a killed process is certainly the right one.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdpo.errors import SandboxError
from sdpo_sandbox.base import Limits
from sdpo_sandbox.inside.zygote import ANSWER
from sdpo_sandbox.levels import Level
from sdpo_sandbox.observe import Observation, result_cap
from sdpo_sandbox.process import Process, oom_kills
from sdpo_sandbox.server_process import ENVIRONMENT, command, drop_to
from sdpo_sandbox.workspace import Workspace

__all__ = ["Cancelled", "Lost", "Slot"]

_START_S, _ANSWER_S = 60.0, 30.0
_CLOCK_STEP_S = 0.01
_MOST_OWED = 9


class Lost(Exception):
    """The fork server died or does not answer: nothing is known about the run."""


class Cancelled(Exception):
    """The run was cancelled and its process killed."""


class Slot:
    """A fork server. Not thread-safe.

    Args:
        level: what it enforces.
        options: of `sdpo_sandbox.inside.zygote.main`: imports, site, preludes.
        python: the interpreter.
    """

    def __init__(self, level: Level, options: Mapping[str, Any], python: str) -> None:
        self._level = level
        self._options = options
        self._python = python
        self._server: subprocess.Popen[bytes] | None = None
        self._workspace: Workspace | None = None
        self._control: socket.socket | None = None
        self._log = -1
        self._greeted = False
        self._oom_kills = 0

    def start(self) -> None:
        """Start the fork server without waiting for it.

        Raises:
            SandboxError: it cannot be started.
        """
        self.close()
        owner = drop_to(self._level)
        if self._level is not Level.NO_OPEN:
            self._workspace = Workspace(owner)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = os.memfd_create("sandbox-log")
        place = self._workspace.path if self._workspace else ""
        try:
            self._server = subprocess.Popen(
                command(self._level, self._python, theirs.fileno(), self._options, place),
                env=ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                user=owner,
                group=owner,
                extra_groups=None if owner is None else [],
            )
        except OSError as exc:
            self.close()
            raise SandboxError(f"the fork server could not be started: {exc}") from exc
        finally:
            theirs.close()
        self._greeted = False
        self._oom_kills = oom_kills()

    def greet(self) -> None:
        """Wait until the fork server is ready.

        Raises:
            SandboxError: it failed to start; says why.
        """
        if self._greeted:
            return
        if self._server is None:
            self.start()
        assert self._control is not None
        self._control.settimeout(_START_S)
        try:
            ready = bool(self._control.recv(1 << 12))
        except OSError:
            ready = False
        if not ready:
            said = self._last_words()
            self.close()
            raise SandboxError(f"the fork server ({self._level}) did not start: {said}")
        self._greeted = True

    def _last_words(self) -> str:
        said = _read_ends(self._log, 1 << 16).decode("utf-8", "replace").strip().splitlines()
        return said[-1][:300] if said else "it ended without a message"

    def close(self) -> None:
        """End the fork server, and with it what it runs. Idempotent."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
        if self._workspace is not None:
            self._workspace.close()
            self._workspace = None
        self._greeted = False

    def run(
        self, job: Mapping[str, Any], limits: Limits, files: Mapping[str, bytes], fetch: Sequence[str], cancel: int
    ) -> Observation:
        """Run a job in a fresh process.

        Args:
            job: as `observe.make_job` makes it.
            cancel: a descriptor that becomes readable when the run is to be given up.

        Raises:
            Lost: the fork server is gone; start it again.
            Cancelled: given up.
            SandboxError: this level has no working directory, and the program has files.
            ConfigError: a file outside the working directory.
        """
        self.greet()
        if not files and not fetch:
            return self._run(job, limits, cancel, "")
        if self._workspace is None:
            raise SandboxError(f"no files in the working directory at isolation level {str(self._level)!r}")
        try:
            seen = self._run(job, limits, cancel, self._workspace.fill(files, fetch))
            return replace(seen, files=self._workspace.collect(fetch, limits.output_bytes))
        finally:
            self._workspace.clear()

    def _run(self, job: Mapping[str, Any], limits: Limits, cancel: int, room: str) -> Observation:
        assert self._control is not None
        request = {
            "cpu": math.ceil(limits.cpu_s) + 1,
            "memory": limits.memory_mb << 20,
            "fsize": max(limits.output_bytes + 1, result_cap(limits)),
            "cwd": room,
        }
        told = {k: v for k, v in job.items() if k != "stdin"}
        with contextlib.ExitStack() as stack:

            def memory_file(name: str, content: bytes | None = None) -> int:
                fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                stack.callback(os.close, fd)
                if content is not None:
                    _fill(fd, content)
                return fd

            files = [
                memory_file("job", marshal.dumps(told, 2)),
                memory_file("stdin", job["stdin"].encode()),
                memory_file("stdout"),
                memory_file("stderr"),
                memory_file("result"),
            ]
            self._control.settimeout(_ANSWER_S)
            try:
                socket.send_fds(self._control, [marshal.dumps(request, 2)], files)
                started, descriptors, _, _ = socket.recv_fds(self._control, 1 << 12, 1)
            except OSError as exc:
                raise Lost(str(exc)) from exc
            if not started or not descriptors:
                raise Lost(self._last_words())
            stack.callback(os.close, descriptors[0])
            begun = time.monotonic()
            killed, (status, cpu, peak) = self._watch(Process(descriptors[0]), limits, cancel, begun)
            wall = time.monotonic() - begun
            self._blame_ourselves(status, killed)
            _, _, out, err, lines = files
            seen = Observation(
                wait_status=status,
                killed=killed,
                cpu_s=cpu,
                wall_s=wall,
                peak_bytes=peak,
                stdout=_read(out, limits.output_bytes),
                stdout_bytes=os.fstat(out).st_size,
                stderr=_read_ends(err, limits.stderr_bytes),
                stderr_bytes=os.fstat(err).st_size,
                lines=_read(lines, result_cap(limits)),
            )
            if not seen.lines and not killed:
                raise Lost(f"the process did not start: {seen.stderr[:300].decode('utf-8', 'replace').strip()}")
            return seen

    def _watch(self, process: Process, limits: Limits, cancel: int, begun: float) -> tuple[str, tuple[int, float, int]]:
        """Wait for the end, and bring it about at the limits: ("cpu" | "wall" | "", the fork server's answer). Time in which
        the process waited for a core does not count as wall time, up to nine times the limit: on a crowded machine a
        program that computes is not one that sleeps."""
        assert self._control is not None
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(cancel, select.POLLIN)
        deadline, look = begun + limits.wall, begun + limits.cpu_s
        while True:
            now, killed = time.monotonic(), ""
            if now >= deadline:
                deadline = begun + limits.wall + min(process.starved_seconds(), _MOST_OWED * limits.wall)
                killed = "wall" if now >= deadline else ""
            if now >= look:
                left = limits.cpu_s - process.cpu_seconds()
                killed = killed or ("cpu" if left <= 0 else "")
                look = now + max(left, _CLOCK_STEP_S)
            if killed:
                return killed if process.kill() else "", self._answer()
            events = dict(poll.poll(max(_CLOCK_STEP_S, min(deadline, look) - now) * 1000))
            if self._control.fileno() in events:
                return "", self._answer()
            if events:
                process.kill()
                self._answer()
                raise Cancelled

    def _answer(self) -> tuple[int, float, int]:
        assert self._control is not None
        try:
            message = self._control.recv(1 << 12)
        except OSError as exc:
            raise Lost(str(exc)) from exc
        if not message:
            raise Lost(self._last_words())
        status, cpu, peak = ANSWER.unpack(message)
        return status, cpu, peak

    def _blame_ourselves(self, status: int, killed: str) -> None:
        """A process that the kernel killed because the *machine* ran out of memory says nothing about the program."""
        if not killed and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            before, self._oom_kills = self._oom_kills, oom_kills()
            if self._oom_kills > before:
                raise Lost("the machine ran out of memory")


def _fill(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _read(fd: int, most: int, offset: int = 0) -> bytes:
    parts = []
    while most > 0:
        part = os.pread(fd, most, offset)
        if not part:
            break
        parts.append(part)
        offset, most = offset + len(part), most - len(part)
    return b"".join(parts)


def _read_ends(fd: int, most: int) -> bytes:
    size = os.fstat(fd).st_size
    if size <= most:
        return _read(fd, most)
    return _read(fd, most - most // 2) + _read(fd, most // 2, size - most // 2)
