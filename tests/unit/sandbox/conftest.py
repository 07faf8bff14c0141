"""One pool of fork servers for all tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from sdpo.errors import SandboxError
from sdpo_sandbox.local import LocalSandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[LocalSandbox]:
    try:
        pool = LocalSandbox(slots=2)
    except SandboxError as exc:
        pytest.skip(f"no local sandbox here: {exc}")
    yield pool
    asyncio.run(pool.close())
