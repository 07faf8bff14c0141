"""Sandbox Fusion's `/run_code`, answered by the local sandbox: validation, translation, statuses.

Its faults are not reproduced: output arrives whole up to a cap, with `"truncated": true` in the result where it was cut;
memory limits are hard; no file but those of the request can be fetched. Languages other than Python answer SandboxError.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from sdpo.errors import ConfigError, SandboxError
from sdpo_sandbox.base import Limits, RunResult, Status
from sdpo_sandbox.driver import DRIVER, JOB_PATH, RESULT_PATH, pack_result, unpack
from sdpo_sandbox.local import LocalSandbox

__all__ = ["DEFAULT_CAPS", "answer"]

DEFAULT_CAPS = Limits(cpu_s=300.0, wall_s=600.0, memory_mb=4096)
"""What a request may ask for at most. A request without a memory limit gets that of `Limits()`."""

Language = Literal[
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda", "lua",
    "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog", "python_gpu",
    "lean", "swift", "racket",
]  # fmt: skip
_IGNORED_FILE = "IGNORE_THIS_FILE"
_MIN_MEMORY_MB = 16


class RunCodeRequest(BaseModel):
    """The request's fields; unknown ones are ignored."""

    code: str
    language: Language
    stdin: str | None = None
    compile_timeout: float = 10
    run_timeout: float = 10
    memory_limit_MB: int = -1
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


async def answer(sandbox: LocalSandbox, body: bytes, caps: Limits = DEFAULT_CAPS) -> tuple[int, Any]:
    """HTTP status and JSON answer to the body of a `POST /run_code`. Never raises for what the body says."""
    try:
        data = json.loads(body) if body else None
    except (ValueError, RecursionError) as exc:
        place = getattr(exc, "pos", 0)
        fault = {"type": "json_invalid", "loc": ["body", place], "msg": "JSON decode error", "input": {}}
        return 422, {"detail": [{**fault, "ctx": {"error": getattr(exc, "msg", type(exc).__name__)}}]}
    if data is None:
        return 422, {"detail": [{"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}]}
    try:
        request = RunCodeRequest.model_validate(data)
    except ValidationError as exc:
        faults = json.loads(exc.json())
        return 422, {"detail": [{**fault, "loc": ["body", *fault["loc"]]} for fault in faults]}
    try:
        return 200, await _run(sandbox, request, caps)
    except (SandboxError, ConfigError, ValueError) as exc:
        return 200, _response("SandboxError", f"exception on running code {request.code}: {exc} None", None, {})


async def _run(sandbox: LocalSandbox, request: RunCodeRequest, caps: Limits) -> dict[str, Any]:
    if request.language != "python":
        raise SandboxError(f"language {request.language!r} is not served here")
    if request.code == DRIVER and JOB_PATH in request.files:
        return await _batch(sandbox, request.files, caps)
    contents = {
        name: base64.b64decode(content)
        for name, content in request.files.items()
        if content is not None and _IGNORED_FILE not in name
    }
    fetch = [name for name in request.fetch_files if not name.startswith("/") and ".." not in name.split("/")]
    if request.run_timeout <= 0:
        return _response("Failed", "", _result("TimeLimitExceeded", 0.0, None, "", ""), {})
    memory = request.memory_limit_MB if request.memory_limit_MB > 0 else Limits().memory_mb
    most = caps.output_bytes
    asked = Limits(request.run_timeout, request.run_timeout, memory, most, stderr_bytes=most)
    limits = _cap(asked, replace(caps, stderr_bytes=most))
    done = await sandbox.run(request.code, request.stdin or "", limits, contents, "python", fetch)
    files = {name: base64.b64encode(content).decode() for name, content in done.files.items()}
    if done.status is Status.TIME_LIMIT:
        return _response("Failed", "", _result("TimeLimitExceeded", done.wall_s, None, done.stdout, done.stderr), files)
    code = _return_code(done)
    result = _result("Finished", done.wall_s, code, done.stdout, done.stderr, truncated=done.truncated)
    return _response("Success" if code == 0 else "Failed", "", result, files)


async def _batch(sandbox: LocalSandbox, files: Mapping[str, str | None], caps: Limits) -> dict[str, Any]:
    unpacked = unpack(files)
    if unpacked is None:
        raise SandboxError("the batched request comes from another version of sdpo; install the same one on both sides")
    program, jobs, limits, nonce = unpacked
    limits = _cap(limits, caps)
    seen = []
    for job in jobs:
        seen.append(await sandbox.observe(job, limits, program.files, program.fetch))
        if seen[-1].killed:
            break
    result = _result("Finished", sum(one.wall_s for one in seen), 0, "", "")
    return _response("Success", "", result, {RESULT_PATH: pack_result(nonce, seen)})


def _cap(limits: Limits, caps: Limits) -> Limits:
    return replace(
        limits,
        cpu_s=min(limits.cpu_s, caps.cpu_s),
        wall_s=min(limits.wall, caps.wall),
        memory_mb=max(_MIN_MEMORY_MB, min(limits.memory_mb, caps.memory_mb)),
        output_bytes=min(limits.output_bytes, caps.output_bytes),
        result_bytes=min(limits.result_bytes, caps.result_bytes),
        stderr_bytes=min(limits.stderr_bytes, caps.stderr_bytes),
    )


def _return_code(done: RunResult) -> int:
    if done.signal is not None:
        return -done.signal
    if done.status is Status.OK:
        return 0
    return done.exit_code or 1


def _result(
    status: str, seconds: float, code: int | None, stdout: str, stderr: str, *, truncated: bool = False
) -> dict[str, Any]:
    result = {"status": status, "execution_time": seconds, "return_code": code, "stdout": stdout, "stderr": stderr}
    return {**result, "truncated": True} if truncated else result


def _response(status: str, message: str, result: dict[str, Any] | None, files: Mapping[str, str]) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": os.environ.get("MY_POD_NAME"),
        "files": files,
    }
