"""Reads a TOML file that an administrator wrote, and says in which line it is wrong.

The decoder knows the place of a value that is of the wrong kind by its name (`$.targets[1].id`), not by its line: that
is looked up in the text, as the files are written, one name in a line and tables under `[name]` or `[[name]]`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec
from msgspec import inspect

from fireflyer.base.decoding import DECODE_ERRORS, decode_toml
from fireflyer.base.errors import UsageError

__all__ = ["in_words", "line_of", "read_text", "read_toml"]

MAX_BYTES: Final = 1 << 20
C = TypeVar("C", bound=msgspec.Struct)

_PLACE: Final = re.compile(r" - at `\$(?P<place>[^`]*)`")
_UNKNOWN: Final = re.compile(r"unknown field `(?P<name>[^`]*)`")
_OWN_WORDS: Final = re.compile(r"Object (?:contains )?|Expected |(?=Invalid )")
_STEP: Final = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<number>\d+)\]")
_HEADER: Final = re.compile(r"\s*\[(?P<many>\[)?\s*(?P<name>[A-Za-z0-9_-]+)\s*\]")
_KEY: Final = re.compile(r"\s*(?P<name>[A-Za-z0-9_-]+)\s*=")


def read_toml(
    path: str, config_type: type[C], *, name: str, advice: str, keys: str = "", max_bytes: int = MAX_BYTES
) -> C:
    """`name`: what the file is called to whom gave it; `advice`: for one who gave none; `keys`: where they are
    described. Raises `UsageError`: one line that names the file, the line in it if it can be told, and what is wrong
    there."""
    data = read_text(path, name=name, advice=advice, max_bytes=max_bytes)
    see = f"; its keys: {keys}" if keys else ""
    try:
        return decode_toml(data, config_type)
    except msgspec.ValidationError as error:
        line = line_of(data.decode(errors="replace"), str(error))
        said = f"{in_words(str(error))}{_advice(config_type, str(error))}{see}"
        raise UsageError(f"{name} {path!r}{f', line {line}' if line else ''}: {said}") from error
    except (*DECODE_ERRORS, UsageError) as error:
        raise UsageError(f"{name} {path!r}: {error}{see}") from error


def read_text(path: str, *, name: str, advice: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of the file. Raises `UsageError`, as `read_toml`."""
    try:
        if not os.path.isfile(path):  # a pipe would wait, a device never end
            raise UsageError(f"{name} {path!r} is not a file; {advice}")
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise UsageError(f"{name} {path!r} cannot be read: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise UsageError(f"{name} {path!r} is larger than {max_bytes} bytes")
    return data


def in_words(error: str) -> str:
    """What the decoder complains of, after the key of the file; what a type itself refuses names its key already."""
    found = _PLACE.search(error)
    place, text = ("", error) if found is None else (found["place"].removeprefix("."), error[: found.start()])
    own = _OWN_WORDS.match(text)
    if own is None:
        return text
    said = text[own.end() :].replace(" | null", "")  # which TOML does not have
    said = f"{'expected ' * (own[0] == 'Expected ')}{said}"
    return f"{place}: {said}" if place else said


def line_of(text: str, error: str) -> int:
    """Of what the decoder complains of, from 1; 0 if it is nowhere, as what is missing is."""
    found = _PLACE.search(error)
    steps = [step["name"] or int(step["number"]) for step in _STEP.finditer(found["place"])] if found else []
    if (unknown := _UNKNOWN.search(error)) is not None:
        steps.append(unknown["name"])
    best, depth = 0, 0
    for number, place in _places(text):
        if len(place) > depth and steps[: len(place)] == place:
            best, depth = number, len(place)
    return best


def _advice(config_type: type[msgspec.Struct], error: str) -> str:
    """What a value may be that the decoder does not know, or the keys of a table where there is none: the decoder names
    only what is wrong."""
    kinds = [one for kind in _kinds_at(config_type, error) for one in _alternatives(kind)]
    if "Invalid enum value" in error:
        values = [value for one in kinds for value in _values(one)]
        return f"; use {', '.join(map(str, values))}" if values else ""
    if "Expected `object" in error:
        keys = [field.encode_name for one in kinds if isinstance(one, inspect.StructType) for field in one.fields]
        return f"; write a table with {', '.join(keys)}" if keys else ""
    return ""


def _kinds_at(config_type: type[msgspec.Struct], error: str) -> list[inspect.Type]:
    """Types of the value that the decoder complains of."""
    found = _PLACE.search(error)
    if found is None:
        return []
    kinds = [inspect.type_info(config_type)]
    for step in _STEP.finditer(found["place"]):
        name = step["name"]
        kinds = [inner for kind in kinds for inner in _inside(kind, None if name == "..." else name)]
    return kinds


def _alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _values(kind: inspect.Type) -> list[object]:
    if isinstance(kind, inspect.LiteralType):
        return list(kind.values)
    return [one.value for one in kind.cls] if isinstance(kind, inspect.EnumType) else []


def _inside(kind: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """Types of the field of that name, or of the elements of an array or values of a table."""
    for one in _alternatives(kind):
        if isinstance(one, inspect.StructType) and name is not None:
            yield from (field.type for field in one.fields if field.encode_name == name)
        elif isinstance(one, inspect.DictType):
            yield one.value_type
        elif isinstance(one, (inspect.ListType, inspect.VarTupleType)):
            yield one.item_type


def _places(text: str) -> Iterator[tuple[int, list[str | int]]]:
    """The lines that begin something, and what."""
    counts: dict[str, int] = {}
    table: list[str | int] = []
    for number, line in enumerate(text.splitlines(), 1):
        if (header := _HEADER.match(line)) is not None:
            name = header["name"]
            counts[name] = counts.get(name, -1) + 1
            table = [name, counts[name]] if header["many"] else [name]
            yield number, table
        elif (key := _KEY.match(line)) is not None:
            yield number, [*table, key["name"]]
