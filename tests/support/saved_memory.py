"""Bytes of what autograd saves for backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["SavedMemory", "local_of"]


class SavedMemory:
    """While it is entered, counts each storage once, as long as a saved tensor refers to it."""

    def __init__(self, fixed: Callable[[], set[int]], found: Callable[[Tensor], None] | None = None) -> None:
        """`fixed`: places of storages that are not counted, whenever a tensor is saved. `found`: told of each that
        is."""
        self._fixed, self._found = fixed, found
        self._references: dict[int, int] = {}
        self.bytes = self.peak_bytes = 0
        self._hooks = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        return _Saved(self, tensor, counted=local_of(tensor).untyped_storage().data_ptr() not in self._fixed())

    def take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        before = self._references.get(storage.data_ptr(), 0)
        self._references[storage.data_ptr()] = before + 1
        if not before:
            self.bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        if self._found is not None:
            self._found(tensor)

    def drop(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._references[storage.data_ptr()] -= 1
        if not self._references[storage.data_ptr()]:
            self.bytes -= storage.nbytes()


class _Saved:
    def __init__(self, memory: SavedMemory, tensor: Tensor, *, counted: bool) -> None:
        self.tensor = tensor.detach()  # an operator's output leads to the node that keeps it: a cycle
        self._memory = memory if counted else None
        if counted:
            memory.take(local_of(tensor))

    def __del__(self) -> None:
        if self._memory is not None:
            self._memory.drop(local_of(self.tensor))


def local_of(tensor: Tensor) -> Tensor:
    """The memory of this rank of a DTensor, also of one whose collective has not ended."""
    local = getattr(tensor, "_local_tensor", tensor)
    inner: Tensor = getattr(local, "elem", local)
    return inner
