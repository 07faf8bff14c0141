"""Programs that try to get out, read, harm or outlast: what `sdpo sandbox check` runs and what the tests hold us to.

Each prints REACHED when it got what it wanted, or leaves a trace that the outside looks for. All are bounded, so that even
a success does no harm; `harmless` ones may be shown to work without a sandbox.

Not covered: side channels, and faults of the kernel behind the calls that are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdpo_sandbox.attack_world import World
from sdpo_sandbox.base import Limits, RunResult, Sandbox, Status

__all__ = ["ATTACKS", "Attack", "World", "run_attack", "run_attacks"]

_LIMITS = Limits(cpu_s=4, wall_s=8, memory_mb=512, output_bytes=16 << 20)
_SHORT = Limits(cpu_s=1, wall_s=2, memory_mb=512)


def _reached(world: World, results: Sequence[RunResult]) -> bool:
    return any("REACHED" in r.stdout for r in results)


def _finished(world: World, results: Sequence[RunResult]) -> bool:
    return results[-1].status is Status.OK


def _outlived(world: World, results: Sequence[RunResult]) -> bool:
    return world.sweep()


def _overran(world: World, results: Sequence[RunResult]) -> bool:
    late = [
        r.status is not Status.TIME_LIMIT or r.cpu_s > 2 * _SHORT.cpu_s or r.wall_s > 20 * _SHORT.wall for r in results
    ]
    return any(late)


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        codes: programs that are run one after the other.
        harmless: may be run without isolation, to show that it works there.
        succeeded: looks at the world and the results.
    """

    name: str
    codes: tuple[str, ...]
    harmless: bool = True
    limits: Limits = _LIMITS
    succeeded: Callable[[World, Sequence[RunResult]], bool] = _reached


def _attack(
    name: str,
    *codes: str,
    harmless: bool = True,
    limits: Limits = _LIMITS,
    succeeded: Callable[[World, Sequence[RunResult]], bool] = _reached,
) -> Attack:
    return Attack(name, codes, harmless, limits, succeeded)


_CALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_NAME = _CALL + "libc.prctl(15, W['token'].encode())\n"

ATTACKS: tuple[Attack, ...] = (
    _attack(
        "secret in the environment",
        "import os\nif W['token'] in os.environ.values(): print('REACHED')",
    ),
    _attack(
        "read a hidden file, mode 644",
        "if W['token'] in open(W['folder'] + '/open').read(): print('REACHED')",
    ),
    _attack(
        "read a hidden file, mode 600",
        "if W['token'] in open(W['folder'] + '/closed').read(): print('REACHED')",
    ),
    _attack(
        "inherited descriptor",
        "import os\n"
        "for fd in range(3, 256):\n"
        "    try:\n"
        "        if W['token'].encode() in os.pread(fd, 1000, 0): print('REACHED')\n"
        "    except OSError: pass",
    ),
    _attack(
        "environment of other processes",
        "import os\n"
        "for pid in os.listdir('/proc'):\n"
        "    try:\n"
        "        if b'VICTIM_SECRET=' + W['token'].encode() in open('/proc/%s/environ' % pid, 'rb').read():\n"
        "            print('REACHED')\n"
        "    except OSError: pass",
    ),
    _attack(
        "memory of the trusted process",
        "pid = W['parent']\n"
        "line = next(l for l in open('/proc/%d/maps' % pid) if ' rw-p ' in l)\n"
        "mem = open('/proc/%d/mem' % pid, 'rb', 0)\n"
        "mem.seek(int(line.split('-')[0], 16))\n"
        "if mem.read(8): print('REACHED')",
    ),
    _attack(
        "ptrace another process",
        _CALL + "if libc.ptrace(0x4206, W['victim'], None, None) == 0: print('REACHED')",
    ),
    _attack(
        "connect over TCP to the loopback",
        "import socket\nsocket.create_connection(('127.0.0.1', W['port']), 2)\nprint('REACHED')",
    ),
    _attack(
        "connect to an abstract unix socket",
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(W['abstract'])\nprint('REACHED')",
    ),
    _attack(
        "write a file outside the working directory",
        "open(W['folder'] + '/written', 'w').write('x')\nprint('REACHED')",
    ),
    _attack(
        "change the standard library",
        "import os\nopen(os.__file__, 'r+b')\nprint('REACHED')",
    ),
    _attack(
        "signal another process",
        "import os, signal\nos.kill(W['victim'], signal.SIGCONT)\nprint('REACHED')",
    ),
    _attack(
        "signal the trusted process",
        "import os, signal\n"
        "for pid in (W['parent'], os.getppid()):\n"
        "    try:\n"
        "        os.kill(pid, signal.SIGCONT)\n"
        "        print('REACHED')\n"
        "    except OSError: pass",
    ),
    _attack(
        "fork bomb of 300",
        _NAME + "import os, signal, time\n"
        "pids = []\n"
        "try:\n"
        "    for _ in range(300):\n"
        "        pid = os.fork()\n"
        "        if pid == 0:\n"
        "            time.sleep(3)\n"
        "            os._exit(0)\n"
        "        pids.append(pid)\n"
        "    print('REACHED')\n"
        "finally:\n"
        "    for pid in pids: os.kill(pid, signal.SIGKILL)",
        harmless=False,
    ),
    _attack(
        "thread bomb of 1000",
        "import threading\n"
        "gate = threading.Event()\n"
        "try:\n"
        "    for _ in range(1000): threading.Thread(target=gate.wait, daemon=True).start()\n"
        "    print('REACHED')\n"
        "finally:\n"
        "    gate.set()",
        harmless=False,
    ),
    _attack(
        "1 GB in one process",
        "b = bytearray(1 << 30)\nprint('REACHED')",
        harmless=False,
    ),
    _attack(
        "1 GB after raising the limit",
        "import resource\n"
        "try: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "except (ValueError, OSError): pass\n"
        "b = bytearray(1 << 30)\nprint('REACHED')",
        harmless=False,
    ),
    _attack(
        "3 times 400 MB over forks",
        "import os, time\n"
        "held = 0\n"
        "for _ in range(3):\n"
        "    r, w = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        b = bytearray(400 << 20)\n"
        "        os.write(w, b'x')\n"
        "        time.sleep(1)\n"
        "        os._exit(0)\n"
        "    held += os.read(r, 1) == b'x'\n"
        "if held == 3: print('REACHED')",
        harmless=False,
    ),
    _attack(
        "600 MB in memory files",
        "import os\n"
        "got = 0\n"
        "def places():\n"
        "    for i in range(60):\n"
        "        yield lambda: os.memfd_create('x%d' % i)\n"
        "        yield lambda: os.open('/dev/shm/sdpo-%s-%d' % (W['token'], i), os.O_CREAT | os.O_RDWR)\n"
        "for place in places():\n"
        "    try:\n"
        "        fd = place()\n"
        "        got += os.write(fd, bytes(10 << 20))\n"
        "    except OSError: pass\n"
        "if got >= 600 << 20: print('REACHED')",
        harmless=False,
    ),
    _attack(
        "300 MB of files",
        "import os\n"
        "got = 0\n"
        "for i in range(20):\n"
        "    for place in (W['folder'], '.', '/var/tmp'):\n"
        "        try:\n"
        "            path = '%s/fill-%s-%d' % (place, W['token'], i)\n"
        "            with open(path, 'wb') as f: got += f.write(bytes(15 << 20))\n"
        "            break\n"
        "        except OSError: pass\n"
        "for i in range(20):\n"
        "    for place in (W['folder'], '.', '/var/tmp'):\n"
        "        try: os.unlink('%s/fill-%s-%d' % (place, W['token'], i))\n"
        "        except OSError: pass\n"
        "if got >= 300 << 20: print('REACHED')",
        harmless=False,
    ),
    _attack(
        "leave a message for the next run",
        "import os\n"
        "for place in (W['folder'], '.'):\n"
        "    try: open(place + '/message-' + W['token'], 'w').write(W['token'])\n"
        "    except OSError: pass",
        "import os\n"
        "for place in (W['folder'], '.'):\n"
        "    try:\n"
        "        if W['token'] in open(place + '/message-' + W['token']).read(): print('REACHED')\n"
        "        os.unlink(place + '/message-' + W['token'])\n"
        "    except OSError: pass",
    ),
    _attack(
        "200 MB of output",
        "import sys\nfor _ in range(200): sys.stdout.write('x' * (1 << 20))\nsys.stdout.flush()",
        harmless=False,
        succeeded=_finished,
    ),
    _attack(
        "leave a daemon",
        _NAME + "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for fd in range(3): os.close(fd)\n"
        "        time.sleep(20)\n"
        "    os._exit(0)",
        succeeded=_outlived,
    ),
    _attack(
        "a child that keeps the output open",
        _NAME + "import os, time\nif os.fork() == 0:\n    time.sleep(20)\n    os._exit(0)",
        harmless=False,
        succeeded=_outlived,
    ),
    _attack(
        "busy loop that ignores SIGTERM",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
        harmless=False,
        limits=_SHORT,
        succeeded=_overran,
    ),
    _attack(
        "sleep past the limit",
        "import time\ntime.sleep(600)",
        harmless=False,
        limits=_SHORT,
        succeeded=_overran,
    ),
    _attack(
        "start a shell",
        "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo REACHED'])",
    ),
    _attack(
        "mount a file system",
        _CALL + "place = W['folder'].encode()\n"
        "if libc.mount(b'none', place, b'tmpfs', 0, None) == 0:\n"
        "    libc.umount2(place, 2)\n"
        "    print('REACHED')",
    ),
    _attack(
        "leave shared memory behind",
        _CALL + "key = libc.shmget(0, 4096, 0o1600)\nif key >= 0:\n    libc.shmctl(key, 0, None)\n    print('REACHED')",
    ),
    _attack(
        "io_uring, bpf, keyctl, userfaultfd, perf",
        _CALL + "column = 0 if W['machine'] == 'x86_64' else 1\n"
        "for numbers in ((425, 425), (321, 280), (250, 219), (323, 282), (298, 241)):\n"
        "    ctypes.set_errno(0)\n"
        "    result = libc.syscall(numbers[column], *[ctypes.c_long(-1)] * 5)\n"
        "    if result >= 0 or ctypes.get_errno() not in (1, 38): print('REACHED')",
    ),
    _attack(
        "signal through a descriptor's owner",
        "import fcntl, os\n"
        "r, w = os.pipe()\n"
        "fcntl.fcntl(r, fcntl.F_SETOWN, W['parent'])\n"
        "if fcntl.fcntl(r, fcntl.F_GETOWN) == W['parent']: print('REACHED')",
    ),
    _attack(
        "limits of the trusted process",
        "import resource\n"
        "now = resource.prlimit(W['parent'], resource.RLIMIT_CORE)\n"
        "resource.prlimit(W['parent'], resource.RLIMIT_CORE, now)\n"
        "print('REACHED')",
    ),
    _attack(
        "mode and time of a file",
        "import os\n"
        "for act in (lambda p: os.chmod(p, 0o644), lambda p: os.utime(p)):\n"
        "    try:\n"
        "        act(W['folder'] + '/open')\n"
        "        print('REACHED')\n"
        "    except OSError: pass",
    ),
    _attack(
        "a 32-bit system call",
        "import ctypes, mmap\n"
        "if W['machine'] == 'x86_64':\n"
        "    page = mmap.mmap(-1, 4096, prot=7)\n"
        "    page.write(bytes.fromhex('53b814000000cd805bc3'))  # getpid by int 0x80\n"
        "    place = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "    if ctypes.CFUNCTYPE(ctypes.c_int)(place)() > 0: print('REACHED')",
    ),
)


async def run_attack(sandbox: Sandbox, attack: Attack, world: World) -> tuple[bool, str]:
    """Whether the attack was stopped, and how its last program ended."""
    results = [await sandbox.run(world.source(code), "", attack.limits) for code in attack.codes]
    last = results[-1]
    said = last.error.type if last.error else f"signal {last.signal}" if last.signal else ""
    return not attack.succeeded(world, results), f"{last.status} {said}".strip()


async def run_attacks(sandbox: Sandbox, world: World) -> list[tuple[Attack, bool, str]]:
    """All attacks, one after the other."""
    return [(attack, *await run_attack(sandbox, attack, world)) for attack in ATTACKS]
