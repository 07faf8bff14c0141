"""The few system calls that Python has no function for, through ctypes: prctl, capset, and raw numbers."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

__all__ = ["MACHINE", "call", "drop_capabilities", "fork", "prctl"]

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38

MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock over the call
_libc.syscall.restype = ctypes.c_long
_libc.prctl.restype = ctypes.c_int


def call(number: int, *args: Any) -> int:
    """A raw system call; integers are passed as 64-bit words.

    Raises:
        OSError: the kernel refused.
    """
    result: int = _libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def fork() -> int:
    """fork(2) without Python's after-fork hooks, which touch two hundred pages and take a third of a run. They put other
    threads and their locks in order; the caller has no other threads. `random` is not seeded anew either, so that a
    program draws the same numbers each time."""
    pid: int = _python.fork()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "fork")
    return pid


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument.

    Raises:
        OSError: the kernel refused.
    """
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def drop_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets: uid 0 keeps its name and loses its powers."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    call(_CAPSET[MACHINE], header, (ctypes.c_uint32 * 6)())
