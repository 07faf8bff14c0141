"""Landlock: the ruleset for each ABI, and its effect on a forked process."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from sdpo_sandbox.inside import kernel, landlock


@pytest.mark.parametrize(
    ("version", "rights", "words"), [(1, 13, 1), (2, 14, 1), (3, 15, 1), (4, 15, 2), (5, 16, 2), (6, 16, 3), (9, 16, 3)]
)
def test_each_abi_handles_all_it_knows(version: int, rights: int, words: int) -> None:
    attribute = landlock.handled(version)
    assert len(attribute) == 8 * words
    assert struct.unpack_from("<Q", attribute)[0] == 2**rights - 1


def in_child(act: Callable[[], None]) -> int:
    """Exit code of a forked process that runs `act` and then tells 0."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        except PermissionError:
            code = 13
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


needs_landlock = pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock")


@needs_landlock
def test_only_the_rules_are_left(tmp_path: Path) -> None:
    for name in ("read", "write", "list"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")

    def confined(act: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            landlock.restrict(
                [
                    (str(tmp_path / "read"), landlock.READ),
                    (str(tmp_path / "write"), landlock.WRITE),
                    (str(tmp_path / "list"), landlock.LIST),
                    (str(tmp_path / "missing"), landlock.READ),
                ]
            )
            act()

        return run

    ok = {
        "read a file": lambda: (tmp_path / "read" / "file").read_text(),
        "list": lambda: os.listdir(tmp_path / "list"),
        "write a file that is there": lambda: (tmp_path / "write" / "file").write_text("y"),
    }
    denied = {
        "write where reading is allowed": lambda: (tmp_path / "read" / "file").write_text("y"),
        "read where listing is allowed": lambda: (tmp_path / "list" / "file").read_text(),
        "make a file": lambda: (tmp_path / "write" / "new").write_text("y"),
        "remove a file": lambda: (tmp_path / "write" / "file").unlink(),
        "make a link": lambda: os.symlink("/etc/passwd", tmp_path / "write" / "link"),
        "make a directory": lambda: (tmp_path / "write" / "new").mkdir(),
        "read elsewhere": lambda: Path("/etc/passwd").read_text(),
        "list elsewhere": lambda: os.listdir("/"),
        "read the process table": lambda: Path("/proc/self/environ").read_bytes(),
    }
    for name, act in ok.items():
        assert in_child(confined(act)) == 0, name
    for name, act in denied.items():
        assert in_child(confined(act)) == 13, name


@needs_landlock
def test_a_rule_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")

    def confined(name: str) -> Callable[[], None]:
        def run() -> None:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            landlock.restrict([(str(tmp_path / "a"), landlock.READ)])
            (tmp_path / name).read_text()

        return run

    assert in_child(confined("a")) == 0
    assert in_child(confined("b")) == 13
