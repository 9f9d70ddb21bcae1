"""The caller's memory as plain bytes, without a copy: what has the buffer protocol, and tensors in CPU memory."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from fireflyer.base.errors import UsageError

__all__ = ["memory_of"]

_TENSOR_HAS: Final = ("data_ptr", "numel", "element_size", "is_contiguous", "device")


def memory_of(given: Any, *, writable: bool) -> memoryview:
    """Bytes of a NumPy array, `bytearray`, `memoryview`, a tensor, … They stay where they are as long as the view is
    there. Raises `UsageError` for what is not contiguous, not in CPU memory, or read-only where it is to be written."""
    if not isinstance(given, memoryview) and all(hasattr(given, name) for name in _TENSOR_HAS):
        return _tensor(given)
    try:
        view = memoryview(given)
    except (TypeError, BufferError, ValueError) as error:
        raise UsageError(
            f"a {type(given).__name__} does not support the buffer protocol ({error}); pass an array, a bytearray or "
            "a CPU tensor"
        ) from None
    if not view.c_contiguous:
        raise UsageError(f"the buffer of shape {view.shape} is not contiguous; pass a contiguous copy")
    if writable and view.readonly:
        raise UsageError("the buffer is read-only, but data are to be read into it; pass a writable one")
    if view.nbytes == 0:
        return memoryview(bytearray())
    return view.cast("B") if view.ndim != 1 or view.format != "B" else view


def _tensor(tensor: Any) -> memoryview:
    if str(tensor.device) != "cpu":
        raise UsageError(
            f"the tensor is on {tensor.device}; chunks are read and written in CPU memory: pass tensor.cpu()"
        )
    if not tensor.is_contiguous():
        raise UsageError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()")
    count = int(tensor.numel()) * int(tensor.element_size())
    if count == 0:
        return memoryview(bytearray())
    address = int(tensor.data_ptr())
    if address == 0:
        raise UsageError("the tensor has no storage; pass the tensor that holds the data")
    lent = (ctypes.c_ubyte * count).from_address(address)
    lent.owner = tensor  # type: ignore[attr-defined]  # the view keeps the array, and that the tensor
    return memoryview(lent).cast("B")
