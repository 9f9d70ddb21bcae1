"""Readers of inputs: whole files, and lines of JSON. Memory is bounded by one record or line, and a buffer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np

from fireflyer.base.units import MIB, format_bytes
from fireflyer.data.packing.inputs import Input, open_input
from fireflyer.data.packing.items import InvalidInput, Item, Position
from fireflyer.data.packing.values import Encoding, NotARecord
from fireflyer.data.places import translated
from fireflyer.data.shard_format import MAX_RECORD_BYTES
from fireflyer.native import crc32c

__all__ = ["read_files", "read_jsonl", "same_until"]

_BLOCK_BYTES: Final = 4 * MIB
MAX_VALUES: Final = 1 << 23
"""Of a line: as objects of Python they take up to 100 bytes each, however few bytes they have in the line."""


def read_files(inputs: Sequence[Input], begin: Position, encoding: Encoding) -> Iterator[Item]:
    """Each file a record with its name."""
    for number in range(begin.input, len(inputs)):
        one, after = inputs[number], Position(number + 1)
        if one.size > MAX_RECORD_BYTES:
            size, most = format_bytes(one.size), format_bytes(MAX_RECORD_BYTES)
            problem = f"{one.place.name}: {size}, a record has at most {most}"
            yield Item(None, after, one.name, one.size, problem)
            continue
        file = open_input(one)
        try:
            content = b"".join(_blocks(file, one))
        finally:
            file.close()
        try:
            yield Item(encoding.text(content), after, one.name, one.size)
        except NotARecord as error:
            yield Item(None, after, one.name, one.size, f"{one.place.name}: {error}")


def read_jsonl(inputs: Sequence[Input], begin: Position, encoding: Encoding, field: str | None) -> Iterator[Item]:
    """Each line a record: the value of `field` of its object, or the line as it is. Empty lines are none."""
    for number in range(begin.input, len(inputs)):
        start = begin if number == begin.input else Position(number)
        yield from _read_lines(inputs[number], start, encoding, field)


def _read_lines(one: Input, begin: Position, encoding: Encoding, field: str | None) -> Iterator[Item]:
    file = open_input(one)
    try:
        if begin.at:
            with _reading(one):
                file.seek(begin.at)
        at, line, crc = begin.at, begin.line, begin.crc
        for content in _lines(file, one, line):
            at, line, crc = at + len(content), line + 1, crc32c(content, crc)
            after = Position(begin.input, at, line, crc)
            if text := content.strip(b" \t\r\n"):
                try:
                    yield Item(_of_line(text, encoding, field), after, None, len(content))
                except NotARecord as error:
                    yield Item(None, after, None, len(content), f"{one.place.name}:{line}: {error}")
    finally:
        file.close()


def _of_line(text: bytes, encoding: Encoding, field: str | None) -> bytes:
    if len(text) > MAX_VALUES and _count_values(text) > MAX_VALUES:
        raise NotARecord(f"holds more than {MAX_VALUES} values, which would take too much memory at once")
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise NotARecord(f"is not JSON: {error}") from None
    if field is None:
        return encoding.text(text)
    if not isinstance(found, dict):
        raise NotARecord(f"is not an object with a field {field!r}")
    if field not in found:
        names = ", ".join(repr(name) for name in list(found)[:8]) or "none"
        raise NotARecord(f"has no field {field!r}; its fields: {names}")
    try:
        return encoding.value(found[field])
    except NotARecord as error:
        raise NotARecord(f"field {field!r} {error}") from None


def _count_values(text: bytes) -> int:
    """Values of JSON in `text`, or more: each but the first follows a comma or an opening bracket outside of
    strings."""
    found, before = 1, np.uint8(0)
    plain = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    for begin in range(0, len(plain), _BLOCK_BYTES):
        block = plain[begin : begin + _BLOCK_BYTES]
        quotes = np.cumsum(block == ord('"'), dtype=np.uint8) + before
        outside = block[quotes % 2 == 0]
        found += sum(int(np.count_nonzero(outside == ord(one))) for one in ",[{")
        before = quotes[-1]
    return found


def _lines(file: Any, one: Input, line: int) -> Iterator[bytes]:
    """With their ends; the last may lack one. `line`: how many are before them. Raises `InvalidInput`."""
    kept = bytearray()
    for block in _blocks(file, one):
        begin = 0
        while (end := block.find(b"\n", begin)) >= 0:
            kept += memoryview(block)[begin : end + 1]
            line += 1
            yield bytes(kept)
            kept = bytearray()
            begin = end + 1
        kept += memoryview(block)[begin:]
        if len(kept) > MAX_RECORD_BYTES:
            most = format_bytes(MAX_RECORD_BYTES)
            raise InvalidInput(f"{one.place.name}:{line + 1}: the line is longer than {most}; this is no JSONL")
    if kept:
        yield bytes(kept)


def _blocks(file: Any, one: Input, most: int | None = None) -> Iterator[bytes]:
    """To the end, or until they are `most` bytes. Raises `FireflyerError`."""
    while most is None or most > 0:
        with _reading(one):
            block = file.read(_BLOCK_BYTES if most is None else min(most, _BLOCK_BYTES))
        if not block:
            return
        most = None if most is None else most - len(block)
        yield block


def _reading(one: Input) -> AbstractContextManager[None]:
    return translated(f"read {one.place.name}")


def same_until(one: Input, position: Position) -> bool:
    """Whether the bytes of a file before `position` are those that were read when that was noted."""
    at, crc = 0, 0
    file = open_input(one)
    try:
        for block in _blocks(file, one, position.at):
            at, crc = at + len(block), crc32c(block, crc)
    finally:
        file.close()
    return (at, crc) == (position.at, position.crc)
