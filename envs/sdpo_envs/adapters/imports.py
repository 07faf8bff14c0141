"""Import what an adapter's name points to, with one-line errors."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from sdpo.errors import ConfigError, MissingDependencyError, boundary

__all__ = ["imported", "require"]


def imported(path: str, kind: str) -> Any:
    """The attribute at "package.module:name".

    Raises:
        ConfigError: the path is not of that form, or nothing is there.
    """
    module, colon, attribute = path.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"{path!r} does not name a {kind}", hint="give package.module:name")
    with boundary(f"import the {kind} {path!r}", ConfigError, ImportError, AttributeError):
        return getattr(importlib.import_module(module), attribute)


def require(package: str, what: str, *, extra: str) -> None:
    """Raises MissingDependencyError when a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingDependencyError(what, extra=extra)
