"""The local sandbox beside cold interpreters: CPU a run, runs a second, twenty tests of a program, numpy.

    python benchmarks/sandbox.py [--runs 400]

Prints one line a comparison with the ratio, and exits with 1 if one misses its target. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sdpo_sandbox import Program, Status, open_sandbox

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
NUMPY = "import numpy as np\nprint(int(np.arange(4).sum()))\n"
# Sixty lines that a contest program could have.
LONG = "import sys\n" + "".join(
    f"def f{i}(x):\n    y = [x + k for k in range({i % 7 + 2})]\n    return sum(y) % {i + 11}\n" for i in range(19)
)
LONG += "a, b = map(int, sys.stdin.readline().split())\nprint(sum(f(a) for f in [f3, f5]) * 0 + a + b)\n"


def cpu() -> float:
    """CPU seconds of this process and of all children that have ended."""
    return sum(
        getattr(resource.getrusage(who), field)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        for field in ("ru_utime", "ru_stime")
    )


def cold(command: list[str], code: str, runs: int, workers: int) -> tuple[float, float]:
    """Wall and CPU seconds of `runs` interpreters started one by one on a script."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(code)
        script.flush()

        def one(_: int) -> None:
            done = subprocess.run([*command, script.name], input=b"1 2\n", capture_output=True, check=True)
            assert done.stdout == b"3\n" or code == NUMPY

        before, begun = cpu(), time.perf_counter()
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, range(runs)))
        return time.perf_counter() - begun, cpu() - before


async def warm(
    work: Callable[..., Awaitable[None]], *, slots: int, imports: tuple[str, ...] = ()
) -> tuple[float, float]:
    """Wall and CPU seconds of some work in a sandbox, without its start and end."""

    async def whole(act: Callable[..., Awaitable[None]]) -> tuple[float, float]:
        before = cpu()
        async with open_sandbox("local", slots=slots, imports=imports) as sandbox:
            begun = time.perf_counter()
            await act(sandbox)
            wall = time.perf_counter() - begun
        return wall, cpu() - before

    async def nothing(sandbox: object) -> None:
        return None

    _, start = await whole(nothing)
    wall, used = await whole(work)
    return wall, used - start


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=400)
    runs = parser.parse_args().runs
    cores = len(os.sched_getaffinity(0))
    script, bare = [sys.executable], [sys.executable, "-I", "-S", "-E", "-B"]
    misses = 0

    def tell(what: str, ours: float, theirs: float, unit: str, target: float) -> None:
        nonlocal misses
        ratio = theirs / ours
        misses += ratio < target
        print(f"{what:<34} {ours:9.2f} {unit:<8} cold {theirs:9.2f}   ratio {ratio:5.1f}   target {target}")

    async def many(sandbox: object) -> None:
        async def one() -> None:
            result = await sandbox.run(ADD, "1 2\n")  # type: ignore[attr-defined]
            assert result.stdout == "3\n", result

        await asyncio.gather(*(one() for _ in range(runs)))

    wall, used = await warm(many, slots=cores)
    cold_wall, cold_used = cold(script, ADD, runs // 4, cores)
    tell("CPU a run, python script.py", 1e3 * used / runs, 4e3 * cold_used / runs, "ms", 6)
    tell("time a run, python script.py", 1e3 * wall / runs, 4e3 * cold_wall / runs, "ms", 6)
    print(f"{'runs a second':<34} {runs / wall:9.0f}          cold {runs / 4 / cold_wall:9.0f}")

    async def twenty(sandbox: object) -> None:
        for _ in range(5):
            tests = ["1 2\n"] * 20
            async for result in sandbox.run_many(Program(LONG), tests):  # type: ignore[attr-defined]
                assert result.status is Status.OK
                assert result.stdout == "3\n"

    one_wall, one_used = await warm(twenty, slots=1)
    cold_wall, cold_used = cold(bare, LONG, 100, 1)
    tell("20 tests, one slot, -I -S -E -B", 1e3 * one_wall / 5, 1e3 * cold_wall / 5, "ms", 2)
    tell("20 tests, CPU, -I -S -E -B", 1e3 * one_used / 5, 1e3 * cold_used / 5, "ms", 2)

    if importlib.util.find_spec("numpy") is not None:

        async def numpy(sandbox: object) -> None:
            for _ in range(20):
                result = await sandbox.run(NUMPY)  # type: ignore[attr-defined]
                assert result.stdout == "6\n", result

        numpy_wall, _ = await warm(numpy, slots=1, imports=("numpy",))
        cold_wall, _ = cold(script, NUMPY, 20, 1)
        tell("numpy program, numpy loaded before", 1e3 * numpy_wall / 20, 1e3 * cold_wall / 20, "ms", 6)
    print(f"load {Path('/proc/loadavg').read_text().split()[0]}, {cores} cores")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
