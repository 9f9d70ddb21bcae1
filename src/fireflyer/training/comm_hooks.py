"""Communication hooks as torch's `DistributedDataParallel.register_comm_hook` takes them.

A hook `hook(state, bucket) -> Future[Tensor]` is called once for each bucket that is full, in the same order on all
ranks; the tensor of its future replaces the gradients of the bucket. What it communicates, and over which group, is its
own affair, and so is the division by the number of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fireflyer.base.errors import UsageError
from fireflyer.training.buckets import Bucket

__all__ = ["CommHook", "GradBucket", "HookMean"]

_NAMED_BUCKET = "bucket"


class GradBucket:
    """What a hook is given: has the methods of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: Bucket, summed: torch.Tensor, *, index: int, is_last: bool) -> None:
        """`summed` is the memory of the bucket, or zeros of that size."""
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._buffer = bucket.gradients_in(summed)

    def index(self) -> int:
        """Its place in the order of buckets, from 0; buckets stay the same for all passes."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one of the pass."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, flat, of one dtype."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replaces what `buffer` returns, by as many elements of any dtype."""
        if tensor.numel() != self._buffer.numel():
            raise UsageError(f"set_buffer got {tensor.numel()} elements; the bucket has {self._buffer.numel()}")
        self._buffer = tensor.view(-1)

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, one for each parameter, in its shape."""
        return list(self._bucket.views_in(self._buffer))

    def parameters(self) -> list[torch.Tensor]:
        """In the order of `gradients`."""
        return list(self._bucket.parameters)


class CommHook:
    """A hook with its state. Raises `UsageError` for what torch refuses."""

    def __init__(self, state: object, hook: Callable[..., Any]) -> None:
        if not callable(hook):
            raise UsageError(f"the communication hook is a {type(hook).__name__}; pass a function (state, bucket)")
        signature = inspect.signature(hook)
        bucket = signature.parameters.get(_NAMED_BUCKET)
        if bucket is None:
            raise UsageError(f"the communication hook takes {signature}; its second parameter must be called bucket")
        given, wanted = bucket.annotation, dist.GradBucket  # type: ignore[attr-defined]  # public, the stub lacks it
        if not isinstance(given, str) and given not in (inspect.Parameter.empty, wanted, GradBucket, Any):
            raise UsageError(f"bucket of the communication hook is annotated as {given}; it is a dist.GradBucket")
        returned = signature.return_annotation
        future = torch.futures.Future[torch.Tensor]
        if not isinstance(returned, str) and returned not in (inspect.Signature.empty, future, Any):
            raise UsageError(f"the communication hook is annotated to return {returned}; it returns {future}")
        self.name = str(getattr(hook, "__qualname__", hook))
        self._state = state
        self._hook = hook

    def start(self, bucket: GradBucket, on_error: Callable[[Exception], None]) -> HookMean:
        """Calls the hook. Raises what it raises, and `UsageError` where it returns no future; `on_error` is told
        before, and of what its future ends with."""
        target = bucket.buffer()
        try:
            future = self._hook(self._state, bucket)
            if not isinstance(future, torch._C.Future):  # noqa: SLF001 - of which torch.futures.Future is a subclass
                raise UsageError(
                    f"the communication hook {self.name} returned a {type(future).__name__}; it must return a "
                    "torch.futures.Future of a tensor"
                )
        except Exception as error:
            on_error(error)
            raise
        return HookMean(self.name, future, target, on_error)


class HookMean:
    """What a hook makes of one bucket, while it is under way."""

    def __init__(self, name: str, future: Any, target: torch.Tensor, on_error: Callable[[Exception], None]) -> None:
        self._name = name
        self._future = future
        self._target = target
        self._on_error = on_error
        self._numel = self._target.numel()

    def advance(self) -> None:
        """Nothing: a hook starts all that it does itself."""

    def done(self) -> bool:
        return bool(self._future.done())

    def wait(self) -> None:
        try:
            self._take(self._future.wait())
        except Exception as error:
            self._on_error(error)
            raise

    def _take(self, value: Any) -> None:
        result = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if not isinstance(result, torch.Tensor) or result.numel() != self._numel:
            shown = f"{result.numel()} elements" if isinstance(result, torch.Tensor) else f"a {type(result).__name__}"
            raise UsageError(
                f"the future of the communication hook {self._name} holds {shown}; it must hold one tensor of "
                f"{self._numel} elements, as the buffer of its bucket"
            )
        if result.data_ptr() != self._target.data_ptr() or result.dtype != self._target.dtype:
            self._target.copy_(result.view(-1))
