"""Decoding into types, what it raises for bytes that are not what they should be, and JSON that another rank published.

msgspec 0.22 publishes what it knows of a struct before that is complete: where two threads use a struct for the first
time at once, one of them may read null pointers and end the process. So all decoding is done here, and a test finds
what is done elsewhere. A type is prepared, with all structs in it, by making a decoder under one lock of the process;
after that, a lookup in a dict tells that it is prepared, and nobody waits.

The decoders are kept as long as the process. Give types that are written in the code, not ones that are made for each
call. A type expression that has no hash (an `Annotated` with a dict) is prepared each time anew.

The lock is held across `os.fork`, so that the child has no struct that is half prepared. It is reentrant: evaluating
annotations may run code that decodes. It must not import modules, whose locks others may hold who wait for this one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar, overload

import msgspec

from fireflyer.base.errors import UsageError

__all__ = [
    "DECODE_ERRORS",
    "convert",
    "decode_json",
    "decode_msgpack",
    "decode_published",
    "decode_toml",
    "json_decoder",
    "msgpack_decoder",
    "prepare",
]

_T = TypeVar("_T")
_Bytes: TypeAlias = bytes | bytearray | memoryview

DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""Of the functions of this module, for any bytes and any type. `RecursionError`: arrays nested a thousand deep, which
fit into one kilobyte. `UnicodeDecodeError`: text that is not UTF-8. `OverflowError`: a date or number out of range."""

_lock: Final = threading.RLock()
_json: Final[dict[Any, Callable[[Any], Any]]] = {}
_msgpack: Final[dict[Any, Callable[[Any], Any]]] = {}

os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@overload
def decode_json(data: _Bytes | str, kind: type[_T]) -> _T: ...
@overload
def decode_json(data: _Bytes | str, kind: Any) -> Any: ...
def decode_json(data: _Bytes | str, kind: Any) -> Any:
    """Raises one of `DECODE_ERRORS`."""
    try:
        decode = _json[kind]
    except (KeyError, TypeError):
        decode = json_decoder(kind).decode
        _keep(_json, kind, decode)
    return decode(data)


@overload
def decode_msgpack(data: _Bytes, kind: type[_T]) -> _T: ...
@overload
def decode_msgpack(data: _Bytes, kind: Any) -> Any: ...
def decode_msgpack(data: _Bytes, kind: Any) -> Any:
    """Raises one of `DECODE_ERRORS`."""
    try:
        decode = _msgpack[kind]
    except (KeyError, TypeError):
        decode = msgpack_decoder(kind).decode
        _keep(_msgpack, kind, decode)
    return decode(data)


@overload
def decode_toml(data: _Bytes | str, kind: type[_T]) -> _T: ...
@overload
def decode_toml(data: _Bytes | str, kind: Any) -> Any: ...
def decode_toml(data: _Bytes | str, kind: Any) -> Any:
    """Raises one of `DECODE_ERRORS`."""
    prepare(kind)
    return msgspec.toml.decode(data, type=kind)


@overload
def convert(value: Any, kind: type[_T], *, from_attributes: bool = False) -> _T: ...
@overload
def convert(value: Any, kind: Any, *, from_attributes: bool = False) -> Any: ...
def convert(value: Any, kind: Any, *, from_attributes: bool = False) -> Any:
    """What other code has decoded, as a `kind`. `from_attributes`: objects are taken apart too. Raises one of
    `DECODE_ERRORS`."""
    prepare(kind)
    if from_attributes:
        return msgspec.convert(value, kind, from_attributes=True)
    return msgspec.convert(value, kind)  # the other argument takes longer than most conversions


@overload
def json_decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]: ...
@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """A new decoder, for who decodes lines or keeps it."""
    with _lock:
        return msgspec.json.Decoder(kind)


@overload
def msgpack_decoder(kind: type[_T]) -> msgspec.msgpack.Decoder[_T]: ...
@overload
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A new decoder, for who keeps it."""
    with _lock:
        return msgspec.msgpack.Decoder(kind)


def decode_published(data: bytes, kind: type[_T], publisher: str) -> _T:
    """The JSON that `publisher` ("rank 3") has put into the rendezvous store, or has sent. Raises `UsageError`, which
    names it, for bytes that are something else."""
    try:
        return decode_json(data, kind)
    except DECODE_ERRORS as error:
        raise UsageError(
            f"{publisher} published data that cannot be decoded ({error}); do all ranks run the same version?"
        ) from None


def prepare(kind: Any) -> None:
    """Before a library decodes into `kind`; the functions here do it themselves."""
    try:
        if kind in _msgpack:
            return
    except TypeError:
        pass
    _keep(_msgpack, kind, msgpack_decoder(kind).decode)


def _keep(decoders: dict[Any, Callable[[Any], Any]], kind: Any, decode: Callable[[Any], Any]) -> None:
    try:
        decoders[kind] = decode
    except TypeError:  # it has no hash
        pass
