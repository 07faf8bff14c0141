"""The local sandbox, really run: statuses, functions, files, cancellation, loops and threads, lost fork servers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sdpo.errors import ConfigError, SandboxError
from sdpo_sandbox import COMPETITION_PRELUDE, Call, Frame, Limits, Program, RunResult, Status, open_sandbox
from sdpo_sandbox.base import Sandbox, Test
from sdpo_sandbox.levels import Level, choose
from sdpo_sandbox.local import LocalSandbox

T = TypeVar("T")
QUICK = Limits(cpu_s=2, wall_s=5, memory_mb=256)


def go(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def run(sandbox: LocalSandbox, code: str, stdin: str = "", limits: Limits = QUICK, **more: Any) -> RunResult:
    return go(sandbox.run(code, stdin, limits, **more))


async def all_of(sandbox: LocalSandbox, program: Program, tests: list[Test], limits: Limits = QUICK) -> list[RunResult]:
    return [result async for result in sandbox.run_many(program, tests, limits)]


def call(sandbox: LocalSandbox, code: str, *args: Any, name: str = "f", prelude: str = "") -> RunResult:
    return go(all_of(sandbox, Program(code, fn_name=name, prelude=prelude), [Call(args)]))[0]


def test_it_is_a_sandbox(sandbox: LocalSandbox) -> None:
    assert isinstance(sandbox, Sandbox)


def test_a_program_reads_and_prints(sandbox: LocalSandbox) -> None:
    result = run(sandbox, "print(sum(map(int, input().split())))", "1 2\n")
    assert (result.status, result.stdout, result.stderr, result.exit_code) == (Status.OK, "3\n", "", 0)
    assert 0 < result.cpu_s < 2
    assert 0 < result.wall_s < 5
    assert 5 < result.peak_memory_mb < 100


@pytest.mark.parametrize(
    ("code", "stdin", "stdout"),
    [
        ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "ab\ncd\n", "ba\ndc\n"),
        ("import sys\nr = sys.stdin.buffer.readline\nprint(int(r()) + int(r()))", "1\n2\n", "3\n"),
        ("import os\nprint(input(), os.read(0, 10))", "a\nb\n", "a b''\n"),  # the text layer has read ahead, as always
        ("print(open(0).read())", "x", "x\n"),
        ("import sys\nsys.stdin.seek(0)\nprint(sys.stdin.read())", "y", "y\n"),
        ("import os\nos.write(1, b'raw')", "", "raw"),
        ("import sys\nsys.stdout.buffer.write(b'buf')", "", "buf"),
        ("out = open(1, 'w')\nout.write('never closed')", "", "never closed"),
        ("import atexit\natexit.register(print, 'bye')\nprint('hi')", "", "hi\nbye\n"),
        ("if __name__ == '__main__':\n    print('main')\n", "", "main\n"),
        ("import sys\nprint(sys.argv, __file__)", "", "['main.py'] main.py\n"),
        ("x = 1\ndef f():\n    global x\n    x += 1\nf()\nprint(x, globals()['x'])", "", "2 2\n"),
        ("from __future__ import annotations\nprint('future')", "", "future\n"),
        ("print('π', input())", "∑\n", "π ∑\n"),
        ("print(10**5000 % 7, len(str(10**5000)))", "", "2 5001\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\nprint(A())", "", "A(x=1)\n"),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)", "", "A\n"),
        ("import asyncio\nasync def m():\n    await asyncio.sleep(0)\n    print('a')\nasyncio.run(m())", "", "a\n"),
        ("import threading\nt = threading.Thread(target=print, args=(1,))\nt.start()", "", "1\n"),
        (
            "from concurrent.futures import ThreadPoolExecutor as P\nwith P(3) as p: print(*p.map(abs, [-1, 2]))",
            "",
            "1 2\n",
        ),
        (
            "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(100000))",
            "",
            "100000\n",
        ),
        pytest.param(
            "import sys, functools\nsys.setrecursionlimit(10**6)\n@functools.cache\ndef f(n): return n and 1 + f(n - 1)\n"
            "print(f(50000))",
            "",
            "50000\n",
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="3.12 limits recursion through C itself"),
        ),
        (
            "import threading, sys\nthreading.stack_size(128 << 20)\nt = threading.Thread(target=lambda: print('deep'))\n"
            "t.start()\nt.join()",
            "",
            "deep\n",
        ),
        # fast input and output as contest programs bring it: an object without `closed`, flushed by an exit function
        (
            "import sys, os, io, atexit\n"
            "class Out:\n"
            "    def __init__(self): self.parts = []\n"
            "    def write(self, s): self.parts.append(s)\n"
            "    def flush(self):\n        os.write(1, ''.join(self.parts).encode())\n        self.parts = []\n"
            "sys.stdout = Out()\nprint('fast')",
            "",
            "fast\n",
        ),
        (
            "import sys, io, atexit\nsys.stdout = b = io.StringIO()\n"
            "atexit.register(lambda: sys.__stdout__.write(b.getvalue()))\nprint('late')",
            "",
            "late\n",
        ),
        ("import sys\nsys.stdout.write('gone')\nsys.stdout.flush()\nsys.stdout.close()", "", "gone"),
        ("import sys\nsys.stdout = None", "", ""),
        ("class R:\n    def __del__(self): print('collected')\nr = R()\nr.me = r", "", "collected\n"),
        ("import sqlite3, ssl, zoneinfo, decimal\nprint('late imports')", "", "late imports\n"),
        ("print(input())\nexit()", "a\n", "a\n"),
    ],
)
def test_programs_see_a_real_interpreter(sandbox: LocalSandbox, code: str, stdin: str, stdout: str) -> None:
    result = run(sandbox, code, stdin)
    assert (result.status, result.stdout) == (Status.OK, stdout), result


def test_large_input_and_output_arrive_whole(sandbox: LocalSandbox) -> None:
    text = "0123456789" * 300_000
    result = run(sandbox, "print(input())", text)
    assert result.stdout == text + "\n"
    assert not result.truncated
    assert run(sandbox, "print('unread')", text).stdout == "unread\n"


@pytest.mark.parametrize(
    ("code", "status", "facts"),
    [
        ("import sys\nsys.exit(3)", Status.NONZERO_EXIT, {"exit_code": 3}),
        ("import os\nos._exit(7)", Status.NONZERO_EXIT, {"exit_code": 7}),
        ("import sys\nsys.exit(0)", Status.OK, {"exit_code": 0}),
        ("import sys\nsys.exit('bye')", Status.NONZERO_EXIT, {"exit_code": 1, "stderr": "bye\n"}),
        ("import sys\nsys.exit(256)", Status.OK, {"exit_code": 0}),
        ("raise KeyboardInterrupt", Status.RUNTIME_ERROR, {"exit_code": 1}),
        ("import os\nos.abort()", Status.RUNTIME_ERROR, {"signal": signal.SIGABRT, "exit_code": None}),
        ("import ctypes\nctypes.string_at(0)", Status.RUNTIME_ERROR, {"signal": signal.SIGSEGV}),
        ("import os\nos.kill(os.getpid(), 9)", Status.RUNTIME_ERROR, {"signal": signal.SIGKILL}),
        ("def f(:", Status.COMPILE_ERROR, {}),
        ("x = '\0'", Status.COMPILE_ERROR, {}),
        ("x = " + "(" * 5000 + ")" * 5000, Status.COMPILE_ERROR, {}),
        ("b = bytearray(1 << 30)", Status.MEMORY_LIMIT, {}),
        ("import os\nos.close(3)\nprint(1)", Status.OK, {"stdout": "1\n"}),
        ("import os\nos.write(3, b'x')", Status.PROTOCOL_ERROR, {}),
        (
            "class E(Exception):\n    def __str__(self):\n        import os\n        os._exit(0)\nraise E",
            Status.RUNTIME_ERROR,
            {},
        ),
        ("import sys\nsys.excepthook = lambda *a: sys.exit(0)\n1/0", Status.RUNTIME_ERROR, {}),
    ],
)
def test_how_programs_end(sandbox: LocalSandbox, code: str, status: Status, facts: dict[str, Any]) -> None:
    result = run(sandbox, code)
    assert result.status is status, result
    for name, value in facts.items():
        assert getattr(result, name) == value


def test_errors_name_the_line_of_the_users_code(sandbox: LocalSandbox) -> None:
    code = "def f(x):\n    return 1 // x\n\nprint('before')\nf(0)\n"
    for prelude in ("", COMPETITION_PRELUDE, "import math\n" * 40):
        result = go(all_of(sandbox, Program(code, prelude=prelude), [""]))[0]
        assert result.stdout == "before\n"
        assert result.error is not None
        assert (result.error.type, result.error.message) == ("ZeroDivisionError", "integer division or modulo by zero")
        assert result.error.frames == (Frame(5, "<module>"), Frame(2, "f"))
        assert "return 1 // x" in result.stderr
        assert "harness" not in result.stderr


def test_a_syntax_error_names_its_line(sandbox: LocalSandbox) -> None:
    result = run(sandbox, "x = 1\nfor\n")
    assert result.error is not None
    assert (result.error.type, result.error.frames) == ("SyntaxError", (Frame(2, "<module>"),))


def test_a_deep_traceback_is_bounded(sandbox: LocalSandbox) -> None:
    result = run(sandbox, "def f(n): return f(n + 1)\nf(0)")
    assert result.error is not None
    assert (result.error.type, len(result.error.frames)) == ("RecursionError", 20)
    assert "more frames]" in result.stderr
    assert len(result.stderr) < 3000


def test_time_is_judged_by_cpu_to_the_tenth(sandbox: LocalSandbox) -> None:
    result = run(sandbox, "while True: pass", limits=Limits(cpu_s=0.5, wall_s=30))
    assert result.status is Status.TIME_LIMIT
    assert 0.45 < result.cpu_s < 0.8
    assert result.exit_code is None


def test_sleeping_ends_at_the_wall_and_keeps_what_was_flushed(sandbox: LocalSandbox) -> None:
    code = "import time\nprint('kept', flush=True)\nprint('lost')\ntime.sleep(60)"
    result = run(sandbox, code, limits=Limits(cpu_s=0.2, wall_s=0.5))
    assert (result.status, result.stdout) == (Status.TIME_LIMIT, "kept\n")
    assert 0.5 <= result.wall_s < 2


def test_waiting_does_not_count_as_cpu(sandbox: LocalSandbox) -> None:
    result = run(sandbox, "import time\ntime.sleep(0.5)\nprint(1)", limits=Limits(cpu_s=0.2, wall_s=10))
    assert result.status is Status.OK


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell how long a process waits"
)
def test_a_crowded_machine_does_not_fail_a_program_that_computes(sandbox: LocalSandbox) -> None:
    spin = "import time\nuntil = time.process_time() + 0.6\nwhile time.process_time() < until: pass\nprint('done')"
    endless = [sys.executable, "-c", "while True: pass"]
    crowd = [subprocess.Popen(endless, start_new_session=True) for _ in range(3 * len(os.sched_getaffinity(0)))]
    try:
        result = run(sandbox, spin, limits=Limits(cpu_s=5, wall_s=1.0))
        assert (result.status, result.stdout) == (Status.OK, "done\n")
        assert result.wall_s > 1.0  # without the crowd as an excuse it would have been killed
        asleep = run(sandbox, "import time\ntime.sleep(60)", limits=Limits(cpu_s=5, wall_s=0.5))
        assert asleep.status is Status.TIME_LIMIT
        assert asleep.wall_s < 2
    finally:
        for process in crowd:
            process.kill()
            process.wait()


def test_cpu_of_all_threads_counts(sandbox: LocalSandbox) -> None:
    code = (
        "import hashlib, threading\n"
        "def f():\n    while True: hashlib.sha256(bytes(1 << 20))\n"
        "threading.Thread(target=f).start()\nf()"
    )
    result = run(sandbox, code, limits=Limits(cpu_s=0.5, wall_s=30))
    assert result.status is Status.TIME_LIMIT
    assert result.cpu_s < 3


def test_limits_are_hard(sandbox: LocalSandbox) -> None:
    code = (
        "import resource\n"
        "for name in ('AS', 'CPU', 'FSIZE', 'NOFILE', 'CORE', 'MEMLOCK', 'STACK'):\n"
        "    kind = getattr(resource, 'RLIMIT_' + name)\n"
        "    soft, hard = resource.getrlimit(kind)\n"
        "    assert hard >= 0, name\n"
        "    try: resource.setrlimit(kind, (hard + 1, hard + 1))\n"
        "    except (ValueError, OSError): continue\n"
        "    print(name, 'was raised')\n"
    )
    assert run(sandbox, code).stdout == ""


def test_output_is_cut_where_it_was_agreed(sandbox: LocalSandbox) -> None:
    limits = Limits(cpu_s=2, output_bytes=1000, stderr_bytes=100)
    result = run(sandbox, "print('x' * 999)", limits=limits)
    assert (result.status, len(result.stdout)) == (Status.OK, 1000)
    result = run(sandbox, "print('x' * 5000000)", limits=limits)
    assert (result.status, len(result.stdout), result.truncated) == (Status.OUTPUT_LIMIT, 1000, True)
    result = run(sandbox, "import sys\nsys.stderr.write('a' * 80 + 'z' * 80)", limits=limits)
    assert (result.stderr, result.truncated) == ("a" * 50 + "z" * 50, True)
    assert result.status is Status.OK


def test_functions_return_exact_values(sandbox: LocalSandbox) -> None:
    assert call(sandbox, "def f(a, b): return a + b", 1, 2).value == 3
    assert call(sandbox, "class Solution:\n    def f(self, a): return {a: (a, {a})}", 4).value == {4: (4, {4})}
    assert call(sandbox, "f = lambda *, k=1: k").value == 1
    result = call(sandbox, "def f(): print('noise'); return None")
    assert (result.has_value, result.value, result.stdout) == (True, None, "noise\n")


def test_a_class_in_a_comment_is_no_class(sandbox: LocalSandbox) -> None:
    assert call(sandbox, "# class Solution is not needed\ndef f(a): return a", 1).value == 1
    assert call(sandbox, "class Solution:\n    pass\ndef f(a): return a", 1).value == 1


def test_the_prelude_gives_names_but_no_answers(sandbox: LocalSandbox) -> None:
    code = "class Solution:\n    def f(self, xs: List[int]) -> Optional[int]:\n        return max(Counter(xs).values())"
    assert call(sandbox, code, [1, 1, 2], prelude=COMPETITION_PRELUDE).value == 2
    assert call(sandbox, "def f(): return pow(2, 5, 7)", prelude=COMPETITION_PRELUDE).value == 4
    missing = call(sandbox, "def other(): return 1", 12, 18, name="gcd", prelude=COMPETITION_PRELUDE)
    assert missing.status is Status.RUNTIME_ERROR
    assert missing.error is not None
    assert "no function 'gcd'" in missing.error.message
    assert (
        call(sandbox, "import sys\ndef f(): return sys.getrecursionlimit()", prelude=COMPETITION_PRELUDE).value == 50000
    )
    assert call(sandbox, "import sys\ndef f(): return sys.getrecursionlimit()").value == 1000


def test_the_prelude_names_the_streams_of_this_run(sandbox: LocalSandbox) -> None:
    program = Program("stdout.write(stdin.read())", prelude=COMPETITION_PRELUDE)
    assert [r.stdout for r in go(all_of(sandbox, program, ["a", "b"]))] == ["a", "b"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys\ndef f(): sys.exit(0)", Status.RUNTIME_ERROR),
        ("import os\nos._exit(0)\ndef f(): return 1", Status.RUNTIME_ERROR),
        ("def f():\n    yield 1", Status.RUNTIME_ERROR),
        ("def f(): return 10**60000", Status.RUNTIME_ERROR),
        ("def f(): return 'x' * (5 << 20)", Status.OUTPUT_LIMIT),
        ("def g(): return 1", Status.RUNTIME_ERROR),
        ("def f(): return bytearray(1 << 30)", Status.MEMORY_LIMIT),
        ("import os\ndef f():\n    os.write(3, b'x value 1\\n')\n    return 1", Status.PROTOCOL_ERROR),
    ],
)
def test_functions_that_give_no_value(sandbox: LocalSandbox, code: str, status: Status) -> None:
    result = call(sandbox, code)
    assert (result.status, result.has_value) == (status, False), result


def test_a_lingering_thread_does_not_hold_a_function_up(sandbox: LocalSandbox) -> None:
    code = "import threading, time\ndef f():\n    threading.Thread(target=time.sleep, args=(30,)).start()\n    return 1"
    result = call(sandbox, code)
    assert result.value == 1
    assert result.wall_s < 3


def test_a_lingering_thread_holds_a_stdin_program_up(sandbox: LocalSandbox) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(30,)).start()\nprint(1)"
    assert run(sandbox, code, limits=Limits(cpu_s=1, wall_s=1)).status is Status.TIME_LIMIT


def test_each_test_is_a_fresh_process(sandbox: LocalSandbox) -> None:
    code = (
        "import builtins, sys\n"
        "print(getattr(builtins, 'mark', 'clean'), 'mark' in sys.modules)\n"
        "builtins.mark = sys.modules['mark'] = 1"
    )
    results = go(all_of(sandbox, Program(code), [""] * 6))
    assert {r.stdout for r in results} == {"clean False\n"}


def test_results_come_in_order_and_leaving_stops_the_rest(sandbox: LocalSandbox) -> None:
    program = Program("import time\nn = int(input())\ntime.sleep(0.3 if n == 0 else 0)\nprint(n)")

    async def first(count: int) -> list[str]:
        found = []
        async for result in sandbox.run_many(program, [str(i) for i in range(50)], QUICK):
            found.append(result.stdout)
            if len(found) == count:
                break
        return found

    assert go(first(5)) == ["0\n", "1\n", "2\n", "3\n", "4\n"]
    endless = Program("while True: pass")

    async def leave() -> float:
        stream = sandbox.run_many(endless, ["", "", ""], Limits(cpu_s=0.3, wall_s=20))
        await anext(stream)
        begun = time.perf_counter()
        await stream.aclose()
        return time.perf_counter() - begun

    assert go(leave()) < 5


def test_cancelling_kills_the_program_and_frees_the_slot(sandbox: LocalSandbox) -> None:
    async def cancel() -> float:
        runs = [asyncio.create_task(sandbox.run("while True: pass", "", Limits(cpu_s=60))) for _ in range(6)]
        await asyncio.sleep(0.5)
        begun = time.perf_counter()
        for one in runs:
            one.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*runs, return_exceptions=True))
        assert (await sandbox.run("print(1)")).stdout == "1\n"
        return time.perf_counter() - begun

    assert go(cancel()) < 5


def test_many_tasks_threads_and_loops_at_once(sandbox: LocalSandbox) -> None:
    found: list[str] = []

    def one_loop(base: int) -> None:
        async def many() -> None:
            runs = [sandbox.run("print(int(input()) * 2)", str(base + i)) for i in range(20)]
            found.extend([r.stdout for r in await asyncio.gather(*runs)])

        asyncio.run(many())

    threads = [threading.Thread(target=one_loop, args=(100 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, found)) == sorted(2 * (100 * n + i) for n in range(3) for i in range(20))


def test_files_go_in_and_come_out(sandbox: LocalSandbox) -> None:
    code = (
        "import os\n"
        "print(open('dir/a.txt').read(), sorted(os.listdir('.')))\n"
        "os.makedirs('out', exist_ok=True)\n"
        "open('out/x.bin', 'wb').write(b'\\xff')\n"
        "try: open('other', 'w')\n"
        "except OSError as e: print(type(e).__name__)\n"
    )
    result = run(sandbox, code, files={"dir/a.txt": b"hello", "b": b""}, fetch=["out/x.bin", "never"])
    assert result.stdout == "hello ['b', 'dir', 'never', 'out']\nPermissionError\n"
    assert result.files == {"out/x.bin": b"\xff"}
    again = run(sandbox, "import os\nprint(os.path.exists('dir'), os.path.exists('b'))")
    assert again.stdout == "False False\n"
    with pytest.raises(ConfigError, match="outside the working directory"):
        run(sandbox, "", files={"../x": b""})


def test_a_program_cannot_reach_the_files_of_another_run(sandbox: LocalSandbox) -> None:
    hunt = "import os, glob\nprint(glob.glob('/tmp/sdpo-sandbox-*/run/*'), os.getcwd())"
    assert run(sandbox, hunt).stdout == "[] /\n"


def test_a_lost_fork_server_is_started_again_and_the_run_repeated() -> None:
    async def lose() -> list[RunResult]:
        async with LocalSandbox(slots=1) as pool:
            assert (await pool.run("print(1)")).stdout == "1\n"
            server = pool._all[0]._server
            assert server is not None
            slow = asyncio.create_task(pool.run("import time\ntime.sleep(1)\nprint(2)"))
            await asyncio.sleep(0.4)
            server.kill()
            first = await slow
            assert pool._all[0]._server is not server
            return [first, await pool.run("print(3)")]

    assert [r.stdout for r in go(lose())] == ["2\n", "3\n"]


def test_a_fork_server_that_is_always_lost_is_an_error_and_no_verdict() -> None:
    async def lose() -> None:
        async with LocalSandbox(slots=1) as pool:
            stop = threading.Event()

            def killer() -> None:
                while not stop.is_set():
                    server = pool._all[0]._server
                    if server is not None:
                        server.kill()
                    time.sleep(0.01)

            thread = threading.Thread(target=killer)
            thread.start()
            try:
                with pytest.raises(SandboxError, match=r"lost 3 times|did not start"):
                    await pool.run("import time\ntime.sleep(5)")
            finally:
                stop.set()
                thread.join()
            assert (await pool.run("print('back')")).stdout == "back\n"

    go(lose())


def test_nothing_is_left_behind() -> None:
    def fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def use() -> list[int]:
        async with LocalSandbox(slots=2) as pool:
            pids = [slot._server.pid for slot in pool._all if slot._server]
            for code in ("print(1)", "1/0", "while True: pass", "print('x' * (17 << 20))"):
                await pool.run(code, "", Limits(cpu_s=0.2))
            rooms = [slot._workspace.path for slot in pool._all if slot._workspace]
        assert not any(map(os.path.exists, rooms))
        return pids

    before = fds()
    pids = go(use())
    assert fds() == before
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_closed_sandbox_says_so() -> None:
    async def use() -> None:
        pool = LocalSandbox(slots=1)
        busy = asyncio.create_task(pool.run("import time\ntime.sleep(0.5)\nprint('done')"))
        waiting = asyncio.create_task(pool.run("print(1)"))
        await asyncio.sleep(0.2)
        await pool.close()
        await pool.close()
        assert (await busy).stdout == "done\n"
        with pytest.raises(SandboxError, match="closed"):
            await waiting
        with pytest.raises(SandboxError, match="closed"):
            await pool.run("print(1)")

    go(use())


def test_a_fork_of_the_trainer_may_not_use_the_pool(sandbox: LocalSandbox) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(sandbox.run("print(1)"))
        except SandboxError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_the_pool_ends_with_its_process(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import asyncio, os, signal\n"
        "from sdpo_sandbox.local import LocalSandbox\n"
        "pool = LocalSandbox(slots=1)\n"
        "print(pool._all[0]._server.pid, flush=True)\n"
        "async def main():\n"
        "    run = asyncio.create_task(pool.run('import time; time.sleep(60)'))\n"
        "    await asyncio.sleep(0.5)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    paths = os.pathsep.join(str(Path(__file__).resolve().parents[3] / p) for p in (".", "sandbox"))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": paths, "TMPDIR": str(tmp_path)},
        check=False,
    )
    server = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{server}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{server}").exists()


def test_packages_can_be_loaded_beforehand() -> None:
    pytest.importorskip("numpy")

    async def use() -> None:
        async with LocalSandbox(slots=1, imports=("numpy",)) as pool:
            result = await pool.run(
                "import numpy as np\nprint(np.arange(4).sum(), np.random.default_rng(0).integers(5))"
            )
            assert result.status is Status.OK, result.stderr
            assert result.cpu_s < 0.5
            fetched = [
                r
                async for r in pool.run_many(
                    Program("import numpy\ndef f(): return numpy.float64(2)", fn_name="f"), [Call()]
                )
            ]
            assert fetched[0].value == 2.0
            assert (await pool.run("import pytest")).error is not None

    go(use())
    with pytest.raises(ConfigError, match="not installed"):
        LocalSandbox(imports=("no_such_package",))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"slots": 0}, ConfigError, "slots = 0"),
        ({"require": "maybe"}, ConfigError, "require = 'maybe'"),
        ({"level": Level.NONE}, SandboxError, "without unsafe"),
        ({"python": "/bin/false"}, SandboxError, "did not start"),
        ({"python": "/no/such/python"}, SandboxError, "could not be started"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        LocalSandbox(**options)


def test_other_languages_and_kinds_are_refused(sandbox: LocalSandbox) -> None:
    with pytest.raises(ConfigError, match="language 'cpp'"):
        run(sandbox, "", language="cpp")
    with pytest.raises(ConfigError, match="no sandbox named 'docker'"):
        open_sandbox("docker")
    with pytest.raises(ConfigError, match="did you mean local"):
        open_sandbox("locl")
    with pytest.raises(ConfigError, match="ftp"):
        open_sandbox("fusion", url="ftp://x")
    with pytest.raises(ConfigError, match="options given: slot"):
        open_sandbox("local", slot=1)
    with pytest.raises(ConfigError, match="url"):
        open_sandbox("fusion")


FULL, NO_OPEN, BWRAP, NONE = Level.FULL, Level.NO_OPEN, Level.BWRAP, Level.NONE


@pytest.mark.parametrize(
    ("have", "require", "unsafe", "expected"),
    [
        ({FULL, NO_OPEN, BWRAP}, "full", False, FULL),
        ({FULL, NO_OPEN, BWRAP}, "best_effort", True, FULL),
        ({NO_OPEN, BWRAP}, "best_effort", False, NO_OPEN),
        ({BWRAP}, "best_effort", False, BWRAP),
        ({NO_OPEN, BWRAP}, "full", False, None),
        (set(), "best_effort", False, None),
        (set(), "best_effort", True, NONE),
    ],
)
def test_the_order_of_the_levels(have: set[Level], require: str, unsafe: bool, expected: Level | None) -> None:
    offers = {level: "x" if level in have or level is NONE else "" for level in Level}
    if expected is not None:
        assert choose(require, unsafe, offers.__getitem__) is expected
        return
    with pytest.raises(SandboxError, match="no isolation of level"):
        choose(require, unsafe, offers.__getitem__)


@pytest.mark.parametrize("level", [NO_OPEN, NONE])
def test_the_lesser_levels_run_programs(level: Level) -> None:
    async def use() -> None:
        async with LocalSandbox(slots=1, level=level, unsafe=True) as pool:
            assert (await pool.run("import heapq, math\nprint(math.gcd(12, 18))")).stdout == "6\n"
            result = await pool.run("open('/etc/hostname')")
            assert (result.error is not None) is (level is NO_OPEN)
            if level is NO_OPEN:
                with pytest.raises(SandboxError, match="no files in the working directory"):
                    await pool.run("", files={"a": b""})

    go(use())
