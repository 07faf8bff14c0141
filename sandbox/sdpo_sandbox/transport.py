"""The local sandbox behind the client of a remote one: an httpx transport that answers like a Sandbox Fusion server."""

from __future__ import annotations

import httpx

from sdpo_sandbox.base import Limits
from sdpo_sandbox.local import LocalSandbox
from sdpo_sandbox.wire import DEFAULT_CAPS, answer

__all__ = ["LocalTransport"]


class LocalTransport(httpx.AsyncBaseTransport):
    """`FusionSandbox("http://local", transport=LocalTransport(sandbox))`. Does not own the sandbox.

    Args:
        caps: what a request may ask for at most.
    """

    def __init__(self, sandbox: LocalSandbox, caps: Limits = DEFAULT_CAPS) -> None:
        self._sandbox = sandbox
        self._caps = caps

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answers `POST /run_code` and `GET /v1/ping`."""
        path, method = request.url.path, request.method
        if path not in ("/run_code", "/v1/ping"):
            return httpx.Response(404, json={"detail": "Not Found"})
        if method != ("GET" if path == "/v1/ping" else "POST"):
            return httpx.Response(405, json={"detail": "Method Not Allowed"})
        if path == "/v1/ping":
            return httpx.Response(200, json="pong")
        status, data = await answer(self._sandbox, await request.aread(), self._caps)
        return httpx.Response(status, json=data)
