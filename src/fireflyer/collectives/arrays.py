"""What an array is to native code: an address, a number of elements, a type name.

NumPy arrays and CPU tensors are taken as they are; a tensor is recognised by its methods, so torch is not imported.
Types that NumPy lacks (bf16 and the two fp8) are uint16 and uint8 arrays with `dtype="bf16"`, `"f8e4m3"`, `"f8e5m2"`;
without `dtype`, uint8 is a type of its own. Where a type is asked for, those of NumPy and torch and their full names do
as well ("float32", `np.float32`, `torch.bfloat16`); short names are ours alone: "i8" has 8 bits here, 8 bytes in NumPy.
"""

from __future__ import annotations

import operator
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from fireflyer import native
from fireflyer.base.errors import UsageError
from fireflyer.native import address_of

__all__ = [
    "DTYPES",
    "DTypeLike",
    "FlatArray",
    "check_apart",
    "check_rank",
    "dtype_named",
    "flatten",
    "storage_dtype_of",
    "whole_number",
]


class _TorchType(Protocol):
    """`torch.dtype`, without torch."""

    @property
    def is_floating_point(self) -> bool: ...


DTypeLike: TypeAlias = str | np.dtype[Any] | type[np.generic] | _TorchType
"""What a type may be called by a caller; see `dtype_named`."""

DTYPES: Final[dict[str, int]] = dict(native.DTYPES)
"""Bytes of an element of each type that can be reduced."""

_OF_NUMPY: Final = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
    "uint8": "u8",
}
_OF_TORCH: Final = _OF_NUMPY | {"bfloat16": "bf16", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}
_NUMPY_TYPES: Final = {np.dtype(name): own for name, own in _OF_NUMPY.items()}
"""What needs no thought. NumPy takes microseconds to say what a type is called."""
_torch_names: dict[object, str] = {}
"""Of the element types that have been seen."""
_TENSOR_HAS: Final = ("data_ptr", "numel", "element_size", "is_contiguous", "device", "is_neg", "is_conj")
_MOST_TENSOR_TYPES: Final = 64
_tensor_types: set[type] = set()
"""Classes that have been found to have all of these."""
_CARRIERS: Final = {"bf16": "uint16", "f8e4m3": "uint8", "f8e5m2": "uint8"}
_MOST_SHOWN: Final = 60
"""Characters of a wrong argument in a message."""
_BYTES: Final = "u8"  # what is only copied travels as bytes


class FlatArray(NamedTuple):
    address: int
    elements: int
    dtype: str
    owner: object
    """Keeps the memory alive."""


def dtype_named(asked: object) -> str:
    """Of `DTYPES`, the one that `asked` names: itself, or a type of NumPy or torch or its name. Raises `UsageError`."""
    if isinstance(asked, str):
        name = asked
    elif isinstance(asked, np.dtype):
        name = asked.name if asked.isnative else str(asked)
    elif isinstance(asked, type) and issubclass(asked, np.generic):
        name = asked.__name__
    else:
        name = str(asked).removeprefix("torch.") if type(asked).__module__ == "torch" else ""
    own = name if name in DTYPES else _OF_TORCH.get(name)
    if own is None:
        known = ", ".join(f"{one} ({name})" for name, one in _OF_TORCH.items())
        raise UsageError(f"dtype {_shown(asked)} is not known; use one of {known}")
    return own


def storage_dtype_of(dtype: str) -> str:
    """The NumPy type that holds elements of `dtype`, one of `DTYPES`."""
    return _CARRIERS.get(dtype) or next(name for name, own in _OF_NUMPY.items() if own == dtype)


def whole_number(name: str, value: object) -> int:
    """The argument `name`, if it is one. Raises `UsageError`."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # whether it can be is what is asked
    except TypeError:
        raise UsageError(f"{name} {_shown(value)} is not a whole number; pass an int") from None


def check_rank(name: str, rank: object, world_size: int) -> int:
    """The argument `name`, if it is a rank of the group. Raises `UsageError`."""
    number = whole_number(name, rank)
    if not 0 <= number < world_size:
        raise UsageError(f"{name} {number} is not a rank; the group has ranks 0 to {world_size - 1}")
    return number


def _shown(value: object) -> str:
    """On one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def check_apart(one: FlatArray, other: FlatArray) -> None:
    """Raises `UsageError` where the two have memory in common."""
    ends = [flat.address + flat.elements * DTYPES[flat.dtype] for flat in (one, other)]
    empty = one.elements == 0 or other.elements == 0
    if not empty and one.address < ends[1] and other.address < ends[0]:
        raise UsageError("out and the array share memory, and not as in place; pass arrays without common memory")


def flatten(array: Any, dtype: DTypeLike | None, *, sums: bool, writes: bool = True) -> FlatArray:
    """`array` for an operation that `sums` its elements, or only copies them, and that `writes` to it or only reads.

    Raises `UsageError` where it is no contiguous array in CPU memory of a known type.
    """
    if dtype is not None:
        dtype = dtype_named(dtype)
    if isinstance(array, np.ndarray):
        own = _NUMPY_TYPES.get(array.dtype)
        flags = array.flags
        if own is not None and dtype is None and flags.c_contiguous and (flags.writeable or not writes):
            address = address_of(array)
            if address:
                return FlatArray(address, array.size, own, array)
        return _numpy(array, dtype, sums, writes)
    if _is_tensor(array):
        return _tensor(array, dtype, sums)
    raise UsageError(f"cannot reduce a {type(array).__name__}; pass a NumPy array or a CPU tensor")


def _is_tensor(array: Any) -> bool:
    kind = type(array)
    if kind in _tensor_types:
        return True
    if not all(hasattr(array, name) for name in _TENSOR_HAS):
        return False
    if len(_tensor_types) < _MOST_TENSOR_TYPES:
        _tensor_types.add(kind)
    return True


def _numpy(array: np.ndarray[Any, Any], dtype: str | None, sums: bool, writes: bool) -> FlatArray:
    if not array.flags.c_contiguous:
        raise UsageError(f"the array of shape {array.shape} is not contiguous; pass numpy.ascontiguousarray(array)")
    if writes and not array.flags.writeable:
        raise UsageError("the array is read-only, but the result is written into it; pass a copy")
    if array.dtype.hasobject:
        raise UsageError(
            "the array holds Python objects, which are addresses in this process; pass an array of numbers"
        )
    name = array.dtype.name if array.dtype.isnative else str(array.dtype)
    address = address_of(array) or array.ctypes.data  # some types do not go with the buffer protocol
    return _describe(address, array.size, array.itemsize, name, _OF_NUMPY.get(name), dtype, sums, array)


def _tensor(tensor: Any, dtype: str | None, sums: bool) -> FlatArray:
    if not getattr(tensor, "is_cpu", False) and str(tensor.device) != "cpu":
        raise UsageError(
            f"the tensor is on {tensor.device}; a Communicator works in CPU memory: pass tensor.cpu(), or use "
            "fireflyer.collectives.torch_devices.DeviceCommunicator"
        )
    if not tensor.is_contiguous():
        raise UsageError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()")
    if tensor.is_neg() or tensor.is_conj():
        raise UsageError(
            "the tensor is a view that negates what is in memory; pass tensor.resolve_neg().resolve_conj()"
        )
    dtype_of = tensor.dtype
    name = _torch_names.get(dtype_of)
    if name is None:
        name = _torch_names[dtype_of] = str(dtype_of).removeprefix("torch.")
    size = int(tensor.element_size())
    return _describe(int(tensor.data_ptr()), int(tensor.numel()), size, name, _OF_TORCH.get(name), dtype, sums, tensor)


def _describe(
    address: int, count: int, size: int, name: str, own: str | None, asked: str | None, sums: bool, owner: object
) -> FlatArray:
    if asked is not None and asked != own and _CARRIERS.get(asked) != name:
        wanted = _CARRIERS.get(asked, "its own type")
        raise UsageError(f"dtype {asked!r} needs an array of {wanted}, not of {name}")
    if address == 0 and count > 0:  # of a DTensor, a fake one, one whose memory was given back
        raise UsageError(
            "the tensor has no memory of its own; pass the tensor that holds the numbers, as to_local() does"
        )
    found = asked or own
    if found is None and sums:
        raise UsageError(
            f"cannot sum elements of type {name}; use one of {', '.join(_OF_TORCH)}, or uint16 and uint8 with dtype="
        )
    if found is None:
        return FlatArray(address, count * size, _BYTES, owner)
    return FlatArray(address, count, found, owner)
