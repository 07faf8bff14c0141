"""The local sandbox: a pool of fork servers on this machine.

Open it early and keep it: the fork servers are started at once, before the calling process grows. A fork server that dies
is started again and its run repeated; only a run that loses its server three times is a `SandboxError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import queue
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from sdpo.errors import ConfigError, SandboxError
from sdpo_sandbox.base import DEFAULT_LIMITS, Limits, Program, RunResult, Test
from sdpo_sandbox.levels import Level, choose
from sdpo_sandbox.observe import Observation, conclude, make_job
from sdpo_sandbox.prelude import COMMON_MODULES, COMPETITION_MODULES, COMPETITION_PRELUDE, MORE_MODULES
from sdpo_sandbox.slot import Lost, Slot

__all__ = ["LocalSandbox"]

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_IN_FLIGHT = 2  # tests of one program at a time: keeps a slot busy while the caller compares


class LocalSandbox:
    """Programs in processes of this machine, kept apart by the kernel: see `Level` and the README.

    Args:
        slots: runs at a time; None means one for each core.
        imports: modules to load beforehand, such as "numpy": programs that import them then pay nothing for it. Packages
            outside the standard library can be imported only when they are named here.
        require: "full" refuses anything less than `Level.FULL`; "best_effort" takes the best there is.
        unsafe: run without isolation where there is none.
        level: use this level and no other; None chooses.
        python: the interpreter; None means the current one.

    Raises:
        SandboxError: no isolation here, or the fork servers do not start.
        ConfigError: an import that is not installed, or another value that makes no sense.
    """

    def __init__(
        self,
        slots: int | None = None,
        imports: Sequence[str] = (),
        require: str = "best_effort",
        unsafe: bool = False,
        level: Level | None = None,
        python: str | None = None,
    ) -> None:
        if require not in ("full", "best_effort"):
            raise ConfigError(f"require = {require!r}", hint='use "full" or "best_effort"')
        if slots is not None and slots < 1:
            raise ConfigError(f"slots = {slots}", hint="use at least 1")
        if level is Level.NONE and not unsafe:
            raise SandboxError(
                "isolation level 'none' without unsafe = true", hint="leave out level, or set unsafe = true"
            )
        self.level = choose(require, unsafe) if level is None else level
        if self.level is not Level.FULL:
            log.warning("sandbox: isolation level is %r, not %r", str(self.level), str(Level.FULL))
        modules = COMPETITION_MODULES + COMMON_MODULES + (MORE_MODULES if self.level is Level.NO_OPEN else ())
        options = {
            "imports": [*modules, *imports],
            "site": _site(imports),
            "preludes": [COMPETITION_PRELUDE],
        }
        count = slots or len(os.sched_getaffinity(0))
        self.slots = count
        self._pid = os.getpid()
        self._all = [Slot(self.level, options, python or sys.executable) for _ in range(count)]
        self._idle: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="sandbox")
        self._closing = threading.Event()
        try:
            for slot in self._all:
                slot.start()
            for slot in self._all:
                slot.greet()
                self._idle.put(slot)
        except BaseException:
            self._shut()
            raise

    async def run(
        self,
        code: str,
        stdin: str = "",
        limits: Limits = DEFAULT_LIMITS,
        files: Mapping[str, bytes] | None = None,
        language: str = "python",
        fetch: Sequence[str] = (),
    ) -> RunResult:
        """See `Sandbox.run`. Only Python."""
        program = Program(code, files=files or {}, fetch=tuple(fetch), language=language)
        return await self._one(program, stdin, limits)

    async def run_many(
        self, program: Program, tests: Sequence[Test], limits: Limits = DEFAULT_LIMITS
    ) -> AsyncIterator[RunResult]:
        """See `Sandbox.run_many`. Up to two tests run at a time; results come in order."""
        coming: deque[asyncio.Task[RunResult]] = deque()
        try:
            for test in tests:
                coming.append(asyncio.ensure_future(self._one(program, test, limits)))
                if len(coming) == _IN_FLIGHT:
                    yield await coming.popleft()
            while coming:
                yield await coming.popleft()
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)

    async def _one(self, program: Program, test: Test, limits: Limits) -> RunResult:
        if program.language != "python":
            raise ConfigError(
                f"language {program.language!r} in the local sandbox", hint="only Python; use a Sandbox Fusion server"
            )
        job = make_job(program, test, limits)
        return conclude(await self.observe(job, limits, program.files, program.fetch), job, limits)

    async def observe(
        self, job: Mapping[str, Any], limits: Limits, files: Mapping[str, bytes], fetch: Sequence[str]
    ) -> Observation:
        """Run a job of `observe.make_job` and say what was seen; for those who draw the conclusions elsewhere.

        Raises:
            SandboxError: the sandbox failed.
            ConfigError: a file outside the working directory.
        """
        if self._closing.is_set() or os.getpid() != self._pid:
            raise SandboxError("the sandbox is closed, or was opened by another process", hint="open one here")
        cancel = os.eventfd(0)
        future = self._threads.submit(self._work, job, limits, files, fetch, cancel)
        future.add_done_callback(lambda _: os.close(cancel))
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if self._closing.is_set() and waiter.cancelled():
                raise SandboxError("the sandbox was closed before the run began") from None
            if not future.cancel():
                os.eventfd_write(cancel, 1)
                with contextlib.suppress(Exception):
                    await asyncio.shield(waiter)
            raise

    def _work(
        self, job: Mapping[str, Any], limits: Limits, files: Mapping[str, bytes], fetch: Sequence[str], cancel: int
    ) -> Observation:
        """One run on a free slot, in a thread of the pool; there are as many threads as slots."""
        slot = self._idle.get()
        try:
            for attempt in range(_ATTEMPTS):
                try:
                    return slot.run(job, limits, files, fetch, cancel)
                except Lost as exc:
                    log.warning("sandbox: fork server lost (%s), attempt %d of %d", exc, attempt + 1, _ATTEMPTS)
                    if self._closing.is_set():
                        break
                    slot.start()
            raise SandboxError(f"the fork server was lost {_ATTEMPTS} times over one run")
        finally:
            self._idle.put(slot)

    def _shut(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for slot in self._all:
            slot.close()

    async def close(self) -> None:
        """End all processes; waits for the runs at hand. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._shut)

    async def __aenter__(self) -> LocalSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _site(imports: Sequence[str]) -> list[str]:
    """Where the modules to load lie, besides the standard library: site-packages of the current interpreter."""
    for name in imports:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ConfigError(f"sandbox import {name!r} is not installed", hint=f"pip install {name}")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return sorted(paths) if imports else []
