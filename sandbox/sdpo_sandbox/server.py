"""An HTTP server over the local sandbox, with Sandbox Fusion's `/run_code` and `/v1/ping`: one machine grades for a
cluster, and any Sandbox Fusion client works against it.

Runs wait for a slot; what does not fit into the queue is refused with 429 and Retry-After, what is too large with 413. A
token, where one is set, is asked of `/run_code` only, so that health probes need none. No TLS: put a proxy before it.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sdpo_sandbox.base import MIB, Limits
from sdpo_sandbox.local import LocalSandbox
from sdpo_sandbox.wire import DEFAULT_CAPS, answer

__all__ = ["create_app"]


def create_app(
    sandbox: LocalSandbox,
    *,
    token: str = "",
    max_body_bytes: int = 64 * MIB,
    queue: int = 256,
    caps: Limits = DEFAULT_CAPS,
) -> Starlette:
    """The ASGI application. Owns the sandbox: closes it at shutdown, after the requests at hand.

    Args:
        token: required as a bearer token of `/run_code`; "" asks for none.
        queue: requests at hand, running and waiting, beyond which more are refused.
        caps: what a request may ask for at most.
    """
    at_hand = 0

    async def run_code(request: Request) -> JSONResponse:
        nonlocal at_hand
        given = request.headers.get("authorization", "").encode()
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            return JSONResponse({"detail": "a valid token is required"}, 401, {"WWW-Authenticate": "Bearer"})
        if at_hand >= queue:
            return JSONResponse({"detail": f"{at_hand} requests at hand"}, 429, {"Retry-After": "1"})
        at_hand += 1
        try:
            body = await _body(request, max_body_bytes)
            if body is None:
                return JSONResponse({"detail": f"the body is larger than {max_body_bytes} bytes"}, 413)
            status, data = await answer(sandbox, body, caps)
            return JSONResponse(data, status)
        finally:
            at_hand -= 1

    async def ping(request: Request) -> JSONResponse:
        return JSONResponse("pong")

    async def refuse(request: Request, exc: Exception) -> JSONResponse:
        assert isinstance(exc, HTTPException)
        return JSONResponse({"detail": exc.detail}, exc.status_code, exc.headers)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await sandbox.close()

    return Starlette(
        routes=[Route("/run_code", run_code, methods=["POST"]), Route("/v1/ping", ping, methods=["GET"])],
        exception_handlers={HTTPException: refuse},
        lifespan=lifespan,
    )


async def _body(request: Request, most: int) -> bytes | None:
    """The body, None when it is larger than `most`."""
    told = request.headers.get("content-length", "0")
    if told.isdigit() and int(told) > most:
        return None
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)
