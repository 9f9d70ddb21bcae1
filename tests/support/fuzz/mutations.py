"""Hostile bytes made from right ones: `hostile(rng, samples)` changes, cuts, joins, and lies about lengths and counts.

The same generator gives the same bytes, so a failure is named by its seed and number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

__all__ = ["hostile"]

MAX_BYTES: Final = 1 << 16
"""Of what is made; small inputs find the same faults as large ones, and more of them."""
_NUMBERS: Final = (0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 1023, 1024, 1025, 65535, 65536)
_NUMBERS_WIDE: Final = tuple((1 << bits) + more for bits in (16, 31, 32, 48, 62, 63) for more in (-1, 0, 1))
_HEADERS: Final = (
    b"\xdd\xff\xff\xff\xff",  # MessagePack: an array, a map, text and bytes of 4 G
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc1",  # no type at all
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a time out of range
    b'"\\ud800"',
    b"\xff\xfe",
    b"1e999999999",
    b"9" * 400,
    b"-0",
    b"\x00",
)
_NESTS: Final = (b"\x91", b"\x81\x01", b"[", b'{"a":', b"\x93\x01\x01")
_VALUES: Final[tuple[Any, ...]] = (
    None, True, 0, -1, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.5, float("inf"), "", "a", "\0",
    "x" * 300, "\u202e", b"", b"\xff" * 40, [], {}, [[]], {"": None}, [None] * 300, {"a": {"a": {"a": 1}}},
)  # fmt: skip


def hostile(rng: random.Random, samples: Sequence[bytes]) -> bytes:
    """From one or several of `samples`, or of nothing."""
    if not samples or rng.random() < 0.05:
        return rng.randbytes(rng.choice((0, 1, 2, 3, 8, 24, 64, 200, 1024)))
    data = rng.choice(samples)
    if rng.random() < 0.35:
        data = _other_tree(rng, data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4, 8))):
        data = rng.choice(_CHANGES)(rng, data, samples)[:MAX_BYTES]
    return data


def _flip(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return b"\x01"
    at = rng.randrange(len(data))
    return data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]


def _number(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A number that may be a length or a count: one of those at which something overflows, or one close to the size."""
    width = rng.choice((1, 2, 4, 8))
    near = len(data) + rng.randint(-9, 9)
    value = rng.choice((*_NUMBERS, *_NUMBERS_WIDE, near, -1)) % (1 << 8 * width)
    at = rng.randrange(len(data) + 1)
    return data[:at] + value.to_bytes(width, rng.choice(("big", "little"))) + data[at + width :]


def _cut(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:begin] if rng.random() < 0.5 else data[:begin] + data[end:]


def _insert(rng: random.Random, data: bytes, samples: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    more = rng.choice((rng.randbytes(rng.randrange(9)), rng.choice(_HEADERS), rng.choice(samples)))
    return data[:at] + more + data[at:]


def _repeat(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[begin:end] * rng.choice((1, 2, 17, 300)) + data[end:]


def _nest(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(_NESTS) * rng.choice((3, 60, 1100, 5000)) + data[at:]


def _unknown_field(_: random.Random, data: bytes, __: Sequence[bytes]) -> bytes:
    """A field that nobody knows, of arrays in arrays: a decoder skips it, and has to go as deep."""
    if data.endswith(b"}"):
        return data[:-1] + b',"?":' + b"[" * 5000
    if data[:1] and 0x80 <= data[0] < 0x8F:
        return bytes((data[0] + 1,)) + b"\xa1?" + b"\x91" * 900
    return data


def _join(rng: random.Random, data: bytes, samples: Sequence[bytes]) -> bytes:
    other = rng.choice(samples)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


_CHANGES: Final[tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...]] = (
    _flip, _flip, _number, _number, _cut, _insert, _repeat, _nest, _join, _unknown_field,
)  # fmt: skip


def _other_tree(rng: random.Random, data: bytes) -> bytes:
    """The same MessagePack or JSON with another value in one place; `data` itself where it is neither."""
    for codec in (msgspec.json, msgspec.msgpack):
        try:
            return bytes(codec.encode(_changed(rng, codec.decode(data))))
        except (ValueError, TypeError, RecursionError, OverflowError):
            continue
    return data


def _changed(rng: random.Random, tree: Any) -> Any:
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        what = rng.random()
        if what < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        if what < 0.2:
            return tree | {rng.choice(("", "type", "x" * 100)): rng.choice(_VALUES)}
        return tree | {key: _changed(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.85:
        at = rng.randrange(len(tree))
        what = rng.random()
        if what < 0.1:
            return tree[:at] + tree[at + 1 :]
        if what < 0.2:
            return tree[:at] + [tree[at]] * rng.choice((2, 9, 1000)) + tree[at:]
        return [*tree[:at], _changed(rng, tree[at]), *tree[at + 1 :]]
    if isinstance(tree, int) and not isinstance(tree, bool) and rng.random() < 0.6:
        return tree + rng.choice((1, -1, 1 << 31, -(1 << 31), 1 << 62))
    return rng.choice(_VALUES)
