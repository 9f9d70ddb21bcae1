"""Between torch tensors and the bytes of a shard."""

from __future__ import annotations

import torch

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core.safetensors import TensorSpec

__all__ = ["DTYPES", "bytes_of", "can_be_filled", "empty_tensor", "flat_bytes", "spec_of"]

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
    """On the CPU, its memory not touched yet."""
    return torch.empty(shape, dtype=DTYPES[dtype])


def can_be_filled(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether the bytes of a stored tensor can be put into this one as they are."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)  # a subclass may keep its values elsewhere
        and tensor.device.type in ("cpu", "cuda")
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.dtype == DTYPES[dtype]
        and tuple(tensor.shape) == shape
    )


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor on any device: flat, of uint8, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, without a copy. The tensor must outlive it."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return flat_bytes(tensor).numpy().data
