"""JSON on disk: lines that survive a kill, files that are there whole or not at all.

JSON has no NaN and no infinity; both are written as null, as are integers beyond 64 bits. Values of other types become
their text: a record must never end a run. Not covered: concurrent writers (see sdpo.run), compression.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdpo.errors import CheckpointError, boundary

__all__ = ["append_jsonl", "jsonable", "read_jsonl", "write_json", "write_jsonl", "write_whole"]

_HINT = "free space or choose another run.dir, then --run.resume"


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Add one line; it is on disk when the call returns. A write that fails half-way leaves no half line.

    Raises:
        CheckpointError: the disk is full, the file not writable, ...
    """
    rest = memoryview(f"{_dumps(record)}\n".encode())
    with boundary(f"write {path}", CheckpointError, hint=_HINT), path.open("ab", buffering=0) as stream:
        start = os.fstat(stream.fileno()).st_size
        try:
            while rest:
                rest = rest[stream.write(rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(stream.fileno(), start)
            raise
        os.fsync(stream.fileno())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without a last line that a kill tore; empty when there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or a whole line in it is damaged.
    """
    with boundary(f"read {path}", CheckpointError):
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
    lines.pop()  # what follows the last newline: nothing, or half a line
    records = []
    for number, line in enumerate(lines, 1):
        with boundary(f"read line {number} of {path}", CheckpointError, ValueError, hint="remove the damaged line"):
            records.append(json.loads(line))
    return records


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by these records, one a line. Raises CheckpointError as `write_whole` does."""
    write_whole(path, "".join(f"{_dumps(record)}\n" for record in records))


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Replace a file by one record, indented. Raises CheckpointError as `write_whole` does."""
    write_whole(path, f"{_dumps(record, indent=1)}\n")


def write_whole(path: Path, text: str) -> None:
    """Replace a file by one with this text: written under another name, flushed to disk, renamed.

    Raises:
        CheckpointError: the disk is full, the folder not writable, ...
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with boundary(f"write {path}", CheckpointError, hint=_HINT):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                stream.write(text.encode())
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise


def jsonable(value: Any) -> Any:
    """The value in JSON's own types (see the module's docstring)."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**63 else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    scalar: Callable[[], Any] | None = getattr(value, "item", None)  # numpy's and torch's scalars
    return jsonable(scalar()) if callable(scalar) and getattr(value, "ndim", 1) == 0 else str(value)


def _dumps(value: Any, **options: Any) -> str:
    return json.dumps(jsonable(value), allow_nan=False, **options)
