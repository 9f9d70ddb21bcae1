"""Tensors between stages as one message: a header of fixed size, then the tensors.

The header is HEADER_WORDS int64 in the byte order of the machine: a mark, the bytes of header and tensors, the boundary
(gradient, stage, micro-batch), the number of entries; then for each of MAX_TENSORS entries a code of its dtype (0: no
tensor, the gradient of an output that nothing depends on), whether it gets a gradient, its number of dimensions, and
MAX_DIMS sizes. Each tensor begins at a multiple of ALIGNMENT. Where they begin is not told: both sides compute it.

What comes from another rank is checked before it is used: mark, boundary, counts, and that the tensors have exactly the
bytes that the message has, which are at most the limit.
"""

from __future__ import annotations

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
    "empty_bytes",
    "layout_of",
    "read_header",
    "unpack",
    "write",
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


def layout_of(tensors: Gradients, limit_bytes: int, what: str) -> Layout:
    """Raises `UsageError` that names `what` for tensors that no message can hold."""
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


def write(layout: Layout, key: Key, tensors: Gradients, into: Bytes) -> None:
    """`into` has at least `layout.size_bytes`."""
    gradient, stage, micro_batch = key
    _FRONT.pack_into(into.data, 0, _MARK, layout.size_bytes, gradient, stage, micro_batch, len(layout.entries))
    at = _FRONT.size
    for entry, tensor in zip(layout.entries, tensors, strict=True):
        if entry is None or tensor is None:
            _ENTRY.pack_into(into.data, at, 0, 0, 0, *_NO_SIZES)
        else:
            sizes = entry.shape + _NO_SIZES[len(entry.shape) :]
            _ENTRY.pack_into(into.data, at, _CODES[entry.dtype], entry.requires_grad, len(entry.shape), *sizes)
            if entry.end > entry.begin:
                _view(into, entry).copy_(tensor.detach())
        at += _ENTRY.size


def read_header(message: Bytes, key: Key, limit_bytes: int, what: str) -> Layout:
    """Raises `DataCorruption` that names `what` where the header is not that of `key`, or does not make sense."""
    mark, size_bytes, gradient, stage, micro_batch, count = _FRONT.unpack_from(message.data, 0)
    if mark != _MARK or (bool(gradient), stage, micro_batch) != key:
        raise DataCorruption(f"{what}: the header names another message; do all ranks run the same schedule?")
    if not 0 <= count <= MAX_TENSORS or not HEADER_BYTES <= size_bytes <= limit_bytes:
        raise DataCorruption(
            f"{what}: the header tells of {count} tensors and {size_bytes} bytes; the limits are {MAX_TENSORS} and "
            f"max_message_bytes={limit_bytes}, the same on all ranks"
        )
    entries: list[_Entry | None] = []
    at = HEADER_BYTES
    for number in range(count):
        code, requires_grad, ndim, *sizes = _ENTRY.unpack_from(message.data, _FRONT.size + number * _ENTRY.size)
        if code == 0:
            entries.append(None)
            continue
        if not 1 <= code <= len(_DTYPES) or not 0 <= ndim <= MAX_DIMS or min(sizes) < 0:
            raise DataCorruption(f"{what}: tensor {number} of the header has no known dtype or shape")
        shape = tuple(sizes[:ndim])
        end = at + math.prod(shape) * _DTYPES[code - 1].itemsize
        entries.append(_Entry(_DTYPES[code - 1], shape, bool(requires_grad), at, end))
        at = -(-end // ALIGNMENT) * ALIGNMENT
    if at != size_bytes:
        raise DataCorruption(f"{what}: the tensors of the header have {at} bytes, the message {size_bytes}")
    return Layout(tuple(entries), size_bytes)


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
    # From the array, and not from one tensor of it all: a tensor that is changed in place would count as a change of
    # the others.
    return torch.from_numpy(message[entry.begin : entry.end]).view(entry.dtype).view(entry.shape)
