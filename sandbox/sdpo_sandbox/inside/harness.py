"""Runs one program in the current process and says on a descriptor how it went; never returns.

The program may find and patch everything in here: it runs in the same interpreter. That gains it nothing, because what is
written here only *states* a value, which the trusted parent compares, and because exit status, time and memory come from
the kernel. Lines on the result descriptor, each after the run's nonce:

    ready           always first: what follows is the program's doing, what came before is ours
    value JSON      the function returned
    large           it returned more than allowed
    compile         the program does not compile     } each before `detail`, so that an exception that
    uncaught        an exception left the program    } misbehaves when it is printed still counts
    detail JSON     {"type", "message", "frames": [[line, function], ...]}
"""

from __future__ import annotations

import _thread
import atexit
import builtins
import gc
import io
import json
import linecache
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from sdpo_sandbox.inside.values import MAX_INT_DIGITS, encode

__all__ = ["RESULT_FD", "Ready", "prepare", "run", "set_up"]

RESULT_FD = 3
FILE = "main.py"
_MAX_MESSAGE, _MAX_FRAMES = 2000, 20

Ready = dict[str, tuple[dict[str, Any], int]]
"""Preludes that were executed already: text to (names, recursion limit)."""


def prepare(prelude: str) -> tuple[dict[str, Any], int]:
    """Execute a prelude: its names, and the recursion limit that it asks for."""
    before = sys.getrecursionlimit()
    names: dict[str, Any] = {}
    exec(compile(prelude, "<prelude>", "exec", dont_inherit=True), names)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(before)
    del names["__builtins__"]
    return names, limit


def run(job: dict[str, Any], ready: Ready | None = None) -> NoReturn:
    """Run the job on descriptors 0 to 3 and end the process.

    Args:
        job: code, prelude, fn (None for a stdin program), call (JSON text of {"args", "kwargs"}), nonce, result_bytes.
    """
    code = 1
    try:
        code = _run(job, ready or {})
    except BaseException as exc:
        os.write(2, ("%s: %s\n" % (type(exc).__name__, exc)).encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _run(job: dict[str, Any], ready: Ready) -> int:
    say = _speaker(job["nonce"])
    say("ready")
    function = job["fn"] is not None
    try:
        program = compile(job["code"], FILE, "exec", dont_inherit=True)
    except BaseException as exc:
        say("compile")
        _report(say, exc, job["code"].splitlines(True))
        return 1
    module = types.ModuleType("solution" if function else "__main__")
    sys.modules[module.__name__] = module
    space = module.__dict__
    space.update(__builtins__=builtins, __file__=FILE)
    sys.argv[:] = [FILE]
    lines = job["code"].splitlines(True)
    linecache.cache[FILE] = (len(job["code"]), None, lines, FILE)
    given: dict[str, Any] = {}
    try:
        if job["prelude"]:
            given, limit = ready.get(job["prelude"]) or prepare(job["prelude"])
            sys.setrecursionlimit(limit)
            space.update(given)
        exec(program, space)
        if function:
            text = encode(_call(job, space, given))
    except SystemExit as exc:
        if function:
            say("uncaught")
            _report(say, exc, lines)
            return 1
        status = _exit_code(exc)
    except BaseException as exc:
        say("uncaught")
        _report(say, exc, lines)
        status = 1
    else:
        status = 0
        if function:
            _flush(sys.stdout)
            _flush(sys.__stdout__)
            say("value " + text if len(text) <= job["result_bytes"] else "large")
            return 0
    return 1 if function else _leave(space) or status


def _speaker(nonce: str) -> Callable[[str], None]:
    write = os.write

    def say(line: str) -> None:
        data = ("%s %s\n" % (nonce, line)).encode("ascii")
        while data:
            data = data[write(RESULT_FD, data) :]

    return say


def set_up() -> None:
    """What a run finds: text streams on descriptors 0 to 2 as a new interpreter makes them for files, `exit`, and the digits
    that an integer may have as text. May be done before the fork, and before the run's files lie on the descriptors if
    those there are seekable as well."""

    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(MAX_INT_DIGITS)

    def stream(fd: int, mode: str, errors: str) -> Any:
        raw = io.FileIO(fd, mode, closefd=False)
        buffer: Any = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
        return io.TextIOWrapper(buffer, "utf-8", errors, "\n", line_buffering=fd == 2)

    sys.stdin = sys.__stdin__ = stream(0, "r", "strict")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = stream(1, "w", "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stream(2, "w", "backslashreplace")  # type: ignore[misc]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]


def _call(job: dict[str, Any], space: dict[str, Any], given: dict[str, Any]) -> Any:
    name = job["fn"]
    arguments = json.loads(job["call"])
    holder = space.get("Solution")
    if isinstance(holder, type) and callable(getattr(holder, name, None)):
        function = getattr(holder(), name)
    else:
        function = space.get(name)
        if function is None or function is given.get(name):
            raise NameError("the program defines no function %r" % name)
    return function(*arguments["args"], **arguments["kwargs"])


def _exit_code(exc: SystemExit) -> int:
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code & 0xFF
    sys.stderr.write("%s\n" % (exc.code,))
    return 1


def _leave(space: dict[str, Any]) -> int:
    """What an interpreter does at its end, as far as a program can tell: wait for threads, run exit functions, let go of
    the program's objects (files that were not closed are flushed then), flush. 120 if the output could not be written."""
    threading = sys.modules.get("threading")
    if threading is not None and _thread._count():
        threading._shutdown()
    atexit._run_exitfuncs()
    outs = (sys.stdout, sys.stderr, sys.__stdout__)
    failures = [out for out in outs if not _flush(out)]
    space.clear()
    gc.collect()
    _flush(outs[-1])
    return 120 if failures else 0


def _flush(out: Any) -> bool:
    """Whether the stream, which may be an object of the program, holds nothing back."""
    if out is None or getattr(out, "closed", False):
        return True
    try:
        out.flush()
    except BaseException:
        return False
    return True


def _report(say: Callable[[str], None], exc: BaseException, lines: list[str]) -> None:
    """Tell the type, the message and the program's own frames, and print them as an interpreter would."""
    kind = type(exc).__name__
    frames: list[tuple[int, str]] = []
    if isinstance(exc, SyntaxError) and exc.lineno is not None and exc.filename == FILE:
        message, frames = str(exc.msg), [(exc.lineno, "<module>")]
    else:
        step = exc.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename == FILE:
                frames.append((step.tb_lineno, step.tb_frame.f_code.co_name))
            step = step.tb_next
        message = str(exc)[:_MAX_MESSAGE]
    shown = frames if len(frames) <= _MAX_FRAMES else frames[: _MAX_FRAMES // 2] + frames[-_MAX_FRAMES // 2 :]
    detail = {"type": kind[:200], "message": message[:_MAX_MESSAGE], "frames": [[n, f[:200]] for n, f in shown]}
    say("detail " + json.dumps(detail))
    out = ["Traceback (most recent call last):\n"] if shown and exc.__traceback__ is not None else []
    for i, (line, name) in enumerate(shown):
        if len(frames) > len(shown) and i == _MAX_FRAMES // 2:
            out.append("  [%d more frames]\n" % (len(frames) - len(shown)))
        out.append('  File "%s", line %d, in %s\n' % (FILE, line, name))
        if 0 < line <= len(lines):
            out.append("    %s\n" % lines[line - 1].strip()[:500])
    out.append("%s: %s\n" % (kind, message) if message else "%s\n" % kind)
    _flush(sys.stdout)
    _flush(sys.__stdout__)
    sys.__stderr__.write("".join(out))  # type: ignore[union-attr]
    sys.__stderr__.flush()  # type: ignore[union-attr]
