"""Landlock: which parts of the file system a process may reach, enforced by the kernel and never to be undone.

Handled: all file system rights of the kernel's ABI, TCP bind and connect (ABI 4), abstract unix sockets and signals to
processes outside (ABI 6). Not covered by Landlock: stat, so names and sizes of files can be seen; chmod, chown, utime and
xattr, which the seccomp filter denies.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from sdpo_sandbox.inside.kernel import call

__all__ = ["LIST", "READ", "WRITE", "abi", "restrict"]

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION, _PATH_BENEATH = 1, 1

_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_FILE_RIGHTS = (1 << 0) | _WRITE_FILE | _READ_FILE | _TRUNCATE | (1 << 15)  # those a rule on a file may name
_FS_RIGHTS_SINCE = {1: 13, 2: 14, 3: 15, 5: 16}  # ABI: number of file system rights
LIST, READ, WRITE = _READ_DIR, _READ_FILE | _READ_DIR, _WRITE_FILE | _READ_FILE | _READ_DIR | _TRUNCATE


def abi() -> int:
    """The kernel's Landlock ABI, 0 when there is none."""
    try:
        return call(_CREATE_RULESET, 0, 0, _VERSION)
    except OSError:
        return 0


def handled(version: int) -> bytes:
    """`struct landlock_ruleset_attr` that handles everything this ABI knows."""
    rights = max(count for since, count in _FS_RIGHTS_SINCE.items() if since <= version)
    words = [(1 << rights) - 1]
    if version >= 4:
        words.append(0b11)  # bind and connect of TCP
    if version >= 6:
        words.append(0b11)  # abstract unix sockets, signals
    return struct.pack("<%dQ" % len(words), *words)


def restrict(rules: Iterable[tuple[str, int]]) -> None:
    """Leave this process and its descendants only `rules`: (path, LIST | READ | WRITE), each with all that lies beneath.
    Paths that do not exist are skipped. Needs no_new_privs or CAP_SYS_ADMIN.

    Raises:
        OSError: no Landlock here.
    """
    version = abi()
    attribute = handled(version) if version else b"\0" * 8
    known = struct.unpack_from("<Q", attribute)[0]
    ruleset = call(_CREATE_RULESET, attribute, len(attribute), 0)
    try:
        for path, rights in rules:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                wanted = rights & known if os.path.isdir(path) else rights & known & _FILE_RIGHTS
                if wanted:
                    rule = struct.pack("<Qi", wanted, place)
                    call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.c_char_p(rule), 0)
            finally:
                os.close(place)
        call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
