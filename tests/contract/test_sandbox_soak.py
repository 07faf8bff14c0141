"""Twenty thousand runs of all kinds, and nothing left behind. `SDPO_SOAK_RUNS` sets another number."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sdpo_sandbox import Limits, Status
from sdpo_sandbox.local import LocalSandbox

RUNS = int(os.environ.get("SDPO_SOAK_RUNS", "20000"))
KINDS: list[tuple[str, Status, int]] = [  # code, status, weight
    ("print(int(input()) * 2)", Status.OK, 80),
    ("input()\n1/0", Status.RUNTIME_ERROR, 10),
    ("import ctypes\nctypes.string_at(0)", Status.RUNTIME_ERROR, 3),
    ("def f(:", Status.COMPILE_ERROR, 3),
    ("import os\nos._exit(3)", Status.NONZERO_EXIT, 3),
    ("while True: pass", Status.TIME_LIMIT, 1),
    ("import time\ntime.sleep(9)", Status.TIME_LIMIT, 1),
    ("while True: print('x' * 10000)", Status.OUTPUT_LIMIT, 1),
    ("b = bytearray(1 << 30)", Status.MEMORY_LIMIT, 1),
    ("import os\nwhile True:\n    try: os.fork()\n    except OSError: break", Status.OK, 1),
]
LIMITS = Limits(cpu_s=0.3, wall_s=1.5, memory_mb=256, output_bytes=1 << 20)


def resident(pid: int | str = "self") -> int:
    """Resident memory in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


def state(pool: LocalSandbox) -> dict[str, Any]:
    servers = [slot._server.pid for slot in pool._all if slot._server]
    children = [Path(f"/proc/{p}/task/{p}/children").read_text().split() for p in servers]
    rooms = [slot._workspace.path for slot in pool._all if slot._workspace]
    return {
        "servers": servers,
        "children": [child for some in children for child in some],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "server descriptors": [len(os.listdir(f"/proc/{p}/fd")) if os.geteuid() == 0 else 0 for p in servers],
        "files": [name for room in rooms for name in os.listdir(room)],
        "rooms": sorted(f for f in os.listdir(tempfile.gettempdir()) if f.startswith("sdpo-sandbox-")),
    }


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_grows_and_nothing_is_lost(own_temporary_folder: None) -> None:
    asyncio.run(soak(RUNS))


async def soak(runs: int) -> None:
    rng = random.Random(0)
    async with LocalSandbox(slots=2) as pool:
        gate = asyncio.Semaphore(8)

        async def one(number: int) -> bool:
            code, status, _ = rng.choices(KINDS, [weight for _, _, weight in KINDS])[0]
            files = {"f": b"x"} if number % 50 == 0 else None
            async with gate:
                result = await pool.run(code, f"{number}\n", LIMITS, files)
            assert result.status is status, (code, result)
            assert not code.startswith("print(int") or result.stdout == f"{2 * number}\n"
            return True

        async def batch(start: int, count: int) -> int:
            return sum(await asyncio.gather(*(one(i) for i in range(start, start + count))))

        done = await batch(0, min(500, runs // 2))  # warm
        gc.collect()
        before, memory = state(pool), [resident(), *map(resident, state(pool)["servers"])]
        while done < runs:
            done += await batch(done, min(1000, runs - done))
        gc.collect()
        after, now = state(pool), [resident(), *map(resident, state(pool)["servers"])]
        assert done == runs
        for name in ("servers", "server descriptors", "files", "rooms"):
            assert after[name] == before[name], name
        assert after["children"] == []
        assert after["descriptors"] <= before["descriptors"]  # fewer: those of earlier tests, collected meanwhile
        assert all(b < a + 8 * 1024 for a, b in zip(memory, now, strict=True)), (memory, now)


def test_a_short_soak(own_temporary_folder: None) -> None:
    asyncio.run(soak(250))
