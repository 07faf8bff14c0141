"""What this machine offers, and the order in which it is used."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from enum import Enum

from sdpo.errors import SandboxError
from sdpo_sandbox.inside import landlock, seccomp

__all__ = ["Level", "choose", "offer"]


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


def offer(level: Level) -> str:
    """What a level rests on here; "" when this machine does not offer it."""
    if level is Level.NONE:
        return "always"
    if level is Level.BWRAP:
        return "bwrap" if _bwrap_works() else ""
    filters = "seccomp filters" if seccomp.supported() else ""
    if level is Level.NO_OPEN or not filters:
        return filters
    return f"Landlock ABI {landlock.abi()}, {filters}" if landlock.abi() else ""


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


def choose(require: str, unsafe: bool, offers: Callable[[Level], str] = offer) -> Level:
    """The best level of this machine.

    Args:
        require: "full" accepts `Level.FULL` only, "best_effort" any that isolates.
        unsafe: accept `Level.NONE` where nothing else is to be had.
        offers: as `offer`.

    Raises:
        SandboxError: nothing acceptable here.
    """
    levels = [Level.FULL, Level.NO_OPEN, Level.BWRAP]
    for level in levels[:1] if require == "full" else levels:
        if offers(level):
            return level
    if unsafe:
        return Level.NONE
    have = ", ".join(str(level) for level in levels if offers(level)) or "none"
    raise SandboxError(
        f"no isolation of level {require!r} on this machine (kernel {os.uname().release}; available: {have})",
        hint="use Linux with Landlock (5.13) and seccomp, or a Sandbox Fusion server: sandbox = 'http://host:8080'",
    )
