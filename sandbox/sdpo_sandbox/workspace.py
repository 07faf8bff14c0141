"""The working directory of a run that has files.

A program may read what lies in it and write to the files that are to be fetched, which exist beforehand, empty; it can
make no others. So it cannot fill a disk, and nothing it leaves is followed, run or kept.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from sdpo.errors import ConfigError

__all__ = ["MAX_FETCH", "Workspace", "check_paths"]

MAX_FETCH = 64


def _parts(path: str) -> tuple[str, ...]:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise ConfigError(f"file {path!r} lies outside the working directory", hint="give a relative path without '..'")
    return pure.parts


def check_paths(paths: Iterable[str]) -> None:
    """Raise ConfigError for a path outside the working directory."""
    for path in paths:
        _parts(path)


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of the process that ends
        shutil.rmtree(path, ignore_errors=True)


class Workspace:
    """A private directory, holding one run's files at a time.

    Args:
        owner: user and group id to hand the files to, None for the current user.
    """

    def __init__(self, owner: int | None = None) -> None:
        self._owner = owner
        self.path = tempfile.mkdtemp(prefix="sdpo-sandbox-")
        self._own(self.path)
        self._removed = weakref.finalize(self, _remove, self.path, os.getpid())

    def _own(self, path: str) -> None:
        if self._owner is not None:
            os.chown(path, self._owner, self._owner)

    def fill(self, files: Mapping[str, bytes], fetch: Iterable[str]) -> str:
        """Lay out a run's files and return the directory.

        Raises:
            ConfigError: a path outside the working directory, or too many to fetch.
        """
        wanted = tuple(fetch)
        if len(wanted) > MAX_FETCH:
            raise ConfigError(f"{len(wanted)} files to fetch", hint=f"at most {MAX_FETCH}")
        room = os.path.join(self.path, "run")
        os.mkdir(room, 0o700)
        self._own(room)
        for name in wanted:
            self._write(room, _parts(name), files.get(name, b""), fresh=name not in files)
        for name, content in files.items():
            if name not in wanted:
                self._write(room, _parts(name), content, fresh=False)
        return room

    def _write(self, room: str, parts: tuple[str, ...], content: bytes, *, fresh: bool) -> None:
        path = room
        for part in parts[:-1]:
            path = os.path.join(path, part)
            if not os.path.isdir(path):
                os.mkdir(path, 0o700)
                self._own(path)
        path = os.path.join(path, parts[-1])
        with open(path, "wb") as file:
            file.write(content)
        if fresh:
            os.utime(path, ns=(0, 0))  # tells "never written" from "written empty"
        self._own(path)

    def collect(self, fetch: Iterable[str], most: int) -> dict[str, bytes]:
        """Those of the files that the program wrote, each at most `most` bytes; links are not followed."""
        found = {}
        for name in fetch:
            content = self._read(_parts(name), most)
            if content is not None:
                found[name] = content
        return found

    def _read(self, parts: tuple[str, ...], most: int) -> bytes | None:
        place = os.open(os.path.join(self.path, "run"), os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for i, part in enumerate(parts):
                flags = os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECTORY if i < len(parts) - 1 else 0)
                inner = os.open(part, os.O_RDONLY | flags, dir_fd=place)
                os.close(place)
                place = inner
            facts = os.fstat(place)
            if not stat.S_ISREG(facts.st_mode) or (facts.st_size == 0 and facts.st_mtime_ns == 0):
                return None
            with os.fdopen(os.dup(place), "rb") as file:
                return file.read(most)
        except OSError:
            return None
        finally:
            os.close(place)

    def clear(self) -> None:
        """Remove the run's files."""
        shutil.rmtree(os.path.join(self.path, "run"), ignore_errors=True)

    def close(self) -> None:
        """Remove the directory; at the latest this happens at the end of the process."""
        self._removed()
