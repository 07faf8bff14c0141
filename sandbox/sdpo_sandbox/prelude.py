"""Names that programs written for contest sites expect to find: the star imports which LiveCodeBench puts before every
answer, and its recursion limit. The order decides which name wins (`builtins` after `math` and `operator`: `pow` is the
integer one)."""

from __future__ import annotations

__all__ = ["COMMON_MODULES", "COMPETITION_MODULES", "COMPETITION_PRELUDE", "MORE_MODULES"]

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

# Loaded in every fork server: programs import these often, and a loaded module costs a child nothing.
COMMON_MODULES = (
    "abc",
    "array",
    "cmath",
    "contextlib",
    "dataclasses",
    "decimal",
    "enum",
    "fractions",
    "numbers",
    "os",
    "queue",
    "struct",
    "textwrap",
    "threading",
    "time",
    "traceback",
    "types",
)

# Loaded where nothing can be loaded later.
MORE_MODULES = (
    "argparse",
    "asyncio",
    "base64",
    "binascii",
    "calendar",
    "codecs",
    "concurrent.futures",
    "csv",
    "ctypes",
    "difflib",
    "fileinput",
    "gc",
    "hashlib",
    "heapq",
    "html",
    "inspect",
    "ipaddress",
    "locale",
    "logging",
    "pickle",
    "pprint",
    "resource",
    "secrets",
    "select",
    "shlex",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "unicodedata",
    "unittest",
    "uuid",
    "weakref",
    "zlib",
)
