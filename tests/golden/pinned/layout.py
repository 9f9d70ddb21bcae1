"""What a type looks like when it is encoded: names, tags and order of fields, defaults, values of enumerations.

Names of classes, and of fields that are encoded by position or under another name, do not occur in it. Classes with the
same encoded form count as one, so that two of them may become one class.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

__all__ = ["Layout", "layout", "moved", "structs_of"]

Row = dict[str, Any]
_Fields = inspect.StructType | inspect.DataclassType | inspect.NamedTupleType
_PLAIN: dict[type, str] = {
    inspect.AnyType: "any",
    inspect.RawType: "raw",
    inspect.NoneType: "null",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bytes",
    inspect.ByteArrayType: "bytes",
}


class Layout(msgspec.Struct):
    """`root` and the rows refer to rows by their number, as `#2`."""

    root: str
    rows: list[Row]
    classes: list[str]
    """What the classes are called, for people; beside `rows`."""
    order: list[list[list[str]]]
    """What fields by position are called, of each class that has the form of the row; beside `rows`."""
    enumerations: dict[str, list[dict[str, Any]]]
    """What values are called, of each enumeration with these values."""


def layout(kind: Any) -> Layout:
    return _Describing().of(kind)


def structs_of(kind: Any) -> dict[type, None]:
    """The classes with fields that can be in a value of this type."""
    found: dict[type, None] = {}
    _collect(inspect.type_info(kind), found)
    return found


class _Describing:
    def __init__(self) -> None:
        self._found = Layout("", [], [], [], {})
        self._number: dict[str, int] = {}
        self._open: list[type] = []
        self._enumerations: list[type] = []
        self._described: list[type] = []

    def of(self, kind: Any) -> Layout:
        self._found.root = self._text(inspect.type_info(kind))
        return self._found

    def _text(self, info: inspect.Type) -> str:
        while isinstance(info, inspect.Metadata):
            info = info.type
        if type(info) in _PLAIN:
            return _PLAIN[type(info)]
        match info:
            case inspect.UnionType(types=members):
                return " | ".join(self._text(one) for one in sorted(members, key=_order))
            case inspect.EnumType(cls=kind):
                values = _values([member.value for member in kind])
                known = self._found.enumerations.setdefault(values, [])
                if kind not in self._enumerations:
                    self._enumerations.append(kind)
                    known.append({member.name: member.value for member in kind})
                return f"one of {values}"
            case inspect.LiteralType(values=values):
                return f"one of {_values(list(values))}"
            case inspect.DictType(key_type=key, value_type=value):
                return f"{{{self._text(key)}: {self._text(value)}}}"
            case inspect.TupleType(item_types=items):
                return f"({', '.join(map(self._text, items))})"
            case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
                return f"[{self._text(info.item_type)}]"
            case inspect.StructType() | inspect.DataclassType() | inspect.NamedTupleType():
                return self._reference(info)
        raise TypeError(f"{info} has no description in tests/golden/pinned/layout.py; give it one")

    def _reference(self, info: _Fields) -> str:
        if info.cls in self._open:
            return f"#up{len(self._open) - self._open.index(info.cls)}"
        self._open.append(info.cls)
        row = self._row(info)
        self._open.pop()
        key = msgspec.json.encode(row).decode()
        if key not in self._number:
            self._number[key] = len(self._found.rows)
            self._found.rows.append(row)
            self._found.classes.append(info.cls.__name__)
            self._found.order.append([])
        if info.cls not in self._described and "fields by position" in row:
            self._described.append(info.cls)
            self._found.order[self._number[key]].append([field.name for field in info.fields])
        return f"#{self._number[key]}"

    def _row(self, info: _Fields) -> Row:
        row: Row = {}
        by_position = isinstance(info, inspect.NamedTupleType)
        if isinstance(info, inspect.StructType):
            by_position = info.array_like
            if info.tag_field is not None:
                row["tag"] = info.tag if by_position else {info.tag_field: info.tag}
            if info.forbid_unknown_fields:
                row["unknown fields"] = "refused"
        fields = []
        for field in info.fields:
            name = [] if by_position else [getattr(field, "encode_name", field.name)]
            fields.append([*name, self._text(field.type), *self._default(field)])
        return {**row, "fields by position" if by_position else "fields by name": fields}

    def _default(self, field: inspect.Field) -> list[Any]:
        if field.required:
            return []
        value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        return [{"default": msgspec.json.decode(msgspec.json.encode(value))}]


def moved(before: list[str], now: list[str]) -> list[str]:
    """Names that stand at another position than before. A name that is new stands for one that is gone."""
    return [name for at, name in enumerate(before) if name in now and now.index(name) != at]


def _order(info: inspect.Type) -> tuple[bool, str]:
    """The order in which a union was written does not matter."""
    return isinstance(info, inspect.StructType), str(getattr(info, "tag", type(info).__name__)).rjust(8)


def _values(values: list[Any]) -> str:
    plain = [value.value if isinstance(value, enum.Enum) else value for value in values]
    return msgspec.json.encode(sorted(plain, key=lambda value: (str(type(value)), value))).decode()


def _collect(info: inspect.Type, found: dict[type, None]) -> None:
    if isinstance(info, inspect.StructType | inspect.DataclassType | inspect.NamedTupleType):
        if info.cls in found:
            return
        found[info.cls] = None
        for field in info.fields:
            _collect(field.type, found)
    for inner in _inside(info):
        _collect(inner, found)


def _inside(info: inspect.Type) -> Iterator[inspect.Type]:
    match info:
        case inspect.Metadata(type=inner):
            yield inner
        case inspect.UnionType(types=inner) | inspect.TupleType(item_types=inner):
            yield from inner
        case inspect.DictType(key_type=key, value_type=value):
            yield from (key, value)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            yield info.item_type
