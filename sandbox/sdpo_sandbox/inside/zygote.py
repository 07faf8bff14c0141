"""The fork server: a small warm interpreter that forks one process a run, and never runs a program itself.

It is started with an empty environment and without site-packages, loads what programs commonly import, gives up its
powers, and then answers requests on a SOCK_SEQPACKET pair:

    server -> parent   "ready", once
    parent -> server   {"cpu", "memory", "fsize", "cwd"} with five descriptors: job, stdin, stdout, stderr, result
    server -> parent   "started" with a pidfd
    server -> parent   `ANSWER`: wait status, CPU seconds, peak bytes, after the process has ended

The parent's messages are marshalled, which is the cheapest to read; nothing else than the parent can send them.

The server never sees an expected output. It ends when its parent does.
"""

from __future__ import annotations

import _thread
import gc
import marshal
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from sdpo_sandbox.inside import harness, kernel, landlock, seccomp

__all__ = ["ANSWER", "main"]

ANSWER = struct.Struct("=idq")
_RIGHTS = struct.Struct("5i")
_MAX_MESSAGE = 1 << 16
_KEPT_FDS = 4  # of the child: stdin, stdout, stderr, result
_MAX_PROCESSES = 256  # of a user who may fork
_THREAD_STACK = 8 << 20
_LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_STACK: 256 << 20,
}


def main(options: dict[str, Any]) -> NoReturn:
    """Load, harden, serve.

    Args:
        options: control (descriptor), landlock, seccomp (whether to apply them), own_pids (whether it lives in a pid
            namespace of its own), preludes, imports (modules to load), site (directories that hold them besides the
            standard library), workspace (a directory for runs with files, "" for none).
    """
    control = socket.socket(fileno=options["control"])
    parent = os.getppid()
    before = set(sys.modules)
    sys.path.extend(options["site"])
    for name in options["imports"]:
        __import__(name)
    del sys.path[len(sys.path) - len(options["site"]) :]
    harness.set_up()
    ready = {text: harness.prepare(text) for text in options["preludes"]}
    memory = _address_space()
    rules = _rules(options, before)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if options["landlock"]:
        landlock.restrict(rules)
    if os.geteuid() == 0:
        kernel.drop_capabilities()
    for limit, most in _LIMITS.items():
        _lower(limit, most)
    _thread.stack_size(_THREAD_STACK)
    filter_ = seccomp.build(may_open=options["landlock"]) if options["seccomp"] else None
    for name in [n for n in sys.modules if n.startswith("sdpo_sandbox")]:
        del sys.modules[name]
    gc.collect()
    gc.disable()
    gc.freeze()
    control.send(b"ready")
    while True:
        message, rights, _, _ = control.recvmsg(_MAX_MESSAGE, socket.CMSG_SPACE(_RIGHTS.size))
        if not message:
            os._exit(0)
        descriptors = _RIGHTS.unpack(rights[0][2])
        pid = kernel.fork()
        if pid == 0:
            request = marshal.loads(message)
            request["memory"] += memory
            _child(request, descriptors, filter_, ready)
        pidfd = os.pidfd_open(pid)
        for fd in descriptors:
            os.close(fd)
        control.sendmsg([b"started"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", pidfd))])
        _wait(control, pidfd, pid, parent)
        os.close(pidfd)
        _, status, usage = os.wait4(pid, 0)
        if options["own_pids"]:
            _kill_all()
        control.send(ANSWER.pack(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10))


def _rules(options: dict[str, Any], before: set[str]) -> list[tuple[str, int]]:
    """What programs may read: the standard library without site-packages, shared libraries, what was imported on request;
    and their own working directory, where there is one."""
    library = os.path.dirname(os.__file__)
    rules = [(library, landlock.LIST)]
    rules += [(os.path.join(library, e), landlock.READ) for e in os.listdir(library) if not e.endswith("-packages")]
    triplet = "%s-linux-gnu" % kernel.MACHINE
    shared = ("/lib/" + triplet, "/usr/lib/" + triplet, "/lib64", "/usr/lib64", "/etc/ld.so.cache")
    rules += [(p, landlock.READ) for p in (*shared, "/usr/share/zoneinfo", "/dev/urandom", "/dev/zero")]
    rules.append(("/dev/null", landlock.WRITE))
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        for folder in options["site"]:
            if file.startswith(folder + os.sep):
                top = os.path.relpath(file, folder).split(os.sep)[0]
                rules.append((os.path.join(folder, top), landlock.READ))
                rules.append((os.path.join(folder, top + ".libs"), landlock.READ))
    if options["workspace"]:
        rules.append((options["workspace"], landlock.WRITE))
    return rules


def _address_space() -> int:
    """Bytes mapped by now: what a program's limit comes on top of."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 128 << 20


def _kill_all() -> None:
    """Whatever a program left in this pid namespace: all but the server and the namespace's first process."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wait(control: socket.socket, pidfd: int, pid: int, parent: int) -> None:
    """Until the process has ended; when the parent goes, kill it and end."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(control, select.POLLIN)
    while True:
        events = dict(poll.poll(1000))
        if pidfd in events:
            return
        if events or os.getppid() != parent:
            os.kill(pid, signal.SIGKILL)
            os._exit(0)


def _child(
    request: dict[str, Any], descriptors: Sequence[int], filter_: seccomp.Filter | None, ready: harness.Ready
) -> NoReturn:
    """From fork to the program: only what was asked for stays reachable."""
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if filter_ is None:
            os.setsid()  # with a filter it can signal nobody else
        job = marshal.loads(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0))
        for target, fd in enumerate(descriptors[1:]):
            os.dup2(fd, target)
        os.closerange(_KEPT_FDS, 256)
        if request["cwd"]:
            os.chdir(request["cwd"])
        _lower(resource.RLIMIT_AS, request["memory"])
        _lower(resource.RLIMIT_CPU, request["cpu"])
        _lower(resource.RLIMIT_FSIZE, request["fsize"])
        if filter_ is None:
            # Counts all processes and threads of the user, so that a busy user's programs could start no thread; needed
            # only where they can fork. With a filter the address space bounds the threads.
            _lower(resource.RLIMIT_NPROC, _MAX_PROCESSES)
        if filter_ is not None:
            filter_.load(os.getpid())
        gc.enable()
    except BaseException as exc:  # without the harness's first line the parent takes this as a fault of the sandbox
        os.write(2, ("%s: %s\n" % (type(exc).__name__, exc)).encode("utf-8", "replace"))
        os._exit(1)
    harness.run(job, ready)


def _lower(limit: int, most: int) -> None:
    """Set a hard limit, unless there is a lower one."""
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(limit, (most, most))
