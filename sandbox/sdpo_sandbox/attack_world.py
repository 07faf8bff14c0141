"""Things to attack: secrets, files, listening sockets, a process."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

__all__ = ["World"]


class World:
    """Enter it before the sandbox is opened, so that what could be inherited is there to be inherited."""

    def __enter__(self) -> World:
        self.token = secrets.token_hex(6)
        self._stack = contextlib.ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="sdpo-attacks-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        for name, mode in (("open", 0o644), ("closed", 0o600)):
            path = self.folder / name
            path.write_text(f"secret {self.token}\n")
            path.chmod(mode)
        self.folder.chmod(0o777)
        self._inherited = os.open(self.folder / "closed", os.O_RDONLY)
        os.set_inheritable(self._inherited, True)
        self._stack.callback(os.close, self._inherited)
        tcp = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0sdpo-{self.token}")
        abstract.listen()
        os.environ["SDPO_ATTACK_SECRET"] = self.token
        self._stack.callback(os.environ.pop, "SDPO_ATTACK_SECRET", None)
        self.victim = subprocess.Popen(["/bin/sleep", "600"], env={"VICTIM_SECRET": self.token}, start_new_session=True)
        self._stack.callback(self.victim.wait)
        self._stack.callback(self.victim.kill)
        self.facts = {
            "token": self.token,
            "folder": str(self.folder),
            "fd": self._inherited,
            "port": tcp.getsockname()[1],
            "abstract": f"\0sdpo-{self.token}",
            "victim": self.victim.pid,
            "parent": os.getpid(),
            "machine": platform.machine(),
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sweep()
        self._stack.close()

    def sweep(self) -> bool:
        """Whether something that bears the token as its process name is alive; it is killed."""
        found = False
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                alive = entry.name.isdigit() and "State:\tZ" not in (entry / "status").read_text()
                if alive and (entry / "comm").read_text().strip() == self.token:
                    found = True
                    os.kill(int(entry.name), signal.SIGKILL)
        return found

    def source(self, code: str) -> str:
        """An attack with the facts of this world in front of it, as `W`."""
        return f"import json\nW = json.loads({json.dumps(json.dumps(self.facts))})\n{code}"
