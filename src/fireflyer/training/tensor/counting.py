"""`CollectiveBytes`: what the collectives of a block of code send, counted as they are called."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CollectiveBytes"]

_KINDS: Final = {
    "_c10d_functional::all_gather_into_tensor": "allgather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "allreduce",
}


class CollectiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of `group` while it is active, those of backward passes too (on the CPU): functional ones,
    as DTensor calls them, and `torch.distributed.all_reduce`.

    `calls` and `sent_bytes` by kind: `allgather`, `reduce_scatter`, `allreduce`. Bytes are what one rank of n sends in
    a ring: (n - 1) / n of the whole array, twice that for an allreduce.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._ranks = group.group_name, group.size()
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts, and goes on. A DTensor's operation is seen again as those on its local tensors."""
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        result = func(*args, **kwargs or {})
        kind = _KINDS.get(func.name())
        if kind is not None and args[-1] == self._name:
            self._count(kind, args[0], result)
        if func.name() == "c10d::allreduce_" and dist.ProcessGroup.unbox(args[1]).group_name == self._name:
            for tensor in args[0]:
                self._count("allreduce", tensor, tensor)
        return result

    def _count(self, kind: str, given: Tensor, result: Tensor) -> None:
        whole = max(given.numel(), result.numel()) * given.element_size()
        self.calls[kind] += 1
        self.sent_bytes[kind] += whole * (self._ranks - 1) // self._ranks * (2 if kind == "allreduce" else 1)
