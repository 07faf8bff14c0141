"""The local sandbox beside cold interpreters: CPU a run, runs a second, twenty tests of a program, numpy.

    python benchmarks/sandbox.py

Prints one line a comparison, and exits with 1 if a ratio misses its target. Run it on a quiet machine, with the interpreter
that you train with: a cold start costs the more the more packages it has.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sdpo_sandbox import Program, Status, open_sandbox
from sdpo_sandbox.base import Sandbox

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
NUMPY = "import numpy as np\nprint(int(np.arange(4).sum()))\n"
# Sixty lines that a contest program could have.
LONG = "import sys\n" + "".join(
    f"def f{i}(x):\n    y = [x + k for k in range({i % 7 + 2})]\n    return sum(y) % {i + 11}\n" for i in range(19)
)
LONG += "a, b = map(int, sys.stdin.readline().split())\nprint(sum(f(a) for f in [f3, f5]) * 0 + a + b)\n"

TARGETS = {
    "CPU a run / python script.py": 6,
    "time a run / python script.py": 6,
    "20 tests / 20 python -I -S -E -B": 2,
    "20 tests, CPU": 2,
    "numpy program / python script.py": 6,
}


def cpu() -> float:
    """CPU seconds of this process and of all children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


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
    work: Callable[[Sandbox], Awaitable[None]], *, slots: int, imports: tuple[str, ...] = ()
) -> tuple[float, float]:
    """Wall and CPU seconds of some work in a sandbox, without its start and end."""

    async def whole(act: Callable[[Sandbox], Awaitable[None]]) -> tuple[float, float]:
        before = cpu()
        async with open_sandbox("local", slots=slots, imports=imports) as sandbox:
            begun = time.perf_counter()
            await act(sandbox)
            wall = time.perf_counter() - begun
        return wall, cpu() - before

    async def nothing(sandbox: Sandbox) -> None:
        await sandbox.run(ADD, "1 2\n")

    _, start = await whole(nothing)
    wall, used = await whole(work)
    return wall, used - start


async def adding(sandbox: Sandbox, runs: int) -> None:
    async def one() -> None:
        result = await sandbox.run(ADD, "1 2\n")
        assert result.stdout == "3\n", result

    await asyncio.gather(*(one() for _ in range(runs)))


async def testing(sandbox: Sandbox, programs: int) -> None:
    for _ in range(programs):
        async for result in sandbox.run_many(Program(LONG), ["1 2\n"] * 20):
            assert (result.status, result.stdout) == (Status.OK, "3\n")


async def numpy(sandbox: Sandbox, runs: int) -> None:
    for _ in range(runs):
        result = await sandbox.run(NUMPY)
        assert result.stdout == "6\n", result


class Table:
    """Milliseconds of ours and of cold interpreters; the rounds alternate, and the median ratio counts."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[float, float]]] = {}

    def add(self, what: str, ours: float, cold: float) -> None:
        self.rows.setdefault(what, []).append((1e3 * ours, 1e3 * cold))

    def show(self) -> bool:
        """Print, and say whether all targets are met."""
        print(f"{'ms, median':<36} {'ours':>8} {'cold':>8} {'ratio':>6} {'target':>7}")
        good = True
        for what, rows in self.rows.items():
            ours, cold = (statistics.median(column) for column in zip(*rows, strict=True))
            ratio = statistics.median(b / a for a, b in rows)
            good &= ratio >= TARGETS[what]
            print(f"{what:<36} {ours:8.2f} {cold:8.2f} {ratio:6.1f} {TARGETS[what]:7.1f}")
        return good


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="of a small program, each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runs, few = options.runs, max(8, options.runs // 8)
    cores = len(os.sched_getaffinity(0))
    script, bare = [sys.executable], [sys.executable, "-I", "-S", "-E", "-B"]
    has_numpy = importlib.util.find_spec("numpy") is not None
    table = Table()
    for _ in range(options.rounds):
        wall, used = await warm(lambda box: adding(box, runs), slots=cores)
        cold_wall, cold_used = cold(script, ADD, few, cores)
        table.add("CPU a run / python script.py", used / runs, cold_used / few)
        table.add("time a run / python script.py", wall / runs, cold_wall / few)
        wall, used = await warm(lambda box: testing(box, 4), slots=1)
        cold_wall, cold_used = cold(bare, LONG, 40, 1)
        table.add("20 tests / 20 python -I -S -E -B", wall / 4, cold_wall / 2)
        table.add("20 tests, CPU", used / 4, cold_used / 2)
        if has_numpy:
            wall, _ = await warm(lambda box: numpy(box, 20), slots=1, imports=("numpy",))
            cold_wall, _ = cold(script, NUMPY, 8, 1)
            table.add("numpy program / python script.py", wall / 20, cold_wall / 8)
    good = table.show()
    rate = 1e3 / statistics.median(ours for ours, _ in table.rows["time a run / python script.py"])
    print(
        f"{rate:.0f} runs a second on {cores} cores; load {Path('/proc/loadavg').read_text().split()[0]}; {sys.executable}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
