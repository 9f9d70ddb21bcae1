"""Sample values of a type, derived from its annotations: the same type always gives the same values.

Every member of a union, every value of an enumeration or literal, and every optional field set and unset occurs in at
least one of the samples. Limits of numbers, texts and sequences are respected. What a `__post_init__` demands beyond
them is not known here: samples of such classes are given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final

import msgspec
from msgspec import inspect

__all__ = ["FREE_FORM", "Given", "samples"]

FREE_FORM: Final = {"text": "x", "numbers": [1, 2.5], "nothing": None, "flag": True}
"""The sample of a field that takes anything."""
_TEXTS_FOR_PATTERNS: Final = ("s", "0" * 64, "0" * 32, "127.0.0.1:9000", "a-b", "1", "attempt-0/rank-1.log",
                              "topology.json", "00000000.0.0", "https://h/p", "t1-0")  # fmt: skip

Variants = list[Any]
Given = Mapping[type, Callable[[], Sequence[Any]]]


def samples(kind: Any, raw: bytes = b"", given: Given | None = None) -> Variants:
    """`raw`: the sample of a field whose bytes are decoded later. `given`: samples of classes that refuse others.
    Raises what the constructor of a class raises that refuses its sample."""
    return _Generator(raw, given or {}).of(inspect.type_info(kind))


class _Generator:
    def __init__(self, raw: bytes, given: Given) -> None:
        self._raw = raw
        self._given = given
        self._numbers = count(1)
        self._open: list[type] = []
        self._by_kind: dict[type, Callable[[Any], Variants]] = {
            inspect.AnyType: lambda _: [dict(FREE_FORM)],
            inspect.RawType: lambda _: [msgspec.Raw(self._raw)],
            inspect.NoneType: lambda _: [None],
            inspect.BoolType: lambda _: [True, False],
            inspect.IntType: lambda info: [self._integer(info)],
            inspect.FloatType: lambda info: [self._fraction(info)],
            inspect.StrType: lambda info: [self._text(info)],
            inspect.BytesType: lambda info: [self._bytes(info)],
            inspect.ByteArrayType: lambda info: [bytearray(self._bytes(info))],
            inspect.EnumType: lambda info: list(info.cls),
            inspect.LiteralType: lambda info: list(info.values),
            inspect.UnionType: lambda info: [value for member in info.types for value in self.of(member)],
            inspect.ListType: lambda info: self._sequence(info, list),
            inspect.VarTupleType: lambda info: self._sequence(info, tuple),
            inspect.SetType: lambda info: self._sequence(info, set),
            inspect.FrozenSetType: lambda info: self._sequence(info, frozenset),
            inspect.TupleType: lambda info: [tuple(row) for row in _rows([self.of(item) for item in info.item_types])],
            inspect.DictType: self._dictionary,
            inspect.StructType: self._fields_of,
            inspect.DataclassType: self._fields_of,
            inspect.NamedTupleType: self._fields_of,
        }

    def of(self, info: inspect.Type) -> Variants:
        while isinstance(info, inspect.Metadata):
            info = info.type
        return self._by_kind[type(info)](info)

    def _integer(self, info: inspect.IntType) -> int:
        number = next(self._numbers)
        least = info.ge if info.ge is not None else info.gt + 1 if info.gt is not None else None
        most = info.le if info.le is not None else info.lt - 1 if info.lt is not None else None
        if most is not None and number > most:
            number = most if least is None else least + number % (most - least + 1)
        return number if least is None or number >= least else least + number % ((most or least + 1000) - least + 1)

    def _fraction(self, info: inspect.FloatType) -> float:
        number = next(self._numbers) + 0.5
        least = info.gt if info.ge is None else info.ge
        most = info.lt if info.le is None else info.le
        if most is not None and number >= most:
            return (least or 0.0) + (most - (least or 0.0)) / 2
        return number if least is None or number > least else least + number

    def _text(self, info: inspect.StrType) -> str:
        number = next(self._numbers)
        for stem in _TEXTS_FOR_PATTERNS:
            text = f"{stem}{number}" if stem == "s" else stem
            text = text.ljust(info.min_length or 0, "s")[: info.max_length]
            if info.pattern is None or re.search(info.pattern, text):
                return text
        raise ValueError(f"no sample text matches the pattern {info.pattern!r}; add one that does to `samples`")

    def _bytes(self, info: inspect.BytesType | inspect.ByteArrayType) -> bytes:
        return f"b{next(self._numbers)}".encode().ljust(info.min_length or 0, b".")[: info.max_length]

    def _sequence(self, info: Any, collect: Callable[[Variants], Any]) -> Variants:
        items = self.of(info.item_type)
        full = [
            items[start : start + (info.max_length or 1000)] for start in range(0, len(items), info.max_length or 1000)
        ]
        while info.min_length and full and len(full[-1]) < info.min_length:
            full[-1] = full[-1] + items[: info.min_length - len(full[-1])]
        return [*([] if info.min_length else [collect([])]), *(collect(part) for part in full)]

    def _dictionary(self, info: inspect.DictType) -> Variants:
        values = self.of(info.value_type)
        keys = [key for _ in values for key in self.of(info.key_type)]
        return [{}, dict(zip(keys, values, strict=False))] if values else [{}]

    def _fields_of(self, info: inspect.StructType | inspect.DataclassType | inspect.NamedTupleType) -> Variants:
        if info.cls in self._given:
            return list(self._given[info.cls]())
        if info.cls in self._open:
            return []
        self._open.append(info.cls)
        variants = {field.name: self.of(field.type) for field in info.fields}
        self._open.pop()
        required = {field.name for field in info.fields if field.required}
        if any(not found for name, found in variants.items() if name in required):
            return []
        variants = {name: found for name, found in variants.items() if found}
        full = [info.cls(**dict(zip(variants, row, strict=True))) for row in _rows(list(variants.values()))]
        if len(required) == len(info.fields):
            return full
        return [info.cls(**{name: variants[name][0] for name in required}), *full]


def _rows(columns: list[Variants]) -> Iterator[tuple[Any, ...]]:
    """As many as the longest column has values; shorter columns begin again. One, empty, of no columns."""
    for at in range(max(map(len, columns), default=1)):
        yield tuple(column[at % len(column)] for column in columns)
