"""Between torch tensors and the bytes of a shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core.safetensors import PlacedTensor, TensorSpec, place
from fireflyer.checkpoint.core.shares import layout_digest, own_name, share_of
from fireflyer.checkpoint.executor import Share

__all__ = ["DTYPES", "Snapshot", "SnapshotBuffer", "bytes_of", "empty_tensor", "plan_snapshot", "spec_of"]

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Raises `UsageError` for a dtype that safetensors has no name for, and for sparse and meta tensors."""
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise UsageError(f"tensor {name!r} has dtype {tensor.dtype}; a checkpoint can hold {', '.join(DTYPES)}")
    if tensor.layout != torch.strided or tensor.is_meta:
        raise UsageError(f"tensor {name!r} is {tensor.layout} on {tensor.device}; a checkpoint needs a dense one")
    return TensorSpec(name, dtype, tuple(tensor.shape))


def empty_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, without a copy. The tensor must outlive it."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class Snapshot(NamedTuple):
    """What is to be copied where. Made by `plan_snapshot`."""

    rank: int
    layout: int
    placed: list[PlacedTensor]
    sources: dict[str, torch.Tensor]
    size_bytes: int


def plan_snapshot(
    rank: int,
    world_size: int,
    shared: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    of_rank_0: frozenset[str] = frozenset(),
) -> Snapshot:
    """This rank's share of the state. Raises `UsageError` for what cannot be stored."""
    shared_specs = [spec_of(name, tensor) for name, tensor in shared.items()]
    own_specs = [spec_of(name, tensor) for name, tensor in own.items()]
    placed = place(share_of(rank, shared_specs, own_specs, world_size, of_rank_0))
    sources = {**shared, **{own_name(rank, name): tensor for name, tensor in own.items()}}
    size_bytes = sum(item.spec.size_bytes for item in placed)
    return Snapshot(rank, layout_digest(shared_specs, of_rank_0), placed, sources, size_bytes)


class SnapshotBuffer:
    """Memory for one rank's share, allocated and touched once and then reused."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int, *, pinned: bool = False) -> None:
        """Makes room and touches it: the first touch of fresh memory is ten times slower than the second."""
        if self._buffer.numel() < size_bytes:
            self._buffer = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=pinned)

    @torch.no_grad()
    def take(self, step: int, plan: Snapshot) -> Share:
        """Copies. What is returned is overwritten by the next `take`."""
        on_device = any(plan.sources[item.spec.name].is_cuda for item in plan.placed)
        self.reserve(plan.size_bytes, pinned=on_device)
        for item in plan.placed:
            source = plan.sources[item.spec.name]
            if source.numel():
                target = self._buffer[item.offset : item.offset + item.spec.size_bytes]
                target.view(source.dtype).view(source.shape).copy_(source, non_blocking=on_device)
        if on_device:
            torch.cuda.synchronize()
        return Share(plan.rank, step, plan.layout, plan.placed, bytes_of(self._buffer[: plan.size_bytes]))
