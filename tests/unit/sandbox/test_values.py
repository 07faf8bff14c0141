"""The boundary between the untrusted process and the trusted one: encoding of returned values."""

from __future__ import annotations

import collections
import enum
import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo_sandbox.inside.values import MAX_DEPTH, decode, encode

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**1300), max_value=10**1300)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
hashables = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4), max_leaves=6
)
values = st.recursive(
    hashables,
    lambda inner: st.lists(inner) | st.tuples(inner) | st.sets(hashables) | st.dictionaries(hashables, inner),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, frozenset)):
        return a == b and sorted(type(x).__name__ for x in a) == sorted(type(x).__name__ for x in b)
    return bool(a == b)


@given(values)
def test_what_comes_back_is_what_went_in(value: Any) -> None:
    assert same(decode(encode(value)), value)


def test_nan_and_infinities_stay_floats() -> None:
    back = decode(encode([math.nan, math.inf, -math.inf, -0.0]))
    assert math.isnan(back[0])
    assert back[1:3] == [math.inf, -math.inf]
    assert math.copysign(1, back[3]) == -1


def test_large_integers_survive_the_digit_limit_of_json() -> None:
    number = -(7**20000)
    assert decode(encode([number])) == [number]


class _Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__

    def __add__(self, other: int) -> int:
        return 99

    def __int__(self) -> int:
        return 99


class _LyingDict(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        return [("z", 1)]


class _Text(str):
    def __str__(self) -> str:
        return "lie"


class _Color(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (_Liar(5), 5),
        (_LyingDict(a=1), {"a": 1}),
        (_Text("x"), "x"),
        (_Color.RED, 3),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(b=1), {"b": 1}),
        (collections.namedtuple("P", "x y")(1, 2), (1, 2)),
        (True, True),
        (bytearray(b"ab"), b"ab"),
    ],
)
def test_subclasses_are_reduced_to_their_storage(value: Any, plain: Any) -> None:
    assert same(decode(encode(value)), plain)


def test_numpy_values_become_numbers_and_lists() -> None:
    numpy = pytest.importorskip("numpy")
    assert same(decode(encode(numpy.int64(5))), 5)
    assert same(decode(encode([numpy.float32(0.5), numpy.arange(4).reshape(2, 2)])), [0.5, [[0, 1], [2, 3]]])


def test_a_class_that_pretends_to_be_a_number_is_refused() -> None:
    class Pretender:
        __class__ = property(lambda self: int)  # type: ignore[assignment]

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return True

        def __eq__(cls, other: object) -> bool:
            return True

        def __hash__(cls) -> int:
            return hash(int)

    class Accepted(metaclass=Meta):
        pass

    for value in (Pretender(), Accepted(), (x for x in [5]), object, iter([1]), range(3), collections.deque([1])):
        with pytest.raises(TypeError, match="not plain data"):
            encode(value)


def test_limits_of_depth_and_digits() -> None:
    nested: list[Any] = []
    for _ in range(MAX_DEPTH):
        nested = [nested]
    assert decode(encode(nested)) == nested
    with pytest.raises(ValueError, match="deeper than 200"):
        encode([nested])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="deeper than 200"):
        encode(loop)
    with pytest.raises(ValueError, match="50000 digits"):
        encode(10**200_000)
    assert decode(encode(10**49_000)) == 10**49_000


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["t", "s", "f", "d", "i", "b", "c", "x"]) | st.text(max_size=2), inner)
    ),
    max_leaves=15,
)


@given(json_values.map(json.dumps) | st.text())
def test_a_forged_text_is_a_value_or_a_value_error(text: str) -> None:
    try:
        decode(text)
    except ValueError:
        return


def test_forged_depth_does_not_overflow_the_stack() -> None:
    with pytest.raises(ValueError, match="not an encoded value"):
        decode("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match="too deep"):
        decode("[" * 300 + "]" * 300)


def test_keys_that_were_chosen_to_collide_are_refused_quickly() -> None:
    modulus = 2**61 - 1
    forged = json.dumps({"s": [k * modulus for k in range(50_000)]})
    begun = time.perf_counter()
    with pytest.raises(ValueError, match="colliding"):
        decode(forged)
    assert time.perf_counter() - begun < 5
    honest = set(range(50_000))
    assert decode(encode(honest)) == honest
