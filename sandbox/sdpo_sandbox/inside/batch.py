"""All tests of a program in one request: the driver that runs on a Sandbox Fusion server.

The server is given this package as files and a job file with inputs, and hands back a result file. So a program costs one
interpreter start instead of one a test, its output is not cut where the server cuts, and time and memory are limited for
each test. Each test is a forked process with its own directory and hard rlimits; the isolation is the server's.

Job: {"nonce", "jobs": [what `harness.run` takes, and stdin], "limits", "files", "fetch", "most_bytes"}.
Result: {"nonce", "seen": [what `sdpo_sandbox.observe.Observation` holds, bytes as base64]}. The driver may stop early, after
at least one test: behind a time limit, which is costly and mostly the last word, and when it has said much already.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import resource
import select
import shutil
import signal
import sys
import time
from typing import Any, NoReturn

from sdpo_sandbox.inside import harness

__all__ = ["main"]

_KEPT_FDS = 4


def main(job_path: str, result_path: str) -> None:
    """Run the tests of a job file and write the result file."""
    with open(job_path, encoding="utf-8") as file:
        job = json.load(file)
    ready = {p: harness.prepare(p) for p in {j["prelude"] for j in job["jobs"]} if p}
    seen: list[dict[str, Any]] = []
    told = 0
    for i, one in enumerate(job["jobs"]):
        room = os.path.abspath("test-%d" % i)
        _lay_out(room, job["files"])
        seen.append(_observe(one, job["limits"], room, ready))
        seen[-1]["files"] = _fetch(room, job["fetch"], job["limits"]["output_bytes"])
        shutil.rmtree(room, ignore_errors=True)
        told += len(seen[-1]["stdout"]) + len(seen[-1]["lines"])
        if seen[-1]["killed"] or told > job["most_bytes"]:
            break
    with open(result_path, "w", encoding="ascii") as file:
        json.dump({"nonce": job["nonce"], "seen": seen}, file)


def _lay_out(room: str, files: dict[str, str]) -> None:
    os.mkdir(room)
    for name, content in files.items():
        path = os.path.join(room, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))


def _fetch(room: str, names: list[str], most: int) -> dict[str, str]:
    found = {}
    for name in names:
        path = os.path.join(room, name)
        if os.path.isfile(path) and not os.path.islink(path):
            with open(path, "rb") as file:
                found[name] = base64.b64encode(file.read(most)).decode()
    return found


def _observe(job: dict[str, Any], limits: dict[str, Any], room: str, ready: harness.Ready) -> dict[str, Any]:
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "result")]
    stdin, stdout, stderr, result = files
    view = memoryview(job["stdin"].encode("utf-8"))
    while view:
        view = view[os.write(stdin, view) :]
    os.lseek(stdin, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        _child(job, limits, room, files, ready)
    begun = time.monotonic()
    killed = _wait(pid, begun + limits["wall_s"])
    _, status, usage = os.wait4(pid, 0)
    wall = time.monotonic() - begun
    cpu = usage.ru_utime + usage.ru_stime
    if status == signal.SIGKILL and not killed and cpu > limits["cpu_s"] - 0.1:
        killed = "cpu"  # by its hard limit
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it left behind
    sizes = [os.fstat(fd).st_size for fd in files]
    out = os.pread(stdout, limits["output_bytes"], 0)
    half = limits["stderr_bytes"] // 2
    err = os.pread(stderr, half, 0) + os.pread(stderr, half, max(half, sizes[2] - half))
    lines = os.pread(result, limits["result_bytes"] + (64 << 10), 0)
    for fd in files:
        os.close(fd)
    return {
        "wait_status": status,
        "killed": killed,
        "cpu_s": cpu,
        "wall_s": wall,
        "peak_bytes": usage.ru_maxrss << 10,
        "stdout": base64.b64encode(out).decode(),
        "stdout_bytes": sizes[1],
        "stderr": base64.b64encode(err).decode(),
        "stderr_bytes": sizes[2],
        "lines": base64.b64encode(lines).decode(),
    }


def _wait(pid: int, deadline: float) -> str:
    """Until the process has ended: "", or is killed at the deadline: "wall"."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    os.close(pidfd)
    if ended:
        return ""
    os.kill(pid, signal.SIGKILL)
    return "wall"


def _child(job: dict[str, Any], limits: dict[str, Any], room: str, files: list[int], ready: harness.Ready) -> NoReturn:
    try:
        os.setsid()
        os.chdir(room)
        for target, fd in enumerate([os.dup(fd) for fd in files]):
            os.dup2(fd, target)
        os.closerange(_KEPT_FDS, 256)
        harness.set_up()
        sys.path[:] = [p for p in sys.path if p not in ("", os.path.dirname(room))]
        with open("/proc/self/statm") as file:
            memory = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        cpu = math.ceil(limits["cpu_s"])
        size = max(limits["output_bytes"] + 1, limits["result_bytes"] + (64 << 10))
        for limit, most in (
            (resource.RLIMIT_AS, memory + (limits["memory_mb"] << 20)),
            (resource.RLIMIT_CPU, cpu),
            (resource.RLIMIT_FSIZE, size),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (most, most))
    except BaseException as exc:
        os.write(2, ("%s: %s\n" % (type(exc).__name__, exc)).encode("utf-8", "replace"))
        os._exit(1)
    harness.run(job, ready)
