"""Names that programs written for contest sites expect to find: the star imports which LiveCodeBench puts before every
answer, and its recursion limit. The order decides which name wins (`builtins` after `math` and `operator`: `pow` is the
integer one)."""

from __future__ import annotations

__all__ = ["COMPETITION_MODULES", "COMPETITION_PRELUDE"]

COMPETITION_MODULES = (
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
    "builtins",
    "typing",
)

COMPETITION_PRELUDE = (
    "".join(f"from {name} import *\n" for name in COMPETITION_MODULES)
    + "".join(f"import {name}\n" for name in COMPETITION_MODULES)
    + "sys.setrecursionlimit(50000)\n"
)
