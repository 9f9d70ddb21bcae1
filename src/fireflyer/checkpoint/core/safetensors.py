"""The safetensors file format: 8 bytes little-endian header length, a JSON header, the tensors' bytes.

Format: https://github.com/huggingface/safetensors#format. Tensors lie back to back in row-major order; `data_offsets`
count from the end of the header. We write the header padded with spaces to a multiple of 64 bytes and the tensors
sorted by falling element size, so that each is aligned to its element without gaps (the format forbids gaps).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.checkpoint.core.slices import Slice

__all__ = [
    "DTYPE_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_NAME_CHARACTERS",
    "PlacedTensor",
    "TensorSpec",
    "build_header",
    "encode_entries",
    "parse_header",
    "place",
]

_SURROGATE = re.compile("[\ud800-\udfff]")
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation."""
MAX_NAME_CHARACTERS = 1024
_METADATA = "__metadata__"
_ALIGNMENT_BYTES = 64


class TensorSpec(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    name: str
    dtype: str
    """As safetensors calls it: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    slice: Slice | None = None
    """Of what it is a slice, if it is one."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class PlacedTensor(msgspec.Struct, frozen=True, gc=False):
    spec: TensorSpec
    offset: int
    """From the start of the data section."""


def place(specs: Iterable[TensorSpec]) -> list[PlacedTensor]:
    """Offsets without gaps, each a multiple of its element size. Raises `UsageError` for an unknown dtype, and for a
    name that the format cannot hold or that comes twice."""
    placed: list[PlacedTensor] = []
    seen: dict[str, None] = {}
    offset = 0
    for spec in sorted(specs, key=lambda spec: (-_element_bytes(spec), spec.name)):
        _check_name(spec.name)
        if spec.name in seen:
            raise UsageError(f"tensor name {spec.name!r} comes twice; names must be unique within a rank")
        seen[spec.name] = None
        placed.append(PlacedTensor(spec, offset))
        offset += spec.size_bytes
    return placed


def _check_name(name: str) -> None:
    encodable = name.isascii() or _SURROGATE.search(name) is None
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or name == _METADATA or not encodable:
        raise UsageError(
            f"tensor name {name[:80]!r} is not allowed; use 1 to {MAX_NAME_CHARACTERS} characters of valid Unicode, "
            f"and not {_METADATA!r}"
        )


def _element_bytes(spec: TensorSpec) -> int:
    size = DTYPE_BYTES.get(spec.dtype)
    if size is None:
        raise UsageError(f"tensor {spec.name!r} has dtype {spec.dtype!r}; allowed are {', '.join(DTYPE_BYTES)}")
    return size


def encode_entries(placed: Iterable[PlacedTensor]) -> bytes:
    """What a header says of the tensors, which is the same at every step."""
    entries = {
        item.spec.name: _Entry(item.spec.dtype, item.spec.shape, (item.offset, item.offset + item.spec.size_bytes))
        for item in placed
    }
    return msgspec.json.encode(entries)


def build_header(entries: bytes, metadata: dict[str, str]) -> bytes:
    """Everything before the data section, with `entries` as `encode_entries` gives them. Raises `UsageError` when it
    would be above the format's limit."""
    text = msgspec.json.encode({_METADATA: metadata})
    if entries != b"{}":
        text = text[:-1] + b"," + entries[1:]
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(f"{len(text)} bytes of tensor names in one shard, above {MAX_HEADER_BYTES}; use more ranks")
    return len(text).to_bytes(8, "little") + text


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """Of a tensor; all fields have defaults for the sake of `__metadata__`, which has others."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def parse_header(text: bytes, data_bytes: int, what: str) -> list[PlacedTensor]:
    """The tensors of a file of anybody, in the order of their bytes. `text` is the JSON header, `data_bytes` what
    follows it. Raises `DataCorruption` for what is no header, or describes tensors that overlap or leave the file."""
    try:
        found = decode_json(text, dict[str, _Entry])
    except DECODE_ERRORS as error:
        raise DataCorruption(f"the header of {what} is not readable: {error}") from error
    found.pop(_METADATA, None)
    placed = [
        PlacedTensor(TensorSpec(name, entry.dtype, entry.shape), entry.data_offsets[0]) for name, entry in found.items()
    ]
    placed.sort(key=lambda item: (item.offset, found[item.spec.name].data_offsets[1]))
    end = 0
    for item in placed:
        spec, (begin, stop) = item.spec, found[item.spec.name].data_offsets
        if spec.dtype not in DTYPE_BYTES or min(spec.shape, default=0) < 0:
            raise DataCorruption(f"{what} gives tensor {spec.name[:80]!r} an unknown dtype or an invalid shape")
        if begin < end or stop > data_bytes or stop - begin != spec.size_bytes:
            raise DataCorruption(f"{what} gives tensor {spec.name[:80]!r} an invalid offset or size")
        end = stop
    return placed
