"""The one way to obtain a sandbox, by name."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from sdpo.errors import ConfigError, SandboxError, did_you_mean
from sdpo_sandbox.base import Sandbox

__all__ = ["ENTRY_POINT_GROUP", "open_sandbox"]

ENTRY_POINT_GROUP = "sdpo.sandboxes"


def open_sandbox(kind: str = "local", **options: Any) -> Sandbox:
    """Open a sandbox.

    Args:
        kind: "local" for processes of this machine; "fusion" or simply the URL for a Sandbox Fusion server
            ("http://host:8080"); or the name of an entry point of the group `sdpo.sandboxes`.
        options: of the sandbox chosen: see `LocalSandbox` (slots, imports, require, unsafe, ...) and `FusionSandbox` (url,
            concurrency, token, attempts, ...).

    Raises:
        ConfigError: an unknown kind or option.
        SandboxError: this machine offers no isolation (local).
    """
    if kind.startswith(("http://", "https://")):
        kind, options = "fusion", {"url": kind, **options}
    try:
        sandbox = _factory(kind)(**options)
    except TypeError as exc:
        raise ConfigError(f"sandbox {kind!r}: {exc}", hint=f"options given: {', '.join(options) or 'none'}") from exc
    if not isinstance(sandbox, Sandbox):
        raise SandboxError(
            f"{kind!r} is a {type(sandbox).__name__}, not a Sandbox", hint="see sdpo_sandbox.base.Sandbox"
        )
    return sandbox


def _factory(kind: str) -> Any:
    if kind == "local":
        from sdpo_sandbox.local import LocalSandbox

        return LocalSandbox
    if kind == "fusion":
        from sdpo_sandbox.client import FusionSandbox

        return FusionSandbox
    others = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if kind not in others:
        raise ConfigError(
            f"no sandbox named {kind!r}", hint=did_you_mean(kind, ["local", "fusion", "http://...", *others])
        )
    return others[kind].load()
