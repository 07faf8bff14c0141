"""The one way to obtain a sandbox, by name."""

from __future__ import annotations

from typing import Any

from sdpo.errors import ConfigError
from sdpo_sandbox.base import Sandbox

__all__ = ["open_sandbox"]


def open_sandbox(kind: str = "local", **options: Any) -> Sandbox:
    """Open a sandbox.

    Args:
        kind: "local" for processes of this machine, or the base URL of a Sandbox Fusion server ("http://host:8080"), or
            "fusion" with the option `url`.
        options: of the sandbox chosen: see `LocalSandbox` (slots, preimport, require, unsafe) and `FusionSandbox`
            (url, concurrency, token, attempts).

    Raises:
        ConfigError: an unknown kind or option.
        SandboxError: this machine offers no isolation (local).
    """
    if kind == "local":
        from sdpo_sandbox.local import LocalSandbox

        return LocalSandbox(**options)
    if kind == "fusion" or kind.startswith(("http://", "https://")):
        from sdpo_sandbox.client import FusionSandbox

        return FusionSandbox(**({"url": kind} if kind != "fusion" else {}) | options)
    raise ConfigError(f"no sandbox named {kind!r}", hint='use "local", "fusion" or a URL')
