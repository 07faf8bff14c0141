"""The seccomp filter: an allow-list of system calls, as classic BPF put together by hand.

Everything that is not listed fails with EPERM: fork, exec, sockets, ptrace, io_uring, bpf, keyctl, userfaultfd, memfd,
shared memory, mounts, chmod and its kin, and whatever a later kernel brings. Calls of another architecture (32-bit, x32)
kill the process. Some calls are allowed with certain arguments only; the reasons stand beside the rules.

Denying fork makes one process one sandbox: nothing to outlive it, and the address-space limit is the memory limit.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

from sdpo_sandbox.inside.kernel import MACHINE, call

__all__ = ["CALLS", "Filter", "build", "supported"]

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2

_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_EPERM, _ENOSYS = 1, 38
_LOAD, _AND, _JUMP, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_X32_BIT = 0x40000000

# name: (number on x86_64, number on aarch64), None where the architecture has no such call
CALLS: dict[str, tuple[int | None, int | None]] = {
    # data in and out
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "close": (3, 57),
    "close_range": (436, 436),
    "lseek": (8, 62),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "ftruncate": (77, 46),
    # names and attributes
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "stat": (4, None),
    "lstat": (6, None),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "getdents64": (217, 61),
    "umask": (95, 166),
    # memory
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "msync": (26, 227),
    "mincore": (27, 232),
    # own signals and timers
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "pause": (34, None),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    "restart_syscall": (219, 128),
    # pipes and waiting
    "pipe": (22, None),
    "pipe2": (293, 59),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "select": (23, None),
    "pselect6": (270, 72),
    "poll": (7, None),
    "ppoll": (271, 73),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "eventfd2": (290, 19),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    # time and the machine
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getrandom": (318, 278),
    # who am I
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getsid": (124, 156),
    "getpriority": (140, 141),
    "getrlimit": (97, 163),
    # threads and the end
    "futex": (202, 98),
    "futex_waitv": (449, 449),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "rseq": (334, 293),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # a connected pair (asyncio wakes itself with one)
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
}
_OPEN: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None),
    "openat": (257, 56),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
}
_GUARDED: dict[str, tuple[int | None, int | None]] = {
    "mmap": (9, 222),
    "clone": (56, 220),
    "clone3": (435, 435),
    "openat2": (437, 437),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "socketpair": (53, 199),
    "sendto": (44, 206),
}


class Check(NamedTuple):
    """Low word of an argument, masked, must be one of `values`; the place of `PID` is filled in by the child. The kernel
    itself takes the low word for every argument checked here, `sendto`'s address apart (see `_RULES`)."""

    argument: int
    values: Sequence[int]
    mask: int = 0xFFFFFFFF
    high: bool = False


PID = -1
_CLONE_THREAD_FLAGS = 0x00010000 | 0x00000100 | 0x00000800  # THREAD | VM | SIGHAND
_CLONE_NAMESPACES = 0x7E020000 | 0x00000080
_O_ACCMODE_TRUNC, _O_TRUNC = 0o3 | 0o1000, 0o1000

_RULES: dict[str, Sequence[Check]] = {
    # threads only, and no namespaces
    "clone": [Check(0, [_CLONE_THREAD_FLAGS], _CLONE_THREAD_FLAGS | _CLONE_NAMESPACES)],
    # not F_SETOWN, F_SETSIG, F_NOTIFY, F_SETLEASE: with O_ASYNC they send any signal to any process of the user
    "fcntl": [Check(1, [0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032])],
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": [Check(1, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])],
    # names of threads and of mappings
    "prctl": [Check(0, [15, 16, 0x53564D41])],
    # limits of this process: those of another one of the same user would kill it
    "prlimit64": [Check(0, [0, PID])],
    "setrlimit": [],
    "kill": [Check(0, [PID])],
    "tgkill": [Check(0, [PID])],
    # AF_UNIX, SOCK_STREAM: a datagram socket could be sent to any other
    "socketpair": [Check(0, [1]), Check(1, [1], 0xFF)],
    "sendto": [Check(4, [0]), Check(4, [0], high=True)],
}
_MAP_STACK, _MIN_STACK = 0x20000, 256 << 10
# Read-only truncation passes Landlock before ABI 3.
_READ_ONLY_TRUNCATE = {"open": 1, "openat": 2}


class Filter(NamedTuple):
    """A filter program. `pids`: offsets of the words that hold the process's own id."""

    code: bytes
    pids: Sequence[int]

    def load(self, pid: int) -> None:
        """Enforce it on this thread and all that it starts; needs no_new_privs.

        Raises:
            OSError: no seccomp here.
        """
        code = bytearray(self.code)
        for offset in self.pids:
            struct.pack_into("<I", code, offset, pid)
        block = (ctypes.c_char * len(code)).from_buffer(code)
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(block))
        call(_SECCOMP[MACHINE], _SET_MODE_FILTER, 0, ctypes.c_char_p(program))


def supported() -> bool:
    """Whether this machine's kernel and architecture can load the filter."""
    if MACHINE not in _SECCOMP:
        return False
    try:
        call(_SECCOMP[MACHINE], _GET_ACTION_AVAIL, 0, ctypes.byref(ctypes.c_uint32(_KILL_PROCESS)))
    except OSError:
        return False
    return True


def _instruction(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, k)


class Code(NamedTuple):
    """A piece of a filter and the indices of its instructions that compare with the process's id."""

    instructions: list[bytes]
    pids: list[int]


_DENIED = Code([_instruction(_RETURN, _ERRNO | _EPERM)], [])
_ALLOWED = Code([_instruction(_RETURN, _ALLOW)], [])
_UNKNOWN = Code([_instruction(_RETURN, _ERRNO | _ENOSYS)], [])


def _checked(checks: Sequence[Check]) -> Code:
    """Allow if all checks hold."""
    body: list[bytes] = []
    pids: list[int] = []
    for check in checks:
        body.append(_instruction(_LOAD, 16 + 8 * check.argument + (4 if check.high else 0)))
        if check.mask != 0xFFFFFFFF:
            body.append(_instruction(_AND, check.mask))
        for i, value in enumerate(check.values):
            left = len(check.values) - 1 - i
            if value == PID:
                pids.append(len(body))
            # a match jumps over the other values and the denial; the last mismatch falls into the denial
            body.append(_instruction(_JUMP_EQUAL, 0 if value == PID else value, left + 1, 0))
        body += _DENIED.instructions
    return Code(body + _ALLOWED.instructions, pids)


def _no_read_only_truncation(argument: int) -> Code:
    body = [
        _instruction(_LOAD, 16 + 8 * argument),
        _instruction(_AND, _O_ACCMODE_TRUNC),
        _instruction(_JUMP_EQUAL, _O_TRUNC, 0, 1),
    ]
    return Code(body + _DENIED.instructions + _ALLOWED.instructions, [])


def _no_small_stacks() -> Code:
    """mmap, but no thread stack below `_MIN_STACK`: they bound the number of threads by the address space."""
    body = [
        _instruction(_LOAD, 16 + 8 * 3),
        _instruction(_AND, _MAP_STACK),
        _instruction(_JUMP_EQUAL, 0, 2, 0),
        _instruction(_LOAD, 16 + 8 * 1),
        _instruction(_JUMP_AT_LEAST, _MIN_STACK, 0, 1),
    ]
    return Code(body + _ALLOWED.instructions + _DENIED.instructions, [])


def _decide(segments: Sequence[tuple[int, Code]]) -> Code:
    """A search tree over (first number, what to do from there on). The kernel walks the filter once for each call number
    when it is loaded, so that a list of comparisons costs half a millisecond a run and a tree next to nothing."""
    if len(segments) == 1:
        return segments[0][1]
    middle = len(segments) // 2
    lower, upper = _decide(segments[:middle]), _decide(segments[middle:])
    start, size = segments[middle][0], len(lower.instructions)
    if size < 256:
        head = [_instruction(_JUMP_AT_LEAST, start, size, 0)]
    else:
        head = [_instruction(_JUMP_AT_LEAST, start, 0, 1), _instruction(_JUMP, size)]
    pids = [len(head) + i for i in lower.pids] + [len(head) + size + i for i in upper.pids]
    return Code([*head, *lower.instructions, *upper.instructions], pids)


def _actions(column: int, may_open: bool) -> dict[int, Code]:
    """What to do for each call that is not simply denied."""
    actions: dict[int, Code] = {}
    for name, numbers in {**CALLS, **_GUARDED, **(_OPEN if may_open else {})}.items():
        number = numbers[column]
        if number is None:
            continue
        if name in ("clone3", "openat2"):  # their arguments lie in memory; libc falls back to the older call
            actions[number] = _UNKNOWN
        elif name == "mmap":
            actions[number] = _no_small_stacks()
        elif name in _RULES:
            actions[number] = _checked(_RULES[name])
        elif name in _READ_ONLY_TRUNCATE:
            actions[number] = _no_read_only_truncation(_READ_ONLY_TRUNCATE[name])
        else:
            actions[number] = _ALLOWED
    return actions


def build(machine: str = MACHINE, *, may_open: bool = True) -> Filter:
    """The filter for an architecture.

    Args:
        may_open: whether files may be opened: only with Landlock in force. Otherwise all modules have to be loaded before.

    Raises:
        KeyError: no table for this architecture.
    """
    actions = _actions(_COLUMN[machine], may_open)
    kill = _instruction(_RETURN, _KILL_PROCESS)
    code = [_instruction(_LOAD, 4), _instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0), kill, _instruction(_LOAD, 0)]
    if machine == "x86_64":
        code += [_instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1), kill]
    segments: list[tuple[int, Code]] = []
    for number in range(max(actions) + 2):
        action = actions.get(number, _DENIED)
        if not segments or segments[-1][1] is not action:
            segments.append((number, action))
    tree = _decide(segments)
    return Filter(b"".join([*code, *tree.instructions]), [8 * (len(code) + i) + 4 for i in tree.pids])
