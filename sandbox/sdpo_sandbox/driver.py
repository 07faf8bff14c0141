"""The batched request: what is sent to run many tests of a program at once, and how its answer is read.

The same bytes go to a real Sandbox Fusion server, which runs the driver as any Python program, and to our own, which
recognises the driver and has the fork servers do its work.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import sdpo_sandbox.inside
from sdpo.errors import SandboxError
from sdpo_sandbox.base import MIB, Limits, Program
from sdpo_sandbox.observe import Observation, clean

__all__ = ["DRIVER", "JOB_PATH", "RESULT_PATH", "pack", "pack_result", "unpack", "unpack_result"]

JOB_PATH, RESULT_PATH = "sdpo_sandbox/job.json", "sdpo_sandbox/result.json"
DRIVER = f"""\
import os, sys
sys.path.insert(0, os.getcwd())
from sdpo_sandbox.inside import batch
batch.main({JOB_PATH!r}, {RESULT_PATH!r})
"""
_MOST_BYTES = 32 * MIB
_START_S = 15.0
_BYTES = ("stdout", "stderr", "lines")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _sources() -> dict[str, str]:
    folder = Path(sdpo_sandbox.inside.__file__).parent
    names = ("__init__.py", "batch.py", "harness.py", "values.py")
    files = {f"sdpo_sandbox/inside/{name}": _text((folder / name).read_bytes()) for name in names}
    return {"sdpo_sandbox/__init__.py": _text(b"# the part of the package that runs here\n"), **files}


def pack(program: Program, jobs: Sequence[Mapping[str, Any]], limits: Limits) -> tuple[dict[str, Any], str]:
    """The body of the request for these jobs, and the mark by which its answer is known."""
    nonce = secrets.token_hex(8)
    told = {
        "nonce": nonce,
        "jobs": [dict(job) for job in jobs],
        "limits": {**asdict(limits), "wall_s": limits.wall},
        "files": {name: _text(content) for name, content in program.files.items()},
        "fetch": list(program.fetch),
        "most_bytes": _MOST_BYTES,
    }
    body = {
        "code": DRIVER,
        "language": "python",
        "run_timeout": _START_S + len(jobs) * (limits.wall + 1),
        "files": {**_sources(), JOB_PATH: _text(json.dumps(told).encode())},
        "fetch_files": [RESULT_PATH],
    }
    return body, nonce


def unpack(files: Mapping[str, str | None]) -> tuple[Program, list[dict[str, Any]], Limits, str] | None:
    """The program's files, the jobs, the limits and the mark of a batched request; None if it is not one of this version's.
    The job file comes over the network, so nothing in it is believed to be well formed."""
    if any(files.get(name) != content for name, content in _sources().items()):
        return None
    try:
        told = json.loads(base64.b64decode(files[JOB_PATH] or "", validate=True))
        jobs = [
            {
                "code": str(job["code"]),
                "prelude": str(job["prelude"]),
                "fn": None if job["fn"] is None else str(job["fn"]),
                "call": None if job["call"] is None else str(job["call"]),
                "stdin": clean(str(job["stdin"])),
                "nonce": str(job["nonce"]),
                "result_bytes": int(job["result_bytes"]),
            }
            for job in told["jobs"]
        ]
        asked = told["limits"]
        limits = Limits(
            cpu_s=float(asked["cpu_s"]),
            wall_s=float(asked["wall_s"]),
            memory_mb=int(asked["memory_mb"]),
            output_bytes=int(asked["output_bytes"]),
            result_bytes=int(asked["result_bytes"]),
            stderr_bytes=int(asked["stderr_bytes"]),
        )
        contents = {str(name): base64.b64decode(content, validate=True) for name, content in told["files"].items()}
        program = Program("", files=contents, fetch=tuple(str(name) for name in told["fetch"]))
        return program, jobs, limits, str(told["nonce"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def pack_result(nonce: str, seen: Sequence[Observation]) -> str:
    """The result file, base64."""
    rows = []
    for one in seen:
        row = asdict(replace(one, files={}))
        row |= {name: _text(row[name]) for name in _BYTES}
        row["files"] = {name: _text(content) for name, content in one.files.items()}
        rows.append(row)
    return _text(json.dumps({"nonce": nonce, "seen": rows}).encode())


def unpack_result(content: str, nonce: str) -> list[Observation]:
    """What was observed: at least one test's, not always all.

    Raises:
        SandboxError: not the answer to this request.
    """
    try:
        told = json.loads(base64.b64decode(content, validate=True))
        if told["nonce"] != nonce or not told["seen"]:
            raise SandboxError("the answer belongs to another request")
        seen = []
        for row in told["seen"]:
            row |= {name: base64.b64decode(row[name], validate=True) for name in _BYTES}
            row["files"] = {n: base64.b64decode(c, validate=True) for n, c in row["files"].items()}
            seen.append(Observation(**row))
        return seen
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, RecursionError) as exc:
        raise SandboxError(f"the answer of the driver is not readable: {exc}") from exc
