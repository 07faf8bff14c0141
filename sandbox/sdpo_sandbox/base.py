"""What a sandbox is: one protocol, and the values that go in and come out.

A sandbox runs a program on inputs and says what was observed. It never sees an expected output and never says "right"
or "wrong": the caller, a trusted process, compares. A failure of the sandbox itself raises `sdpo.errors.SandboxError`
and is never a result, so that it cannot turn into a reward of 0.

Not covered: which sandbox isolates how well (see the README), comparison of outputs (the grader's business).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from sdpo.errors import ConfigError

__all__ = [
    "DEFAULT_LIMITS",
    "MIB",
    "Call",
    "Frame",
    "Limits",
    "Program",
    "ProgramError",
    "RunResult",
    "Sandbox",
    "Status",
    "Test",
]

MIB = 1 << 20


class Status(str, Enum):
    """How a run ended. Only `OK` and `NONZERO_EXIT` leave an answer to be judged."""

    OK = "ok"
    """Ended by itself with exit code 0; in a function run the function returned: see `RunResult.value`."""
    NONZERO_EXIT = "nonzero_exit"
    """A stdin run ended by itself with another exit code (`sys.exit(1)`), without an uncaught exception."""
    COMPILE_ERROR = "compile_error"
    """The program does not compile (SyntaxError, a NUL in the source, too deeply nested)."""
    RUNTIME_ERROR = "runtime_error"
    """An uncaught exception, death by a signal, no such function, no return from it, a value that is not data."""
    TIME_LIMIT = "time_limit"
    """More CPU time than `Limits.cpu_s`, or more wall time than `Limits.wall_s`."""
    MEMORY_LIMIT = "memory_limit"
    """An uncaught MemoryError."""
    OUTPUT_LIMIT = "output_limit"
    """More standard output than `Limits.output_bytes`, or a returned value larger than `Limits.result_bytes`."""
    PROTOCOL_ERROR = "protocol_error"
    """Something other than exactly one result frame was found on the result channel: the program wrote on it."""

    __str__ = str.__str__


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run, that is of one test.

    Attributes:
        cpu_s: CPU seconds of the program; judges.
        wall_s: wall seconds, the backstop for programs that sleep; None means 2.5 times `cpu_s`. The local sandbox does not
            count the time in which a program waits for a core.
        memory_mb: address space that the program may add, in MiB.
        output_bytes: cap on standard output.
        result_bytes: cap on the JSON form of a returned value.
        stderr_bytes: how much of standard error is kept: the head and the tail.
    """

    cpu_s: float = 6.0
    wall_s: float | None = None
    memory_mb: int = 1024
    output_bytes: int = 16 * MIB
    result_bytes: int = 4 * MIB
    stderr_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        for name in ("cpu_s", "wall_s", "memory_mb", "output_bytes", "result_bytes", "stderr_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e15:
                raise ConfigError(f"Limits.{name} = {value}", hint="use a finite number from 0 on")

    @property
    def wall(self) -> float:
        """The wall limit in seconds."""
        return 2.5 * self.cpu_s if self.wall_s is None else self.wall_s


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the program's function: JSON-able arguments."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Test = str | Call
"""The input of one run: text for standard input, or the arguments of a call. Never an expected output."""


@dataclass(frozen=True, slots=True)
class Program:
    """What is run; the same for all tests.

    Attributes:
        code: the source, run as `__main__` (guards of the form `if __name__ == "__main__"` are true) in a stdin run.
        fn_name: None for a stdin program; else the function that each `Call` calls: a function of the program, or a
            method of its `class Solution` (a fresh instance a test). In a function run `__name__` is not `__main__`.
        prelude: trusted source that runs first, in the same namespace and without shifting the program's line numbers.
            `sdpo_sandbox.COMPETITION_PRELUDE` costs nothing: the fork servers hold it ready.
        files: files in the working directory, by relative path.
        fetch: files of the working directory to return, by relative path; those that do not exist are left out.
        language: "python"; other languages need a Sandbox Fusion server and go without `fn_name`.
    """

    code: str
    fn_name: str | None = None
    prelude: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    language: str = "python"


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of the program on the stack of an exception: `line` counts from 1 in `Program.code`."""

    line: int
    function: str


@dataclass(frozen=True, slots=True)
class ProgramError:
    """The exception that ended a run, as the program's own process told it: untrusted text, bounded.

    Attributes:
        type: name of the exception's class.
        message: its text, at most 2,000 characters.
        frames: the program's own frames, outermost first, at most 20 (the outermost and the innermost ten).
    """

    type: str
    message: str
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """What was observed of one run.

    Attributes:
        status: how it ended.
        stdout: at most `Limits.output_bytes`; invalid UTF-8 is replaced.
        stderr: head and tail, at most `Limits.stderr_bytes`.
        exit_code: None when the run was killed or died by a signal.
        signal: number of the signal it died by, None otherwise.
        cpu_s: CPU seconds, wall_s: wall seconds, peak_memory_mb: peak resident MiB; measured from outside.
        truncated: stdout or stderr is not whole.
        value: what the function returned, only with `has_value`. Exact builtin types, whatever the program made:
            None, bool, int, float (with NaN and the infinities), complex, str, bytes, list, tuple, set, frozenset,
            dict. Subclasses are reduced to their storage (a Counter is a dict, an IntEnum an int), numpy scalars and
            arrays to numbers and lists. Anything else (generators, own classes), a nesting deeper than 200 and integers
            of more than 50,000 digits are a RUNTIME_ERROR. The caller decides whether a tuple equals a list.
        has_value: whether there is a `value` (None may be one).
        error: the exception, where there was one.
        files: the fetched files.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    signal: int | None = None
    cpu_s: float = 0.0
    wall_s: float = 0.0
    peak_memory_mb: float = 0.0
    truncated: bool = False
    value: Any = None
    has_value: bool = False
    error: ProgramError | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@runtime_checkable
class Sandbox(Protocol):
    """Runs untrusted programs. May be used from any event loop and thread, by many tasks at once: at most as many runs
    as the sandbox has slots go on at a time, the rest wait. Open one with `sdpo_sandbox.open_sandbox` and keep it."""

    async def run(
        self,
        code: str,
        stdin: str = "",
        limits: Limits = DEFAULT_LIMITS,
        files: Mapping[str, bytes] | None = None,
        language: str = "python",
        fetch: Sequence[str] = (),
    ) -> RunResult:
        """Run a program once.

        Raises:
            SandboxError: the sandbox failed; nothing is known about the program.
        """
        ...

    def run_many(
        self,
        program: Program,
        tests: Sequence[Test],
        limits: Limits = DEFAULT_LIMITS,
    ) -> AsyncIterator[RunResult]:
        """Run a program once for each test, each time in a fresh process, and yield the results in the tests' order.

        Leaving the loop stops the rest: `async for result in sandbox.run_many(...)`, `break` at the first failure.

        Args:
            tests: all `str` for a stdin program, all `Call` for one with `fn_name`.

        Raises:
            SandboxError: the sandbox failed; nothing is known about the test at hand.
            ConfigError: tests of the wrong kind, or arguments that are not JSON.
        """
        ...

    async def close(self) -> None:
        """End all processes. Idempotent."""
        ...

    async def __aenter__(self) -> Sandbox: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
