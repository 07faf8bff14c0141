"""Rows of a data set, from local files or from the Hugging Face hub.

Local files are JSON lines, or one JSON array; that is what `datasets` exports and what the papers' repositories ship.
Hub data sets are pinned to a revision by the environment that knows them. Not covered: streaming, parquet (load those
through the hub loader or export them with `Dataset.to_json`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sdpo.errors import ConfigError, boundary

__all__ = ["field", "hub_rows", "json_files", "read_rows"]

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The objects of a .jsonl file (one a line) or .json file (an array, or one a line).

    Raises:
        ConfigError: the file cannot be read, or a line is not a JSON object; names file and line.
    """
    with boundary(f"read {path}", ConfigError, OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        with boundary(f"read {path}", ConfigError, ValueError, RecursionError, hint="it begins like a JSON array"):
            rows = json.loads(text)
        numbered = [(f"item {i}", row) for i, row in enumerate(rows)]
    else:
        numbered = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                with boundary(f"read line {number} of {path}", ConfigError, ValueError, RecursionError):
                    numbered.append((f"line {number}", json.loads(line)))
    for where, row in numbered:
        if not isinstance(row, dict):
            raise ConfigError(f"{path}: {where} is not a JSON object", hint="one object a row")
    return [row for _, row in numbered]


def json_files(path: Path) -> list[Path]:
    """The file itself, or the .jsonl and .json files of a folder, sorted by name.

    Raises:
        ConfigError: there is no such path, or nothing in the folder.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"no such file or folder: {path}", hint="path is relative to the working directory")
    files = sorted(p for p in path.iterdir() if p.suffix in (".jsonl", ".json") and p.is_file())
    if not files:
        raise ConfigError(f"no .jsonl or .json file in {path}", hint="give the folder that holds the data files")
    return files


def hub_rows(name: str, config: str | None, split: str, revision: str) -> Iterable[Row]:
    """The rows of a hub data set at one revision.

    Raises:
        ConfigError: the hub is out of reach, or refuses (a gated data set without a login).
    """
    import datasets

    with boundary(
        f"load {name} from the Hugging Face hub",
        ConfigError,
        Exception,
        hint="without the hub give path= to local files; for a gated data set run `hf auth login` first",
    ):
        return list(datasets.load_dataset(name, config, split=split, revision=revision))


def field(row: Row, names: Iterable[str], where: str) -> Any:
    """The first of several spellings of a field that a row has.

    Raises:
        ConfigError: it has none of them.
    """
    names = list(names)
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ConfigError(f"{where} has no field {' or '.join(map(repr, names))}", hint=f"it has: {', '.join(row)}")
