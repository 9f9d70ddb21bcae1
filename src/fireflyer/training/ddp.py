"""Data parallelism: every rank has the whole model, computes gradients of its share of the batch, and averages them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB
from fireflyer.collectives.compression import Compression
from fireflyer.collectives.torch_devices import reaching
from fireflyer.training.communication import Communicator
from fireflyer.training.overlap import Interval
from fireflyer.training.reducer import GradientReducer, ReducerStats, in_backward
from fireflyer.training.replicas import broadcast_tensors, describe_tensor, verify_same_description

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(torch.nn.Module):
    """Wraps `module` so that `backward()` leaves the same averaged gradients on every rank.

    >>> model = DistributedDataParallel(GPT(config), comm)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model(tokens).backward(); optimizer.step(); optimizer.zero_grad()

    Construction is collective: it checks that all ranks wrap the same parameters and buffers (names, order, shapes,
    dtypes) with the same options, raising `UsageError` on all of them otherwise, and copies rank 0's values to the
    others.

    *Gradients.* Each is averaged over ranks in the communicator's fixed order: summed and divided in float32 at least,
    then rounded once to the gradient's dtype (so float16 does not overflow where the average does not). With a loss
    that is a mean over equal shares of a batch they equal those of one process on the whole batch up to the order of
    additions: relative 1e-5 or absolute 1e-6 in float32. The same seed, plan and number of ranks give the same bits in
    every run. `grad` becomes a view into a bucket, so keep a clone
    of what must outlive the next `backward()`; `zero_grad` works either way. Gradients accumulated before (`no_sync`,
    or no `zero_grad`) are part of what is averaged.

    *Compression* (`fireflyer.collectives.compression.Compression`) makes float32 gradients travel in fewer bytes.

    *Devices.* Gradients on a CUDA device have their buckets there and are summed in host memory, while others are
    computed and copied. They are not compressed.

    *Parameters* that are frozen stay local after the initial copy; shared ones are summed once. A parameter without a
    gradient in a pass is an error that all ranks raise together, unless `find_unused_parameters`: then it counts as
    zero, and `grad` is the average (zeros if no rank used it). Without that option a pass that reaches no parameter at
    all, as that of `torch.autograd.grad`, is left alone.

    *Buffers* (batch norm statistics) are copied from rank 0 before each forward pass in training mode.

    `state_dict()` and `load_state_dict()` are those of `module`: no `module.` prefix comes or goes.

    Errors of the communicator (`PeerFailed`, `Timeout`, ...) leave `backward()`, `forward()` or the constructor with
    their own class; the communicator is then unusable.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: Communicator,
        *,
        bucket_bytes: int = 25 * MIB,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        compression: Compression | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"cannot wrap a {type(module).__name__}; the first argument is a torch.nn.Module")
        if bucket_bytes < 1:
            raise UsageError(f"bucket_bytes {bucket_bytes} must be positive; 25 MiB is usual")
        comm = _for_devices_of(module, comm)
        self.module = module
        self._comm = comm
        self._broadcast_buffers = broadcast_buffers
        options = f"options {bucket_bytes=} {broadcast_buffers=} {find_unused_parameters=} compression={compression}"
        verify_same_description(comm, [*_describe(module), options])
        self._known = _parameter_states(module)
        self._reducer = GradientReducer(
            [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad],
            comm,
            bucket_bytes=bucket_bytes,
            find_unused_parameters=find_unused_parameters,
            compression=compression,
            now_ns=now_ns,
        )
        broadcast_tensors(comm, [*module.parameters(), *module.buffers()])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward pass, after buffers were brought in line with rank 0's."""
        self._reducer.check_no_pass_broke_off()
        learning = torch.is_grad_enabled() and self.training
        if learning:
            self._check_parameters_unchanged()
        if self.training and self._broadcast_buffers and self._reducer.enabled and not in_backward():
            broadcast_tensors(self._comm, list(self.module.buffers()))
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes that run inside only accumulate; the next one outside averages the sum. Buffers stay local.

        What counts is where `backward()` runs, not where the forward pass ran.
        """
        before = self._reducer.enabled
        self._reducer.enabled = False
        try:
            yield
        finally:
            self._reducer.enabled = before

    def stats(self) -> ReducerStats:
        """Bytes reduced and how far the sums ran beside the backward pass, since construction."""
        return self._reducer.stats()

    @property
    def last_pass(self) -> Interval | None:
        """When the last backward pass that averaged was computing: (start, last gradient) in nanoseconds of `now_ns`,
        by default those of `Communicator.records()`; None before the first. For `overlap.overlap_of`."""
        return self._reducer.last_pass

    @property
    def buckets(self) -> list[tuple[str, ...]]:
        """The names of the parameters in each bucket, in the order of their allreduces."""
        return self._reducer.bucket_names

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's; load the same on every rank."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _on_output_gradient(self, _: torch.Tensor) -> None:
        # From here the end of the pass is that of the whole backward(). Were it first asked for by a parameter inside a
        # reentrant activation checkpoint, it would be the end of that inner pass.
        self._reducer.begin()

    def _check_parameters_unchanged(self) -> None:
        now = _parameter_states(self.module)
        if now != self._known:
            changed = sorted({name for name, _, _ in {*now} ^ {*self._known}})
            raise UsageError(f"parameters were replaced, frozen or unfrozen after wrapping: {changed[:8]}; wrap again")


def _for_devices_of(module: torch.nn.Module, comm: Communicator) -> Communicator:
    for name, tensor in chain[tuple[str, torch.Tensor]](module.named_parameters(), module.named_buffers()):
        try:
            comm = reaching(comm, {tensor.device.type})
        except UsageError as error:
            raise UsageError(f"{name!r} is on {tensor.device}; {error}") from None
    return comm


def _describe(module: torch.nn.Module) -> list[str]:
    lines = [describe_tensor("parameter", name, tensor) for name, tensor in module.named_parameters()]
    return lines + [describe_tensor("buffer", name, tensor) for name, tensor in module.named_buffers()]


def _parameter_states(module: torch.nn.Module) -> list[tuple[str, int, bool]]:
    return [(name, id(parameter), parameter.requires_grad) for name, parameter in module.named_parameters()]


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors_in(value)
