"""Tensors as the communicator takes them: contiguous, in CPU memory or on a device, of a type that it knows.

What is only moved may have any type: types that the communicator does not know travel as bytes. What is not contiguous
is copied, and results are copied back; lists of tensors that lie one after the other in memory are taken as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from fireflyer.base.errors import UsageError
from fireflyer.collectives.kernels import BITWISE
from fireflyer.collectives.torch.cuda import DEVICES

__all__ = ["Flat", "as_flat", "checked", "dtype_name", "moved", "op_name", "summed", "tensor_in"]

_NAMES: Final = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
_CARRIERS: Final = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
_OPS: Final = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
}
_BIT_OPS: Final = {dist.ReduceOp.BAND: "band", dist.ReduceOp.BOR: "bor", dist.ReduceOp.BXOR: "bxor"}
_BOOL_OPS: Final = {
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "min",
    dist.ReduceOp.BAND: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.SUM: "max",
    dist.ReduceOp.BOR: "max",
    dist.ReduceOp.BXOR: "bxor",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Ours for a type with arithmetic. Raises `UsageError` for others."""
    name = _NAMES.get(dtype)
    if name is None:
        names = ", ".join(str(known).removeprefix("torch.") for known in _NAMES)
        raise UsageError(f"cannot reduce {dtype}; the hfreduce group reduces {names}")
    return name


def checked(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, if it is one that the group can take. Raises `UsageError`."""
    if tensor.device.type != "cpu" and tensor.device.type not in DEVICES:
        raise UsageError(
            f"the tensor is on {tensor.device}, but the hfreduce group takes tensors on cpu, {', '.join(DEVICES)}: "
            "pass tensor.cpu(), or use a group of another backend for it"
        )
    if tensor.layout != torch.strided:
        raise UsageError(f"the tensor has layout {tensor.layout}; pass a dense one: tensor.to_dense()")
    return tensor.detach()


def op_name(op: Any, dtype: torch.dtype) -> str:
    """Ours for a `ReduceOp`; booleans are 0 and 1, for which sum is `or` and product is `and`. Raises `UsageError`."""
    kind = getattr(op, "op", op)
    known = _BOOL_OPS if dtype == torch.bool else _OPS if _has_fractions(dtype) else _OPS | _BIT_OPS
    found = known.get(kind)
    if found is None:
        raise UsageError(
            f"{kind} of {dtype} is not supported; the hfreduce group has SUM, AVG, MIN, MAX and PRODUCT of numbers, "
            "BAND, BOR and BXOR of integers, and all of these but AVG of booleans"
        )
    return found


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def summed(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """A contiguous tensor as an operation with arithmetic takes it. Bits may be combined byte by byte, so integers of
    any width have those operations. Raises `UsageError` for types without arithmetic."""
    if tensor.dtype == torch.bool or (op in BITWISE and tensor.dtype not in _NAMES):
        return tensor.reshape(-1).view(torch.uint8)
    dtype_name(tensor.dtype)
    return tensor


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as an operation without arithmetic takes it: flat, and as bytes if of an unknown type."""
    flat = tensor.reshape(-1)
    return flat if tensor.dtype in _NAMES else flat.view(torch.uint8)


class Flat:
    """Tensors as one flat contiguous `tensor`: their own memory where they lie there one after the other, otherwise a
    copy, which `write_back` brings home."""

    def __init__(self, tensor: torch.Tensor, write_back: Callable[[], None] | None) -> None:
        self.tensor = tensor
        self.write_back = write_back


def as_flat(tensors: Sequence[torch.Tensor], *, reads: bool, writes: bool) -> Flat:
    """`reads`: the operation needs the values; `writes`: it gives new ones. All must have one dtype."""
    parts = [checked(tensor) for tensor in tensors]
    if len({part.dtype for part in parts}) > 1:
        raise UsageError(f"the tensors of one call have several types: {sorted({str(part.dtype) for part in parts})}")
    if len({part.device for part in parts}) > 1:
        raise UsageError("the tensors of one call are on several devices; pass tensors of one")
    if all(part.is_contiguous() for part in parts) and _adjacent(parts):
        first = parts[0]
        count = sum(part.numel() for part in parts)
        return Flat(first.as_strided((count,), (1,), first.storage_offset()), None)
    flat = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)
    pieces = torch.split(flat, [part.numel() for part in parts])
    if reads:
        for piece, part in zip(pieces, parts, strict=True):
            piece.view(part.shape).copy_(part)
    return Flat(flat, (lambda: _copy_out(pieces, parts)) if writes else None)


def _copy_out(pieces: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    for piece, part in zip(pieces, parts, strict=True):
        if part.is_cuda:
            part.record_stream(torch.cuda.current_stream(part.device))
        part.copy_(piece.view(part.shape))


def _adjacent(parts: Sequence[torch.Tensor]) -> bool:
    storage = parts[0].untyped_storage().data_ptr()
    at = parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != at:
            return False
        at += part.numel()
    return True


def tensor_in(comm: Any, count: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """A flat tensor in memory that the ranks of a node share (`comm.empty`), so that operations on it copy nothing;
    in private memory where the communicator has no such memory. On a device other than the CPU, one of its own.

    Raises `UsageError` for types that the communicator does not know.
    """
    if device is not None and device.type != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    name = _NAMES.get(dtype)
    if name is None:
        raise UsageError(f"cannot allocate {dtype} in shared memory; its types are {', '.join(_NAMES.values())}")
    if not hasattr(comm, "empty"):
        return torch.empty(count, dtype=dtype)
    array = comm.empty(count, name)
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype in _CARRIERS else tensor
