"""A stand-in for a real Sandbox Fusion server: runs Python as a subprocess, with no isolation at all. For harmless programs
only. It keeps the real one's habits that matter to a client: programs lie in a temporary directory that is the working
directory, output beyond 219,264 bytes is lost, memory limits are not enforced."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CUT = 219_264
Fault = Callable[[int, dict[str, Any]], Any]


def run_code(request: dict[str, Any]) -> dict[str, Any]:
    """The real server's answer to a request in Python."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in request.get("files", {}).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))
        script = Path(folder, "script.py")
        script.write_text(request["code"])
        begun = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, str(script)],
                cwd=folder,
                input=(request.get("stdin") or "").encode(),
                capture_output=True,
                timeout=request["run_timeout"],
                check=False,
            )
            code: int | None = done.returncode
            stdout, stderr, status = done.stdout, done.stderr, "Finished"
        except subprocess.TimeoutExpired as exc:
            code, stdout, stderr, status = None, exc.stdout or b"", exc.stderr or b"", "TimeLimitExceeded"
        files = {
            name: base64.b64encode(Path(folder, name).read_bytes()).decode()
            for name in request.get("fetch_files", [])
            if Path(folder, name).is_file()
        }
    result = {
        "status": status,
        "execution_time": time.monotonic() - begun,
        "return_code": code,
        "stdout": stdout[:CUT].decode(),
        "stderr": stderr[:CUT].decode(),
    }
    return {
        "status": "Success" if code == 0 else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "files": files,
    }


class PlainServer(ThreadingHTTPServer):
    """Serves `/run_code` and `/v1/ping`. `fault(n, request)` may answer the n-th request (from 1) otherwise: with an HTTP
    status, a body, or "drop" to close the connection; None means no fault."""

    daemon_threads = True

    def __init__(self, fault: Fault | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fault = fault
        self.requests: list[dict[str, Any]] = []
        self.pings = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: PlainServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def _answer(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.server.pings += 1
        self._answer(200, "pong")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request["_authorization"] = self.headers.get("Authorization")
        with self.server.lock:
            self.server.requests.append(request)
            number = len(self.server.requests)
        fault = self.server.fault(number, request) if self.server.fault else None
        if fault == "drop":
            self.connection.close()
            self.close_connection = True
        elif isinstance(fault, int):
            self._answer(fault, {"detail": "fault"})
        elif fault is not None:
            self._answer(200, fault)
        else:
            self._answer(200, run_code(request))


@contextmanager
def plain_server(fault: Fault | None = None) -> Iterator[PlainServer]:
    """A running server."""
    server = PlainServer(fault)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
