"""Untrusted code, run apart: see `base.py` for the interface and the README for what is isolated and what is not."""

from sdpo_sandbox.base import Call, Frame, Limits, Program, ProgramError, RunResult, Sandbox, Status, Test
from sdpo_sandbox.open import open_sandbox
from sdpo_sandbox.prelude import COMPETITION_PRELUDE

__all__ = [
    "COMPETITION_PRELUDE",
    "Call",
    "Frame",
    "Limits",
    "Program",
    "ProgramError",
    "RunResult",
    "Sandbox",
    "Status",
    "Test",
    "open_sandbox",
]
