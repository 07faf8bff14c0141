"""What this machine offers, and the order in which it is used."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from enum import Enum

from sdpo.errors import SandboxError
from sdpo_sandbox.inside import landlock, seccomp

__all__ = ["Level", "available", "choose"]


class Level(str, Enum):
    """How a program is kept apart, best first. Hard rlimits and a scrubbed environment come with each."""

    FULL = "landlock+seccomp"
    """No file but the standard library's, no call but those listed. Needs no root and no namespaces."""
    NO_OPEN = "seccomp without open"
    """For kernels without Landlock: no file can be opened at all, so only what the fork server has loaded can be imported,
    and there is no working directory."""
    BWRAP = "bubblewrap"
    """For kernels without seccomp: namespaces with a read-only file system that holds Python and nothing else. Programs can
    fork, so that memory is bounded for each process, not for all of a run's."""
    NONE = "none"
    """Nothing but rlimits: for debugging of one's own programs."""

    __str__ = str.__str__


def available() -> dict[Level, str]:
    """What is on offer here, each with what it rests on; empty reasons mean "not available"."""
    landlock_abi = landlock.abi()
    filters = seccomp.supported()
    return {
        Level.FULL: f"Landlock ABI {landlock_abi}, seccomp filters" if landlock_abi and filters else "",
        Level.NO_OPEN: "seccomp filters" if filters else "",
        Level.BWRAP: "bwrap" if _bwrap_works() else "",
        Level.NONE: "always",
    }


def _bwrap_works() -> bool:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return False
    try:
        done = subprocess.run(
            [bwrap, "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def choose(require: str, unsafe: bool, offers: Mapping[Level, str]) -> Level:
    """The best level of this machine.

    Args:
        require: "full" accepts `Level.FULL` only, "best_effort" any that isolates.
        unsafe: accept `Level.NONE` where nothing else is to be had.
        offers: see `available`.

    Raises:
        SandboxError: nothing acceptable here.
    """
    wanted = [Level.FULL] if require == "full" else [Level.FULL, Level.NO_OPEN, Level.BWRAP]
    for level in wanted:
        if offers[level]:
            return level
    if unsafe:
        return Level.NONE
    have = ", ".join(str(level) for level, reason in offers.items() if reason and level is not Level.NONE) or "none"
    raise SandboxError(
        f"no isolation of level {require!r} on this machine (kernel {os.uname().release}; available: {have})",
        hint="use a Linux kernel with Landlock (5.13) and seccomp, or a Sandbox Fusion server: sandbox = 'http://host:8080'",
    )
