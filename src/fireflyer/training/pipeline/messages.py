"""Tensors between stages as one message: a header of fixed size, then the tensors.

The header is HEADER_WORDS int64 in the byte order of the machine: a mark, the bytes of header and tensors, the boundary
(gradient, stage, micro-batch), the number of entries; then for each of MAX_TENSORS entries a code of its dtype (0: no
tensor, the gradient of an output that nothing depends on), whether it gets a gradient, its number of dimensions, and
MAX_DIMS sizes. Each tensor begins at a multiple of ALIGNMENT. Where they begin is not told: both sides compute it.

What comes from another rank is checked before it is used: mark, boundary, counts, and that the tensors have exactly the
bytes that the message has, which are at most the limit.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.training.pipeline.phases import Gradients
from fireflyer.training.pipeline.programs import Key

__all__ = [
    "HEADER_BYTES",
    "MAX_DIMS",
    "MAX_TENSORS",
    "Bytes",
    "Layout",
    "Outgoing",
    "empty_bytes",
    "layout_of",
    "read_header",
    "unpack",
]

ALIGNMENT: Final = 64
MAX_TENSORS: Final = 16
MAX_DIMS: Final = 6
Bytes = npt.NDArray[np.uint8]
_MARK: Final = 0x46465049_50453031
_ENTRY_WORDS: Final = 3 + MAX_DIMS
_FRONT: Final = struct.Struct("=6q")
_ENTRY: Final = struct.Struct(f"={_ENTRY_WORDS}q")
HEADER_BYTES: Final = -(-(_FRONT.size + MAX_TENSORS * _ENTRY.size) // ALIGNMENT) * ALIGNMENT
_DTYPES: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_CODES: Final = {dtype: number + 1 for number, dtype in enumerate(_DTYPES)}
_NO_SIZES: Final = (0,) * MAX_DIMS


class _Entry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    begin: int
    end: int


class Layout(NamedTuple):
    """Where the tensors of a message are. `size_bytes` is that of header and tensors."""

    entries: tuple[_Entry | None, ...]
    size_bytes: int


def empty_bytes(size_bytes: int) -> Bytes:
    """Memory of a message, as aligned as that of tensors."""
    memory: Bytes = torch.empty(size_bytes, dtype=torch.uint8).numpy()
    return memory


def layout_of(tensors: Gradients, limit_bytes: int, what: object) -> Layout:
    """Raises `UsageError` that names `what`, as `str` gives it, for tensors that no message can hold."""
    if len(tensors) > MAX_TENSORS:
        raise UsageError(f"{what} has {len(tensors)} tensors; a stage passes on at most {MAX_TENSORS}: stack some")
    entries: list[_Entry | None] = []
    at = HEADER_BYTES
    for tensor in tensors:
        if tensor is None:
            entries.append(None)
            continue
        if tensor.dtype not in _CODES or tensor.ndim > MAX_DIMS or tensor.layout != torch.strided:
            raise UsageError(
                f"{what} has a tensor of {tensor.dtype}, {tensor.layout}, {tensor.ndim} dimensions; stages pass on "
                f"dense tensors of {', '.join(str(one).removeprefix('torch.') for one in _DTYPES)} with at most "
                f"{MAX_DIMS} dimensions"
            )
        end = at + tensor.numel() * tensor.element_size()
        entries.append(_Entry(tensor.dtype, tuple(tensor.shape), tensor.requires_grad, at, end))
        at = -(-end // ALIGNMENT) * ALIGNMENT
    if at > limit_bytes:
        raise UsageError(f"{what} has {at} bytes, more than max_message_bytes={limit_bytes}; pass a larger limit")
    return Layout(tuple(entries), at)


class Outgoing:
    """Memory of messages that are sent one after the other. Views of their tensors, and entries of the header, are made
    where a message has another layout than the one before."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = empty_bytes(size_bytes)
        self.layout: Layout | None = None
        """Of the message before."""
        self._views: list[torch.Tensor | None] = []

    def write(self, layout: Layout, key: Key, tensors: Gradients) -> None:
        """The memory has at least `layout.size_bytes`."""
        if layout != self.layout:
            self._prepare(layout)
        gradient, stage, micro_batch = key
        front = _MARK, layout.size_bytes, gradient, stage, micro_batch, len(layout.entries)
        _FRONT.pack_into(self.memory.data, 0, *front)
        for view, tensor in zip(self._views, tensors, strict=True):
            if view is not None and tensor is not None:
                view.copy_(tensor.detach())

    def _prepare(self, layout: Layout) -> None:
        self.layout = None
        at = _FRONT.size
        for entry in layout.entries:
            if entry is None:
                _ENTRY.pack_into(self.memory.data, at, 0, 0, 0, *_NO_SIZES)
            else:
                sizes = entry.shape + _NO_SIZES[len(entry.shape) :]
                begin = _CODES[entry.dtype], entry.requires_grad, len(entry.shape)
                _ENTRY.pack_into(self.memory.data, at, *begin, *sizes)
            at += _ENTRY.size
        self._views = [
            None if entry is None or entry.end == entry.begin else _view(self.memory, entry) for entry in layout.entries
        ]
        self.layout = layout


def read_header(message: Bytes, key: Key, limit_bytes: int, what: object) -> Layout:
    """Raises `DataCorruption` that names `what`, as `str` gives it, where the header is not that of `key`, or does not
    make sense."""
    data = message.data
    mark, size_bytes, gradient, stage, micro_batch, count = _FRONT.unpack_from(data, 0)
    if mark != _MARK or (bool(gradient), stage, micro_batch) != key:
        raise DataCorruption(f"{what}: the header names another message; do all ranks run the same schedule?")
    if not 0 <= count <= MAX_TENSORS or not HEADER_BYTES <= size_bytes <= limit_bytes:
        raise DataCorruption(
            f"{what}: the header tells of {count} tensors and {size_bytes} bytes; the limits are {MAX_TENSORS} and "
            f"max_message_bytes={limit_bytes}, the same on all ranks"
        )
    layout = _layout_in(bytes(data[_FRONT.size : _FRONT.size + count * _ENTRY.size]))
    if isinstance(layout, str):
        raise DataCorruption(f"{what}: {layout}")
    if layout.size_bytes != size_bytes:
        raise DataCorruption(
            f"{what}: the tensors of the header have {layout.size_bytes} bytes, the message {size_bytes}"
        )
    return layout


@functools.lru_cache(maxsize=64)
def _layout_in(text: bytes) -> Layout | str:
    """Of the entries of a header, which messages of one boundary repeat; or what is wrong with them."""
    entries: list[_Entry | None] = []
    at = HEADER_BYTES
    for number, (code, requires_grad, ndim, *sizes) in enumerate(_ENTRY.iter_unpack(text)):
        if code == 0:
            entries.append(None)
            continue
        if not 1 <= code <= len(_DTYPES) or not 0 <= ndim <= MAX_DIMS or min(sizes) < 0:
            return f"tensor {number} of the header has no known dtype or shape"
        dtype, shape = _DTYPES[code - 1], tuple(sizes[:ndim])
        if requires_grad and not dtype.is_floating_point:
            return f"tensor {number} of the header is of {dtype} and would get a gradient"
        end = at + math.prod(shape) * dtype.itemsize
        entries.append(_Entry(dtype, shape, bool(requires_grad), at, end))
        at = -(-end // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(entries), at)


def unpack(layout: Layout, message: Bytes, device: torch.device | None) -> Gradients:
    """Views of `message`, or copies on `device`, as leaves of autograd."""
    tensors: list[torch.Tensor | None] = []
    for entry in layout.entries:
        if entry is None:
            tensors.append(None)
            continue
        tensor = _view(message, entry) if entry.end > entry.begin else torch.empty(entry.shape, dtype=entry.dtype)
        if device is not None:
            tensor = tensor.to(device)
        tensors.append(tensor.requires_grad_() if entry.requires_grad and torch.is_grad_enabled() else tensor)
    return tuple(tensors)


def _view(message: Bytes, entry: _Entry) -> torch.Tensor:
    # Of the memory, and not of one tensor of it all: a tensor that is changed in place would count as a change of the
    # others.
    count = (entry.end - entry.begin) // entry.dtype.itemsize
    return torch.frombuffer(message, dtype=entry.dtype, count=count, offset=entry.begin).view(entry.shape)
