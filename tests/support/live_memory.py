"""Bytes of tensors that operators of PyTorch have made and that are still there."""

from __future__ import annotations

import weakref
from typing import Any

from tests.support.saved_memory import local_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveMemory"]


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, counts each storage once, from the operator that returns it until it is freed; not what an
    operator frees before it returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_place(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and _place(one) not in given:
                self.count(one)
        return result

    def count(self, tensor: Tensor) -> None:
        """From now on, as if an operator had made it: for memory that others made."""
        storage = local_of(tensor).untyped_storage()
        if storage.data_ptr() in self._bytes:
            return
        self._bytes[storage.data_ptr()] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, storage.data_ptr())

    def _free(self, place: int) -> None:
        self.live_bytes -= self._bytes.pop(place)


def _place(tensor: Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()
