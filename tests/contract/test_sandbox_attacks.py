"""Attacks on the sandbox: each is shown to work without it, where that is harmless, and to be stopped in it: as root (or
whoever runs the tests), as an ordinary user, and at the level without Landlock.

The programs of `sandbox_attacks.jsonl` are graded by a small judge, since a sandbox gives no verdicts.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from sdpo.errors import SandboxError
from sdpo_sandbox import COMPETITION_PRELUDE, Call, Limits, Program, RunResult, Status
from sdpo_sandbox.attacks import ATTACKS, Attack, World, run_attack
from sdpo_sandbox.levels import Level, offer
from sdpo_sandbox.local import LocalSandbox

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT.parent / "shared" / "cases" / "sandbox_attacks.jsonl"
OFFERS = {level: offer(level) for level in Level}
LEVELS = [Level.FULL, Level.NO_OPEN]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World() as made:
        yield made


@pytest.fixture(scope="module", params=LEVELS, ids=str)
def pool(request: pytest.FixtureRequest, world: World) -> Iterator[LocalSandbox]:
    if not OFFERS[request.param]:
        pytest.skip(f"this machine does not offer {request.param}")
    made = LocalSandbox(slots=2, level=request.param)
    yield made
    asyncio.run(made.close())


def plainly(attack: Attack, world: World) -> bool:
    """Whether the attack works in an ordinary interpreter."""
    results = []
    for code in attack.codes:
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", world.source(code)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            text=True,
            timeout=60,
            check=False,
        )
        results.append(RunResult(Status.OK, stdout=done.stdout, wall_s=time.monotonic() - begun))
    return attack.succeeded(world, results)


# Not every machine lets these succeed: no root, hardened kernels, containers that filter system calls themselves.
DEPENDS_ON_MACHINE = {
    "ptrace another process",
    "mount a file system",
    "io_uring, bpf, keyctl, userfaultfd, perf",
    "a 32-bit system call",
    "memory of the trusted process",
}


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.harmless], ids=lambda a: a.name)
def test_the_attack_works_without_a_sandbox(attack: Attack, world: World) -> None:
    if not plainly(attack, world):
        assert attack.name in DEPENDS_ON_MACHINE
        pytest.skip("this machine stops it by itself")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.name)
def test_the_attack_is_stopped(attack: Attack, pool: LocalSandbox, world: World) -> None:
    stopped, said = asyncio.run(run_attack(pool, attack, world))
    assert stopped, said
    assert asyncio.run(pool.run("print('still here')")).stdout == "still here\n"
    assert world.victim.poll() is None


def test_there_are_at_least_thirty() -> None:
    assert len(ATTACKS) >= 30
    assert len({a.name for a in ATTACKS}) == len(ATTACKS)
    assert sum(a.harmless for a in ATTACKS) >= 20


def _interpreter_for_all() -> str | None:
    """A Python that an ordinary user may start, of a version that we support."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if not os.path.exists(path):
            continue
        probe = "import sys; sys.exit(sys.version_info < (3, 10))"
        try:
            if (
                subprocess.run([path, "-c", probe], user=65534, group=65534, extra_groups=[], check=False).returncode
                == 0
            ):
                return path
        except OSError:
            continue
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; the other tests run as one already")
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_an_ordinary_user_is_as_safe(level: Level, tmp_path: Path) -> None:
    if not OFFERS[level]:
        pytest.skip(f"this machine does not offer {level}")
    python = _interpreter_for_all()
    if python is None:
        pytest.skip("no interpreter that an ordinary user may start")
    if subprocess.run(
        ["test", "-r", str(ROOT / "sdpo" / "errors.py")], user=65534, group=65534, check=False
    ).returncode:
        pytest.skip("the source tree is not readable for an ordinary user")
    script = tmp_path / "as_user.py"
    script.write_text(
        "import asyncio, json, os, sys\n"
        "from sdpo_sandbox.attacks import World, run_attacks\n"
        "from sdpo_sandbox.levels import Level\n"
        "from sdpo_sandbox.local import LocalSandbox\n"
        "async def main(world):\n"
        "    async with LocalSandbox(slots=1, level=Level(sys.argv[1])) as pool:\n"
        "        return await run_attacks(pool, world)\n"
        "assert os.getuid() == 65534\n"
        "with World() as world:\n"
        "    print(json.dumps([(a.name, stopped, said) for a, stopped, said in asyncio.run(main(world))]))\n"
    )
    done = subprocess.run(
        [python, "-B", "-", str(level)],
        input=script.read_text(),
        capture_output=True,
        text=True,
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'sandbox'}", "PATH": "/usr/bin:/bin"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == len(ATTACKS)
    assert [name for name, stopped, _ in outcomes if not stopped] == []


BEYOND_BUBBLEWRAP = {  # what the README says of this level
    "signal the trusted process",  # its own fork server, which is then started again
    "3 times 400 MB over forks",
    "600 MB in memory files",
    "leave shared memory behind",  # in a namespace of its own
    "a child that keeps the output open",
    "io_uring, bpf, keyctl, userfaultfd, perf",
    "a 32-bit system call",
}


@pytest.mark.skipif(not OFFERS[Level.BWRAP], reason="bubblewrap is not installed or may not make namespaces")
def test_bubblewrap_stops_what_it_says(world: World) -> None:
    try:
        made = LocalSandbox(slots=1, level=Level.BWRAP, python=_interpreter_for_all() if os.geteuid() == 0 else None)
    except SandboxError as exc:
        pytest.skip(f"bubblewrap cannot start here: {exc}")

    async def use() -> None:
        async with made as pool:
            for attack in ATTACKS:
                stopped, said = await run_attack(pool, attack, world)
                assert stopped or attack.name in BEYOND_BUBBLEWRAP, (attack.name, said)
            assert (await pool.run("print(open('a').read())", files={"a": b"hi"})).stdout == "hi\n"

    asyncio.run(use())


# -- the recorded programs ------------------------------------------------------------------------------------------------


def cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CASES.read_text().splitlines()] if CASES.is_file() else []


VERDICT = {
    Status.COMPILE_ERROR: "compile_error",
    Status.RUNTIME_ERROR: "runtime_error",
    Status.MEMORY_LIMIT: "runtime_error",  # a MemoryError to the program
    Status.PROTOCOL_ERROR: "runtime_error",  # it wrote where it has nothing to write
    Status.TIME_LIMIT: "timeout",
    Status.OUTPUT_LIMIT: "output_limit",
}


def same_text(have: str, want: str) -> bool:
    rows = [[line.strip() for line in text.strip().split("\n")] for text in (have, want)]
    if len(rows[0]) != len(rows[1]):
        return False
    for a, b in zip(*rows, strict=True):
        try:
            if a != b and [Decimal(x) for x in a.split()] != [Decimal(x) for x in b.split()]:
                return False
        except ArithmeticError:
            return False
    return True


def lists(value: Any) -> Any:
    return [lists(v) for v in value] if isinstance(value, (list, tuple)) else value


async def verdict(pool: LocalSandbox, case: dict[str, Any]) -> str:
    allowed = case["expected"].get("timeout_s")
    limits = Limits(cpu_s=allowed or 6, wall_s=1.5 * allowed if allowed else None)
    function = case["type"] == "functional"
    tests: list[Any] = [test["input"] for test in case["tests"]]
    if function:
        tests = [Call([json.loads(line) for line in text.rstrip("\n").split("\n")]) for text in tests]
    program = Program(case["code"], fn_name=case["fn_name"], prelude=COMPETITION_PRELUDE if function else "")
    wanted = iter(case["tests"])
    async for result in pool.run_many(program, tests, limits):
        want = next(wanted)["output"]
        if result.status in VERDICT:
            return VERDICT[result.status]
        if not (lists(result.value) == json.loads(want) if function else same_text(result.stdout, want)):
            return "wrong_answer"
    return "pass"


@pytest.fixture(scope="module")
def best() -> Iterator[LocalSandbox]:
    made = LocalSandbox(slots=2)
    yield made
    asyncio.run(made.close())


@pytest.mark.skipif(not CASES.is_file(), reason=f"{CASES} is not there")
@pytest.mark.parametrize("case", cases(), ids=lambda c: c["id"])
def test_recorded_program(case: dict[str, Any], best: LocalSandbox) -> None:
    expected = case["expected"]
    begun = time.monotonic()
    got = asyncio.run(verdict(best, case))
    took = time.monotonic() - begun
    assert got in expected["verdict"].split("|")
    assert (got == "pass") is bool(expected["reward"])
    if os.getloadavg()[0] < 1.5 * len(os.sched_getaffinity(0)):  # on a crowded machine the clock says little
        assert took < expected.get("max_wall_s", 30) + 2


def test_all_programs_are_there() -> None:
    if not CASES.is_file():
        pytest.skip(f"{CASES} is not there")
    assert len(cases()) > 70
    assert {re.match(r"[a-z]+", c["id"])[0] for c in cases()} == {  # type: ignore[index]
        "exit",
        "leak",
        "obj",
        "chan",
        "cmp",
        "res",
        "esc",
        "ok",
    }
