"""Bringing replicas to the same state: compare what they are made of, then copy rank 0's values.

Values travel as raw 64-bit words in a staging buffer of bounded size, so that any element type can be sent and a module
of many small tensors costs few messages.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

import torch

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB
from fireflyer.training.communication import Communicator

__all__ = ["broadcast_tensors", "describe_tensor", "verify_same_description"]

STAGING_BYTES = 25 * MIB
MAX_DESCRIPTION_BYTES = 64 * MIB
_WORD_BYTES = 8


def describe_tensor(kind: str, name: str, tensor: torch.Tensor) -> str:
    """One line for `verify_same_description`, e.g. `parameter 'head.weight' (256, 64) float32 trained`."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    line = f"{kind} {name!r} {shape} {dtype} {'trained' if tensor.requires_grad else 'fixed'}"
    return line if tensor.is_contiguous() or not tensor.requires_grad else f"{line} with strides {tensor.stride()}"


def verify_same_description(comm: Communicator, lines: Sequence[str]) -> None:
    """Raises `UsageError` on every rank unless all ranks gave the same lines; the message shows the first difference.

    Collective. Normally two messages of a few bytes: rank 0's checksum, and who disagrees with it.
    """
    text = "\n".join(lines).encode()
    if len(text) > MAX_DESCRIPTION_BYTES:
        raise UsageError(f"the module's description has {len(text)} bytes, above the limit of {MAX_DESCRIPTION_BYTES}")
    mine = torch.tensor([len(text), *struct.unpack("<4q", hashlib.sha256(text).digest())], dtype=torch.int64)
    reference = mine.clone()
    comm.broadcast(reference, root=0)
    differs = torch.zeros(comm.world_size, dtype=torch.int64)
    differs[comm.rank] = int(not torch.equal(mine, reference))
    comm.allreduce(differs, async_op=True).wait()
    if not differs.any():
        return
    ranks = [rank for rank, flag in enumerate(differs.tolist()) if flag]
    theirs = _broadcast_text(comm, text, int(reference[0])).decode(errors="replace").split("\n")
    if comm.rank in ranks:
        raise UsageError(f"rank {comm.rank} wraps a different module than rank 0: {_first_difference(lines, theirs)}")
    raise UsageError(f"the modules of ranks {ranks} differ from rank 0's; the errors of those ranks say how")


def broadcast_tensors(
    comm: Communicator, tensors: Sequence[torch.Tensor], *, root: int = 0, staging_bytes: int = STAGING_BYTES
) -> None:
    """Copies the values of rank `root` into `tensors` of all ranks, in place: any shapes and dtypes. Collective.

    The total size and the order must be the same on every rank.
    """
    total_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if total_bytes == 0:
        return
    words = -(-min(total_bytes, max(staging_bytes, _WORD_BYTES)) // _WORD_BYTES)
    staging = torch.zeros(words, dtype=torch.int64)
    with torch.no_grad():
        for pieces in _batches(tensors, words * _WORD_BYTES):
            _broadcast_pieces(comm, staging, pieces, root)


def _batches(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[list[tuple[torch.Tensor, int, int]]]:
    """Lists of (tensor, first byte, last byte + 1) of at most `limit` bytes together."""
    batch: list[tuple[torch.Tensor, int, int]] = []
    used = 0
    for tensor in tensors:
        size, start = tensor.numel() * tensor.element_size(), 0
        while start < size:
            stop = min(size, start + limit - used)
            batch.append((tensor, start, stop))
            used += stop - start
            start = stop
            if used == limit:
                yield batch
                batch, used = [], 0
    if batch:
        yield batch


def _broadcast_pieces(
    comm: Communicator, staging: torch.Tensor, pieces: list[tuple[torch.Tensor, int, int]], root: int
) -> None:
    used = sum(stop - start for _, start, stop in pieces)
    message = staging[: -(-used // _WORD_BYTES)]
    staged = message.view(torch.uint8)
    if comm.rank == root:
        at = 0
        for tensor, start, stop in pieces:
            staged[at : at + stop - start].copy_(_bytes_of(tensor)[start:stop])
            at += stop - start
    comm.broadcast(message, root=root)
    if comm.rank != root:
        at = 0
        for tensor, start, stop in pieces:
            _store_bytes(tensor, start, staged[at : at + stop - start])
            at += stop - start


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _store_bytes(tensor: torch.Tensor, start: int, values: torch.Tensor) -> None:
    flat = _bytes_of(tensor)  # the tensor's own memory if it is contiguous, otherwise a copy
    flat[start : start + values.numel()].copy_(values)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def _broadcast_text(comm: Communicator, text: bytes, length: int) -> bytes:
    """Rank 0's text, of `length` bytes."""
    if not 0 <= length <= MAX_DESCRIPTION_BYTES:
        raise UsageError(f"rank 0 describes its module in {length} bytes; the limit is {MAX_DESCRIPTION_BYTES}")
    padded = (text if comm.rank == 0 else b"").ljust(length + -length % _WORD_BYTES, b"\0")[
        : length + -length % _WORD_BYTES
    ]
    words = torch.frombuffer(bytearray(padded), dtype=torch.int64)
    comm.broadcast(words, root=0)
    return words.numpy().tobytes()[:length]


def _first_difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    for number, (own, other) in enumerate(zip(mine, theirs, strict=False)):
        if own != other:
            return f"item {number} is {own} here, {other} there"
    return f"{len(mine)} parameters, buffers and options here, {len(theirs)} there"
