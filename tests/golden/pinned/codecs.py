"""How values of a format become bytes, and again values."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.golden.pinned.registry import Codec

__all__ = ["decode", "encode", "raw_sample"]


def encode(codec: Codec, value: Any) -> bytes:
    if codec == "msgpack":
        return msgspec.msgpack.encode(value)
    if codec == "toml":
        return _toml(msgspec.to_builtins(value))
    return msgspec.json.encode(value)


def decode(codec: Codec, data: bytes, kind: Any) -> Any:
    if codec == "msgpack":
        return msgspec.msgpack.decode(data, type=kind)
    if codec == "toml":
        return msgspec.toml.decode(data, type=kind)
    if codec == "object":
        return msgspec.convert(msgspec.json.decode(data), kind)
    return msgspec.json.decode(data, type=kind)


def raw_sample(codec: Codec) -> bytes:
    """Something that is encoded already."""
    return msgspec.msgpack.encode([1, "x"]) if codec == "msgpack" else b'{"x":[1]}'


def _toml(table: dict[str, Any]) -> bytes:
    """A line for each key; what is not set has none."""
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in table.items() if value is not None).encode()


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        inner = (f"{_toml_value(name)} = {_toml_value(one)}" for name, one in value.items() if one is not None)
        return f"{{{', '.join(inner)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return msgspec.json.encode(value).decode()
