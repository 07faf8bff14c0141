"""Errors.

    SDPOError
    |-- ConfigError            (ValueError)    a setting is wrong: names the key, the value and the remedy
    |-- EnvNotFoundError       (LookupError)   no environment of that name: suggests the closest ones
    |-- MissingDependencyError (ImportError)   an extra is not installed: carries the pip line
    |-- GradingError                           an environment could not grade; never a reward of 0
    |-- SandboxError                           the sandbox itself failed; never a verdict on the program
    |-- SamplerError                           no completions could be had
    |-- CheckpointError                        a checkpoint could not be written or read
    `-- BackendError                           a backend refuses the configuration or failed to start

An `SDPOError` is a mistake that a user can mend: the command line prints it as one line, with its hint, and exits with 2.
A failed rollout is data (`sdpo.types.Failure`), not an exception. Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "EnvNotFoundError",
    "GradingError",
    "MissingDependencyError",
    "SDPOError",
    "SamplerError",
    "SandboxError",
    "boundary",
    "did_you_mean",
]


class SDPOError(Exception):
    """Base of all errors that a user can mend.

    Args:
        message: one line that names the thing and the value.
        hint: one line that names the remedy.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message


class ConfigError(SDPOError, ValueError):
    """A setting is wrong."""


class EnvNotFoundError(SDPOError, LookupError):
    """No environment answers to this name."""


class MissingDependencyError(SDPOError, ImportError):
    """An optional dependency is not installed.

    Args:
        what: what needs it.
        extra: the extra of this package that brings it.
    """

    def __init__(self, what: str, *, extra: str) -> None:
        super().__init__(f"{what} needs an extra that is not installed", hint=f"pip install 'sdpo[{extra}]'")
        self.extra = extra


class GradingError(SDPOError):
    """An environment could not grade an attempt."""


class SandboxError(SDPOError):
    """The sandbox failed, not the program in it."""


class SamplerError(SDPOError):
    """A sampler could not produce completions."""


class CheckpointError(SDPOError):
    """A checkpoint could not be written or read."""


class BackendError(SDPOError):
    """A backend refuses the configuration or could not start."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the closest known names, or with all of them when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(names)}"


@contextmanager
def boundary(doing: str, error: type[SDPOError], *catch: type[Exception], hint: str = "") -> Iterator[None]:
    """Turn foreign exceptions into one of ours that says what was being done.

    Args:
        doing: a phrase that completes "could not ...".
        error: the class to raise.
        catch: the foreign classes to translate; `OSError` when none is given.
        hint: the remedy.
    """
    foreign = catch or (OSError,)
    try:
        yield
    except SDPOError:
        raise
    except foreign as exc:
        first = (str(exc).strip().splitlines() or [""])[0]
        reason = f"{type(exc).__name__}: {first}"[:400]
        raise error(f"could not {doing}: {reason}", hint=hint) from exc
