"""Returned values as JSON, so that nothing but plain data crosses the boundary (never pickle).

JSON's own types stand for themselves; the others are objects with one key:

    {"t": [...]} tuple   {"s": [...]} set   {"f": [...]} frozenset   {"d": [[key, value], ...]} dict
    {"i": "-ff"} large int, hexadecimal     {"b": "6162"} bytes, hexadecimal     {"c": [re, im]} complex

`encode` runs beside the untrusted program, `decode` in the trusted parent: a value may be wrong but never more than a
value. `decode` takes time linear in the text, also for keys that were chosen to collide.
"""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["MAX_DEPTH", "MAX_INT_DIGITS", "decode", "encode"]

MAX_DEPTH = 200
MAX_INT_DIGITS = 50_000
_MAX_INT_BITS = int(MAX_INT_DIGITS * 3.3219280948873626)
_JSON_INT_BITS = 4096  # json.loads refuses longer ones by the interpreter's digit limit, and takes quadratic time
_MAX_COLLISIONS = 100


def encode(value: Any) -> str:
    """The JSON text of a value.

    Raises:
        TypeError: something in it is not data.
        ValueError: nested too deeply, or an integer with too many digits.
    """
    return json.dumps(_plain(value, 0))


def _plain(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if depth > MAX_DEPTH:
        raise ValueError("the returned value is nested deeper than %d" % MAX_DEPTH)
    # `type` and `issubclass` look at the real type: a lying __class__ or __eq__ does not help, and the methods of the
    # builtin are called, not those of the subclass.
    if issubclass(kind, int):
        number = int.__add__(value, 0)
        bits = number.bit_length()
        if bits > _MAX_INT_BITS:
            raise ValueError("the returned integer has more than %d digits" % MAX_INT_DIGITS)
        return number if bits <= _JSON_INT_BITS else {"i": "%x" % number}
    if issubclass(kind, list):
        return [_plain(v, depth + 1) for v in list.__iter__(value)]
    if issubclass(kind, tuple):
        return {"t": [_plain(v, depth + 1) for v in tuple.__iter__(value)]}
    if issubclass(kind, dict):
        return {"d": [[_plain(k, depth + 1), _plain(v, depth + 1)] for k, v in dict.items(value)]}
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, float):
        return float.__add__(value, 0.0)
    if issubclass(kind, set):
        return {"s": [_plain(v, depth + 1) for v in set.__iter__(value)]}
    if issubclass(kind, frozenset):
        return {"f": [_plain(v, depth + 1) for v in frozenset.__iter__(value)]}
    if issubclass(kind, complex):
        return {"c": [value.real, value.imag]}
    if issubclass(kind, bytes):
        return {"b": bytes.hex(value)}
    if issubclass(kind, bytearray):
        return {"b": bytearray.hex(value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, (numpy.generic, numpy.ndarray)):
        return _plain(value.tolist(), depth + 1)
    raise TypeError("the function returned %s %s, which is not plain data" % (_article(kind.__name__), kind.__name__))


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"


def decode(text: str) -> Any:
    """The value of a JSON text made by `encode`, or by a program that forged one.

    Raises:
        ValueError: not such a text.
    """
    try:
        return _value(json.loads(text), 0)
    except (KeyError, IndexError, TypeError, RecursionError, OverflowError) as exc:
        raise ValueError("not an encoded value: %s" % type(exc).__name__) from exc


def _value(plain: Any, depth: int) -> Any:
    if depth > MAX_DEPTH + 2:
        raise ValueError("not an encoded value: too deep")
    if isinstance(plain, list):
        return [_value(v, depth + 1) for v in plain]
    if not isinstance(plain, dict):
        return plain
    ((tag, content),) = plain.items()
    if tag == "i":
        return int(content, 16)
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "c":
        return complex(*content)
    items: list[Any] = [_value(v, depth + 1) for v in content]
    if tag == "t":
        return tuple(items)
    if tag == "s":
        return set(_hashable(items))
    if tag == "f":
        return frozenset(_hashable(items))
    if tag == "d":
        return dict(zip(_hashable([k for k, _ in items]), [v for _, v in items]))  # noqa: B905 - Python 3.9
    raise ValueError("not an encoded value: unknown tag")


def _hashable(keys: list[Any]) -> list[Any]:
    """The keys, unless more than `_MAX_COLLISIONS` different ones share a hash: numbers can be chosen so, and would take
    quadratic time to insert."""
    seen: dict[int, int] = {}
    for key in keys:
        h = hash(key)
        seen[h] = seen.get(h, 0) + 1
        if seen[h] > _MAX_COLLISIONS:
            raise ValueError("not an encoded value: colliding keys")
    return keys
