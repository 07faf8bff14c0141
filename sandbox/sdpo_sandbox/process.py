"""A process of a fork server, seen from outside through its pidfd: killed without fail, its clocks read without trust."""

from __future__ import annotations

import signal
import time

__all__ = ["Process", "oom_kills"]


class Process:
    """Does not own the pidfd."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd
        self._pid = 0

    def kill(self) -> bool:
        """SIGKILL; False if it had ended before."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far; 0 when it has just ended."""
        pid = self._find()
        try:
            return time.clock_gettime((~pid << 3) | 2) if pid else 0.0  # the clock id of another process's CPU time
        except OSError:
            return 0.0

    def starved_seconds(self) -> float:
        """How long its first thread has waited for a core: the machine owes it that. 0 where the kernel does not say."""
        try:
            with open(f"/proc/{self._find()}/schedstat") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def _find(self) -> int:
        """Its pid in our namespace, which the pidfd's description tells; 0 if it is gone."""
        if not self._pid:
            with open(f"/proc/self/fdinfo/{self._pidfd}") as file:
                pid = next((int(line.split()[1]) for line in file if line.startswith("Pid:")), 0)
            self._pid = max(pid, 0)
        return self._pid


def oom_kills() -> int:
    """How many processes the kernel has killed on this machine for lack of memory."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0
