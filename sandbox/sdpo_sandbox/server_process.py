"""How a fork server is started, at each level of isolation."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sdpo_sandbox.inside
from sdpo_sandbox.levels import Level

__all__ = ["ENVIRONMENT", "command", "drop_to"]

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_NOBODY = 65534
_PACKAGE = str(Path(sdpo_sandbox.inside.__file__).parent.parent)
# The fork server runs without site and with nothing but the standard library on its path. The package's own __init__,
# which imports more, is passed over. The stack limit has to be there at exec to count for the main thread.
_BOOT = """\
import os, resource, sys, types
sys.path[:] = [p for p in sys.path if p]
soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
want = 256 << 20 if hard < 0 else min(256 << 20, hard)
if soft != want:
    resource.setrlimit(resource.RLIMIT_STACK, (want, hard))
    os.execv(sys.executable, sys.orig_argv)
package = sys.modules["sdpo_sandbox"] = types.ModuleType("sdpo_sandbox")
package.__path__ = [sys.argv[1]]
import json
from sdpo_sandbox.inside import zygote
zygote.main(json.loads(sys.argv[2]))
"""


def drop_to(level: Level) -> int | None:
    """The user to run as instead of root. With seccomp, uid 0 without capabilities is as good as any."""
    return _NOBODY if level is Level.BWRAP and os.geteuid() == 0 else None


def command(level: Level, python: str, control: int, options: Mapping[str, Any], workspace: str) -> list[str]:
    """The command line of a fork server.

    Args:
        control: the descriptor on which it is spoken to.
        options: imports, site, preludes: see `sdpo_sandbox.inside.zygote.main`.
        workspace: directory for runs with files, "" for none.
    """
    told = {
        **options,
        "control": control,
        "landlock": level is Level.FULL,
        "seccomp": level in (Level.FULL, Level.NO_OPEN),
        "own_pids": level is Level.BWRAP,
        "workspace": workspace,
    }
    if level is Level.BWRAP:
        python = str(Path(python).resolve())
    server = [python, "-s", "-S", "-B", "-c", _BOOT, _PACKAGE, json.dumps(told)]
    return [*_bwrap(python, workspace), *server] if level is Level.BWRAP else server


def _bwrap(python: str, workspace: str) -> list[str]:
    """A file system that holds the interpreter, shared libraries and this package, read-only; no network, no /proc."""
    libraries = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
    shown = {str(Path(python).parent.parent), _PACKAGE, *libraries}
    arguments = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--dev", "/dev", "--chdir", "/"]
    for path in sorted(shown):
        arguments += ["--ro-bind-try", path, path]
    return [*arguments, "--bind", workspace, workspace, "--remount-ro", "/"]
