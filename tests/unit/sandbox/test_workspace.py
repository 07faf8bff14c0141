"""The working directory of a run with files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sdpo.errors import ConfigError
from sdpo_sandbox.workspace import MAX_FETCH, Workspace


@pytest.fixture
def space() -> Workspace:
    return Workspace()


def test_files_are_laid_out_and_fetched(space: Workspace) -> None:
    room = Path(space.fill({"a/b.txt": b"hi", "out": b"before"}, ["out", "new", "deep/new", "empty"]))
    assert (room / "a" / "b.txt").read_bytes() == b"hi"
    (room / "out").write_bytes(b"after")
    (room / "deep" / "new").write_bytes(b"made")
    (room / "empty").write_bytes(b"")
    assert space.collect(["out", "new", "deep/new", "empty", "a/b.txt"], 100) == {
        "out": b"after",
        "deep/new": b"made",
        "empty": b"",
        "a/b.txt": b"hi",
    }
    assert space.collect(["out"], 2) == {"out": b"af"}
    space.clear()
    assert os.listdir(space.path) == []
    space.close()
    assert not os.path.exists(space.path)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b"])
def test_paths_outside_are_refused(space: Workspace, path: str) -> None:
    for files, fetch in (({path: b""}, []), ({}, [path])):
        with pytest.raises(ConfigError, match="outside the working directory"):
            space.fill(files, fetch)
        space.clear()
    space.close()


def test_links_and_pipes_are_not_followed(space: Workspace, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    room = Path(space.fill({}, ["link", "pipe", "folder/secret"]))
    (room / "link").unlink()
    (room / "link").symlink_to(tmp_path / "secret")
    (room / "pipe").unlink()
    os.mkfifo(room / "pipe")
    (room / "folder" / "secret").unlink()
    (room / "folder").rmdir()
    (room / "folder").symlink_to(tmp_path)
    assert space.collect(["link", "pipe", "folder/secret"], 100) == {}
    space.close()


def test_no_more_than_some_files_can_be_fetched(space: Workspace) -> None:
    with pytest.raises(ConfigError, match="files to fetch"):
        space.fill({}, [str(i) for i in range(MAX_FETCH + 1)])
    space.close()
