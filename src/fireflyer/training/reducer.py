"""Sums gradients over ranks while the backward pass still computes others.

One *pass* is one call of `backward()`:

1. `begin` (the module's output received its gradient, or a first parameter did) asks the autograd engine to call
   `_finish` at the end of this backward pass.
2. `_on_gradient` (a parameter's gradient is complete) puts the gradient into its bucket. Whenever the next bucket in
   order is full its allreduce is started. Every rank starts buckets in the same order, whatever the order in which its
   own gradients came: that is what keeps ranks from waiting for each other in a circle.
3. `_finish` fills what did not come with zeros, starts what was not started and waits for all. The exception of a
   failed allreduce leaves `backward()` as it is.

Buckets lie in memory that the communicator gives (`empty`), where the ranks of a node reach them all: so nothing is
copied between the last gradient of a bucket and its mean. A gradient that autograd has put elsewhere, because
`zero_grad` set the parameter's `grad` to None, is moved into its bucket when it arrives; that costs one copy less than
filling the bucket with zeros before the pass and adding to it.

With compression a mean may take two steps. The second one is started when `LAG` more first steps have been started, so
that all ranks do it at the same place among their operations, and normally without waiting for the first.

Ranks must agree on an error too, or the others would wait for the one that raised: the last bucket carries one element
more, which is not zero if some rank missed a gradient that it may not miss.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch.utils.hooks import RemovableHandle

from fireflyer.base.errors import UsageError
from fireflyer.collectives.compression import Compression
from fireflyer.collectives.torch.tensors import tensor_in
from fireflyer.training.bucket_work import BucketWork, start_mean
from fireflyer.training.buckets import Bucket, plan_buckets
from fireflyer.training.communication import Communicator
from fireflyer.training.overlap import Interval

__all__ = ["GradientReducer", "ReducerStats", "in_backward"]

MAX_NAMES_IN_MESSAGE = 8
LAG: Final = 2
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ReducerStats:
    """Totals since construction.

    `in_flight_ns` is the time during which at least one allreduce had been started and not been seen to be done; the
    reducer looks whenever a gradient arrives. `blocked_ns` is the part of it spent waiting at the end of a pass, so
    `overlapped_ns` is how long sums ran beside the computation of gradients.
    """

    passes: int = 0
    allreduces: int = 0
    allreduces_during_backward: int = 0
    reduced_bytes: int = 0
    in_flight_ns: int = 0
    blocked_ns: int = 0

    @property
    def overlapped_ns(self) -> int:
        return self.in_flight_ns - self.blocked_ns


class _InFlightTime:
    """How long at least one of the allreduces, which end in the order of their start, was under way."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._since_ns = 0
        self._works: deque[BucketWork] = deque()

    def started(self, work: BucketWork, now_ns: int) -> None:
        if not self._works:
            self._since_ns = now_ns
        self._works.append(work)

    def look(self, now_ns: int) -> None:
        if self._works:
            while self._works and self._works[0].done():
                self._works.popleft()
            if not self._works:
                self.total_ns += now_ns - self._since_ns

    def forget(self) -> None:
        self._works.clear()


def in_backward() -> bool:
    """Whether the autograd engine is running in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - what torch.utils.checkpoint asks, too


class GradientReducer:
    """See the module. `enabled = False` leaves gradients alone (`no_sync`)."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        comm: Communicator,
        *,
        bucket_bytes: int,
        find_unused_parameters: bool,
        compression: Compression | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        _check_parameters(parameters)
        self.enabled = True
        self._comm = comm
        self._find_unused = find_unused_parameters
        self._now_ns = now_ns
        self._compression = compression
        self._buckets = _make_buckets(parameters, bucket_bytes, comm)
        self._active = False
        self._started = 0  # buckets whose allreduce was started in this pass
        self._flight = _InFlightTime()
        self._stats = ReducerStats()
        self.last_pass: Interval | None = None
        """From the begin of the last pass to its last gradient so far."""
        weakref.finalize(self, _remove, self._install_hooks())

    @property
    def bucket_names(self) -> list[tuple[str, ...]]:
        """The parameters of each bucket, in the order in which buckets are summed."""
        return [bucket.names for bucket in self._buckets]

    def stats(self) -> ReducerStats:
        return self._stats

    def begin(self) -> None:
        """Starts a pass, from inside a backward pass; does nothing if one is under way."""
        if self._active or not self.enabled:
            return
        for bucket in self._buckets:
            if bucket.work is not None:  # left by an interrupted wait: its memory is not ours yet
                bucket.work.wait()
            bucket.reset()
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - there is no public way to it
        engine.queue_callback(self._finish)
        self._buckets[-1].flat[-1] = 0
        self._started = 0
        self._active = True
        now_ns = self._now_ns()
        self.last_pass = (now_ns, now_ns)

    def check_no_pass_broke_off(self) -> None:
        """Called between passes. Raises `UsageError` if a pass ended by an exception after other ranks took part."""
        if not self._active or in_backward():
            return
        if self._started > 0:
            raise UsageError(
                f"a backward pass failed after {self._started} of {len(self._buckets)} allreduces, so the ranks no "
                "longer agree; restart from a checkpoint"
            )
        self._abandon()

    def _install_hooks(self) -> list[RemovableHandle]:
        return [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _hook(weakref.ref(self), bucket, slot)
            )
            for bucket in self._buckets
            for slot, parameter in enumerate(bucket.parameters)
        ]

    def _on_gradient(self, bucket: Bucket, slot: int) -> None:
        if not self.enabled:
            return
        self.begin()
        if bucket.arrived[slot]:
            raise UsageError(
                f"parameter {bucket.names[slot]!r} received its gradient twice in one backward pass; with activation "
                "checkpointing of shared parameters use use_reentrant=False"
            )
        with torch.no_grad():
            bucket.arrive(slot)
        now_ns = self._now_ns()
        if self.last_pass is not None:
            self.last_pass = (self.last_pass[0], now_ns)
        self._flight.look(now_ns)
        while self._started < len(self._buckets) and self._buckets[self._started].missing == 0:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._started]
        try:
            # named after its parameters, so that residuals survive a restart with other buckets where they fit
            key = f"{bucket.names[0]}..{bucket.names[-1]}"
            work = start_mean(self._comm, key, bucket.flat, bucket.gradients, self._compression)
            bucket.work = work
            self._started += 1
            self._flight.started(work, self._now_ns())
            if self._started > LAG:
                self._advance(self._buckets[self._started - 1 - LAG])
        except BaseException:
            self._abandon()
            raise

    def _advance(self, bucket: Bucket) -> None:
        if bucket.work is not None:
            bucket.work.advance()

    def _finish(self) -> None:
        if not self._active:
            return
        missing = [name for bucket in self._buckets for name in bucket.missing_names()]
        if len(missing) == sum(len(bucket.names) for bucket in self._buckets) and not self._find_unused:
            self._abandon()  # torch.autograd.grad() passed through: no gradient was accumulated, none is to be summed
            return
        early = self._started
        try:
            with torch.no_grad():
                self._complete(missing)
                blocked_ns = self._wait()
        finally:
            self._abandon()
        self._count(early, blocked_ns)
        if self._buckets[-1].flat[-1] != 0:
            raise UsageError(_unused_message(missing))

    def _complete(self, missing: list[str]) -> None:
        """Zeros for the gradients that did not come, and the rest of the allreduces."""
        for bucket in self._buckets:
            for slot, arrived in enumerate(bucket.arrived):
                if not arrived:
                    bucket.collect(slot)
        if missing and not self._find_unused:
            self._buckets[-1].flat[-1] = 1
        while self._started < len(self._buckets):
            self._start_next()

    def _wait(self) -> int:
        blocked_ns = 0
        before_ns = self._now_ns()
        for bucket in self._buckets[-LAG:]:
            self._advance(bucket)
        for bucket in self._buckets:
            assert bucket.work is not None  # noqa: S101 - all were started
            bucket.work.wait()
            bucket.work = None
            after_ns = self._now_ns()
            blocked_ns, before_ns = blocked_ns + after_ns - before_ns, after_ns
            self._flight.look(after_ns)
        return blocked_ns

    def _abandon(self) -> None:
        self._active = False
        self._flight.forget()

    def _count(self, early: int, blocked_ns: int) -> None:
        old = self._stats
        self._stats = ReducerStats(
            passes=old.passes + 1,
            allreduces=old.allreduces + len(self._buckets),
            allreduces_during_backward=old.allreduces_during_backward + early,
            reduced_bytes=old.reduced_bytes + sum(bucket.size_bytes for bucket in self._buckets),
            in_flight_ns=self._flight.total_ns,
            blocked_ns=old.blocked_ns + blocked_ns,
        )


def _make_buckets(
    parameters: Sequence[tuple[str, torch.nn.Parameter]], bucket_bytes: int, comm: Communicator
) -> list[Bucket]:
    sizes = [(f"{p.dtype} {p.device}", p.numel() * p.element_size()) for _, p in parameters]
    plan = plan_buckets(sizes, bucket_bytes)
    return [
        Bucket(
            [parameters[index][0] for index in members],
            [parameters[index][1] for index in members],
            spare=1 if number == len(plan) - 1 else 0,
            allocate=partial(tensor_in, comm, device=parameters[members[0]][1].device),
        )
        for number, members in enumerate(plan)
    ]


def _hook(reducer: weakref.ref[GradientReducer], bucket: Bucket, slot: int) -> Callable[[torch.Tensor], None]:
    def on_gradient(_: torch.Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive._on_gradient(bucket, slot)  # noqa: SLF001 - this is the reducer's own hook

    return on_gradient


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _check_parameters(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    if not parameters:
        raise UsageError("the module has no parameter that requires a gradient; there is nothing to train in parallel")
    for name, parameter in parameters:
        if parameter.dtype not in _DTYPES:
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype}; allowed are float64, float32, float16, bfloat16"
            )


def _unused_message(missing: list[str]) -> str:
    if not missing:
        return "another rank computed no gradient for some parameters; its own error names them"
    names = ", ".join(missing[:MAX_NAMES_IN_MESSAGE]) + (", ..." if len(missing) > MAX_NAMES_IN_MESSAGE else "")
    return (
        f"{len(missing)} parameters received no gradient: {names}; use them in the loss, freeze them before wrapping, "
        "or pass find_unused_parameters=True to count them as zero"
    )
