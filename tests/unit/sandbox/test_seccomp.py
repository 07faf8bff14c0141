"""The seccomp filter, by an interpreter of classic BPF: what it answers to any call, on both architectures.

The kernel's own opinion is asked by the attacks; here both tables are tried whole, also the one of the other machine.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from sdpo_sandbox.inside import seccomp
from sdpo_sandbox.inside.kernel import MACHINE

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PID = 4242
DANGEROUS = """
    execve execveat ptrace process_vm_readv process_vm_writev socket connect bind listen accept
    accept4 sendmsg sendmmsg mount umount2 unshare setns pivot_root chroot bpf keyctl add_key
    userfaultfd perf_event_open memfd_create shmget shmat msgget semget io_uring_setup
    io_uring_enter pidfd_open pidfd_getfd pidfd_send_signal tkill rt_sigqueueinfo rt_tgsigqueueinfo
    fchmod fchmodat fchown fchownat utimensat setxattr truncate fallocate unlinkat renameat2
    symlinkat linkat mknodat setpriority sched_setaffinity sched_setscheduler personality kexec_load
    reboot init_module finit_module swapon quotactl inotify_init1 fanotify_init open_by_handle_at
    name_to_handle_at seccomp landlock_restrict_self capset setuid setgid setresuid prctl_set_mm
    wait4 waitid setsid setpgid mlock
"""
MACHINES = ["x86_64", "aarch64"]
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def answer(
    machine: str, number: int, args: Sequence[int] = (), *, arch: int | None = None, may_open: bool = True
) -> int:
    """Run the filter on one call, as the kernel would."""
    program = seccomp.build(machine, may_open=may_open)
    code = bytearray(program.code)
    for offset in program.pids:
        struct.pack_into("<I", code, offset, PID)
    words = [*args, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number, ARCH[machine] if arch is None else arch, 0, *(w & (2**64 - 1) for w in words))
    accumulator = at = 0
    for _ in range(5000):
        op, if_true, if_false, k = struct.unpack_from("<HBBI", code, 8 * at)
        at += 1
        if op == 0x20:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif op == 0x54:
            accumulator &= k
        elif op == 0x05:
            at += k
        elif op == 0x15:
            at += if_true if accumulator == k else if_false
        elif op == 0x35:
            at += if_true if accumulator >= k else if_false
        elif op == 0x06:
            return int(k)
        else:
            raise AssertionError(f"instruction {op:#x}")
    raise AssertionError("does not end")


def header(machine: str) -> dict[str, int]:
    path = HEADERS[machine]
    if not path.is_file():
        pytest.skip(f"no kernel headers at {path}")
    found: dict[str, int] = {}
    for match in re.finditer(r"#define (?:__NR|__NR3264)_(\w+)\s+(\d+)", path.read_text()):
        found.setdefault(match[1], int(match[2]))
    if machine == "aarch64":
        found["newfstatat"] = found["fstatat"]
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernel_headers(machine: str) -> None:
    column = MACHINES.index(machine)
    kernel = header(machine)
    for name, numbers in {**seccomp.CALLS, **seccomp._OPEN, **seccomp._GUARDED}.items():
        assert numbers[column] == kernel.get(name), name


@pytest.mark.parametrize("machine", MACHINES)
def test_everything_that_is_not_listed_is_denied(machine: str) -> None:
    column = MACHINES.index(machine)
    listed = {n[column] for n in {**seccomp.CALLS, **seccomp._OPEN, **seccomp._GUARDED}.values()}
    for number in range(700):
        result = answer(machine, number, [0xDEAD] * 6)
        if number not in listed:
            assert result == EPERM, number
    for number in (10_000, 0x3FFFFFFF):
        assert answer(machine, number) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_dangerous_calls_are_not_on_the_list(machine: str) -> None:
    kernel = header(machine)
    known = [name for name in DANGEROUS.split() if name in kernel]
    assert len(known) > 55
    for name in known:
        assert answer(machine, kernel[name], [0] * 6) == EPERM, name
    if machine == "x86_64":
        for name in ("fork", "vfork", "chmod", "rename", "unlink", "creat", "utime", "arch_prctl", "modify_ldt"):
            assert answer(machine, kernel[name]) == EPERM, name


def number(machine: str, name: str) -> int:
    value = {**seccomp.CALLS, **seccomp._OPEN, **seccomp._GUARDED}[name][MACHINES.index(machine)]
    assert value is not None
    return value


THREAD = 0x3D0F00  # what pthread_create passes
SIGCHLD = 17


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("clone", [THREAD], ALLOW),
        ("clone", [SIGCHLD], EPERM),
        ("clone", [0x4111], EPERM),  # vfork
        ("clone", [THREAD | 0x10000000], EPERM),  # a user namespace
        ("clone", [THREAD & ~0x10000], EPERM),
        ("clone3", [0, 88], ENOSYS),
        ("openat2", [0], ENOSYS),
        ("kill", [PID, 9], ALLOW),
        ("kill", [PID + 1, 0], EPERM),
        ("kill", [0, 9], EPERM),
        ("kill", [-1, 9], EPERM),
        ("kill", [-PID, 9], EPERM),
        ("tgkill", [PID, 77, 6], ALLOW),
        ("tgkill", [1, 1, 6], EPERM),
        ("prlimit64", [0, 7, 1, 0], ALLOW),
        ("prlimit64", [PID, 7, 1, 0], ALLOW),
        ("prlimit64", [1, 7, 1, 0], EPERM),
        ("fcntl", [1, 1, 1], ALLOW),
        ("fcntl", [1, 1030, 3], ALLOW),
        ("fcntl", [1, 8, 1], EPERM),  # F_SETOWN
        ("fcntl", [1, 10, 9], EPERM),  # F_SETSIG
        ("fcntl", [1, 15, 0], EPERM),  # F_SETOWN_EX
        ("fcntl", [1, 1024, 0], EPERM),  # F_SETLEASE
        ("fcntl", [1, 1031, 1 << 20], EPERM),  # F_SETPIPE_SZ
        ("ioctl", [0, 0x5401], ALLOW),
        ("ioctl", [0, 0x5412], EPERM),  # TIOCSTI
        ("ioctl", [0, 0x541C], EPERM),  # TIOCLINUX
        ("ioctl", [0, 0x8901], EPERM),  # FIOSETOWN
        ("prctl", [15, 1], ALLOW),
        ("prctl", [4, 1], EPERM),  # PR_SET_DUMPABLE
        ("prctl", [1, 0], EPERM),  # PR_SET_PDEATHSIG
        ("socketpair", [1, 1 | 0o2000000, 0], ALLOW),
        ("socketpair", [1, 2, 0], EPERM),
        ("socketpair", [2, 1, 0], EPERM),
        ("sendto", [5, 0, 10, 0, 0, 0], ALLOW),
        ("sendto", [5, 0, 10, 0, 0x7FFF00000000, 16], EPERM),
        ("sendto", [5, 0, 10, 0, 0x1000, 16], EPERM),
        ("openat", [-100, 0, 0], ALLOW),
        ("openat", [-100, 0, 0o1101], ALLOW),  # write, create, truncate: Landlock's business
        ("openat", [-100, 0, 0o1000], EPERM),  # read-only truncation
        ("read", [0], ALLOW),
        ("mmap", [0, 4096, 3, 0x22], ALLOW),
        ("mmap", [0, 8 << 20, 0, 0x20022], ALLOW),
        ("mmap", [0, 32 << 10, 0, 0x20022], EPERM),  # a thread's stack
        ("exit_group", [0], ALLOW),
    ],
)
def test_calls_with_arguments(machine: str, name: str, args: list[int], expected: int) -> None:
    assert answer(machine, number(machine, name), args) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_other_architectures_kill(machine: str) -> None:
    other = ARCH["aarch64" if machine == "x86_64" else "x86_64"]
    for arch in (0x40000003, other, 0):
        assert answer(machine, 0, arch=arch) == KILL


def test_x32_kills() -> None:
    assert answer("x86_64", 0x40000000) == KILL
    assert answer("x86_64", 0x40000000 | 39) == KILL
    assert answer("x86_64", 0xFFFFFFFF) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_without_landlock_nothing_can_be_opened(machine: str) -> None:
    for name in ("openat", "mkdirat", "openat2"):
        assert answer(machine, number(machine, name), [-100, 0, 0], may_open=False) != ALLOW
    assert answer(machine, number(machine, "read"), may_open=False) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_is_small_and_all_jumps_stay_inside(machine: str) -> None:
    code = seccomp.build(machine).code
    count = len(code) // 8
    assert count < 4096
    for at in range(count):
        op, if_true, if_false, k = struct.unpack_from("<HBBI", code, 8 * at)
        steps = [k] if op == 0x05 else [if_true, if_false] if op in (0x15, 0x35) else [0]
        assert all(at + 1 + step <= count - (op != 0x06) for step in steps)
    assert struct.unpack_from("<H", code, 8 * (count - 1))[0] == 0x06


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(KeyError):
        seccomp.build("riscv64")


@pytest.mark.skipif(not seccomp.supported(), reason="no seccomp filters here")
def test_the_kernel_accepts_the_filter_and_denies_fork() -> None:
    from sdpo_sandbox.inside import kernel

    program = seccomp.build(MACHINE)
    pid = os.fork()
    if pid == 0:
        outcome = 9
        try:
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            program.load(os.getpid())
            try:
                os.fork()
            except PermissionError:
                os.kill(os.getpid(), 0)
                outcome = 0
        finally:
            os._exit(outcome)
    assert os.waitpid(pid, 0)[1] == 0
