"""Sums gradients over ranks while the backward pass still computes others.

One *pass* is one call of `backward()` that is to be summed:

1. `arm` (a forward pass that shall be synchronised) says that the next backward pass is one.
2. `begin` (an output of such a forward pass received its gradient, or a first parameter did) asks the autograd engine
   to call `_finish` at the end of this backward pass. Gradients of other backward passes only accumulate.
3. `_on_gradient` (a parameter's gradient is complete) puts the gradient into its bucket. Whenever the next bucket in
   order is full its allreduce is started. Every rank starts buckets in the same order, whatever the order in which its
   own gradients came: that is what keeps ranks from waiting for each other in a circle.
4. `_finish` fills what did not come with zeros, starts what was not started and waits for all. The exception of a
   failed allreduce leaves `backward()` as it is.

Buckets lie in memory that the communicator gives (`empty`), where the ranks of a node reach them all: so nothing is
copied between the last gradient of a bucket and its mean. A gradient that autograd has put elsewhere, because
`zero_grad` set the parameter's `grad` to None, is moved into its bucket when it arrives; that costs one copy less than
filling the bucket with zeros before the pass and adding to it.

With compression a mean may take two steps. The second one is started when `LAG` more first steps have been started, so
that all ranks do it at the same place among their operations, and normally without waiting for the first.

Ranks must agree on gradients that are missing, too, or the others would wait for the one that raised: the last bucket
carries one element more, which is not zero if some rank missed one; a communication hook does not see it, so it is
summed by itself when the futures of the hook are complete. Where gradients may be missing, one more allreduce of a
number for each parameter then tells which parameters no rank has used: their `grad` stays as it was.

A *static graph* is learnt in the first pass, which starts all sums at its end: how often the hook of each parameter
fires, and which parameters no rank uses. Later passes wait for no others, and one that differs is an error.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

import torch
from torch.utils.hooks import RemovableHandle

from fireflyer.base.errors import UsageError
from fireflyer.collectives.compression import Compression
from fireflyer.training.bucket_work import MeanInFlight, StartedMeans, start_mean
from fireflyer.training.buckets import Bucket, plan_buckets
from fireflyer.training.comm_hooks import CommHook, GradBucket
from fireflyer.training.communication import Communicator
from fireflyer.training.overlap import Interval

__all__ = ["REDUCED_DTYPES", "GradientReducer", "ReducerStats", "in_backward"]

MAX_NAMES_IN_MESSAGE = 8
MAX_TOLD = 1000
"""Characters of an exception that the other ranks are told."""
REDUCED_DTYPES: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)


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
        self._works: deque[MeanInFlight] = deque()

    def started(self, work: MeanInFlight, now_ns: int) -> None:
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
    """See the module."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        comm: Communicator,
        *,
        bucket_bytes: int,
        find_unused_parameters: bool,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        compression: Compression | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        _check_parameters(parameters)
        self.ranks: Callable[[], int] | None = None
        """By how many ranks the sums of the next passes are divided; None: by all. Set alike on all ranks."""
        self._comm = comm
        self._find_unused = find_unused_parameters and not static_graph
        self._static = static_graph
        self._learning = static_graph
        self._unused: list[AbstractSet[int]] = []
        """Of a static graph: for each bucket the slots that no rank uses."""
        self._now_ns = now_ns
        self._compression = compression
        self._hook: CommHook | None = None
        self._buckets = _make_buckets(parameters, bucket_bytes, comm, as_views=gradient_as_bucket_view)
        self._armed = False
        self._active = False
        self._means = StartedMeans()
        self._divisor: int | None = None
        self._flight = _InFlightTime()
        self._stats = ReducerStats()
        self._warned = False
        self.last_pass: Interval | None = None
        """From the begin of the last pass to its last gradient so far."""
        weakref.finalize(self, _remove, self._install_hooks())

    @property
    def bucket_names(self) -> list[tuple[str, ...]]:
        """The parameters of each bucket, in the order in which buckets are summed."""
        return [bucket.names for bucket in self._buckets]

    @property
    def busy(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._active

    @property
    def size_bytes(self) -> int:
        """Of all buckets."""
        return sum(bucket.size_bytes for bucket in self._buckets)

    def stats(self) -> ReducerStats:
        return self._stats

    def use(self, hook: CommHook) -> None:
        """Lets `hook` make the means. Raises `UsageError`."""
        if self._hook is not None:
            raise UsageError(f"{self._hook.name} is registered already; a model has one communication hook")
        if self._compression is not None:
            raise UsageError("compression= is a communication hook of its own; pass compression=None to register one")
        if self._stats.passes > 0:
            raise UsageError("gradients were averaged already; register the communication hook before backward()")
        self._hook = hook

    def learn_graph(self) -> None:
        """From now on the graph is static."""
        if self._stats.passes > 0:
            raise UsageError("gradients were averaged already; pass static_graph=True when wrapping")
        self._static = self._learning = True
        self._find_unused = False

    def arm(self) -> None:
        """The next backward pass is to be summed."""
        self._armed = True

    def begin(self) -> None:
        """Starts a pass, from inside a backward pass; does nothing if one is under way."""
        if self._active:
            return
        for bucket in self._buckets:
            if bucket.work is not None:  # left by an interrupted wait: its memory is not ours yet
                bucket.work.wait()
            bucket.reset()
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - there is no public way to it
        engine.queue_callback(self._finish)
        last = self._buckets[-1]
        last.summed[last.summed_gradients.numel() :] = 0
        self._means = StartedMeans()
        self._divisor = None if self.ranks is None else self.ranks()
        self._active = True
        now_ns = self._now_ns()
        self.last_pass = (now_ns, now_ns)
        if self._static and not self._learning:
            with torch.no_grad():
                for bucket in self._buckets:
                    bucket.collect_unexpected()
            self._start_full()

    def check_no_pass_broke_off(self) -> None:
        """Called between passes. Raises `UsageError` if a pass ended by an exception after other ranks took part."""
        if not self._active or in_backward():
            return
        if len(self._means) > 0:
            raise UsageError(
                f"a backward pass failed after {len(self._means)} of {len(self._buckets)} allreduces, so the ranks no "
                "longer agree; restart from a checkpoint"
            )
        self._abandon()

    def take_part(self) -> None:
        """Takes part in a pass of other ranks with gradients of zero; leaves its own as they are. Raises what the
        operations raise, and `UsageError` where the other ranks do."""
        means = StartedMeans()
        started: list[MeanInFlight] = []
        flag = torch.zeros(0)
        with torch.no_grad():
            for bucket in self._buckets:
                zeros = torch.zeros_like(bucket.summed)
                flag = zeros
                mean = self._mean(bucket, zeros, None if self.ranks is None else 1)
                means.add(mean)
                started.append(mean)
            means.end()
            for mean in started:
                mean.wait()
            self._sum_flag(flag[-1:])
            if flag[-1] == 0:
                return
            if not self._find_unused and not self._learning:
                raise UsageError(_unused_message([], static=self._static))
            self._agree_on_used(present=False)

    def _install_hooks(self) -> list[RemovableHandle]:
        return [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _hook(weakref.ref(self), bucket, slot)
            )
            for bucket in self._buckets
            for slot, parameter in enumerate(bucket.parameters)
        ]

    def _on_gradient(self, bucket: Bucket, slot: int) -> None:
        if not self._active:
            if not self._armed:
                bucket.used[slot] = True
                return
            self.begin()
        self._check_gradient(bucket, slot)
        with torch.no_grad():
            bucket.fire(slot)
        now_ns = self._now_ns()
        if self.last_pass is not None:
            self.last_pass = (self.last_pass[0], now_ns)
        self._flight.look(now_ns)
        self._start_full()

    def _check_gradient(self, bucket: Bucket, slot: int) -> None:
        if bucket.fired[slot] >= bucket.expected[slot] and not self._learning:
            if self._static:
                raise UsageError(
                    f"parameter {bucket.names[slot]!r} received more gradients than in the first pass; the graph is "
                    "not static: leave static_graph out"
                )
            raise UsageError(
                f"parameter {bucket.names[slot]!r} received its gradient twice in one backward pass; with activation "
                "checkpointing of shared parameters use use_reentrant=False, or static_graph=True"
            )
        gradient = bucket.parameters[slot].grad
        if gradient is not None and gradient.requires_grad and not self._warned:
            self._warned = True
            warnings.warn(
                "backward(create_graph=True): gradients are averaged, but their own gradients are not; use "
                "torch.autograd.grad for what is differentiated twice",
                stacklevel=2,
            )

    def _start_full(self) -> None:
        while (
            not self._learning
            and len(self._means) < len(self._buckets)
            and self._buckets[len(self._means)].missing == 0
        ):
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[len(self._means)]
        try:
            with torch.no_grad():
                mean = self._mean(bucket, bucket.summed, self._divisor)
            bucket.work = mean
            self._flight.started(mean, self._now_ns())
            self._means.add(mean)
        except BaseException:
            self._abandon()
            raise

    def _mean(self, bucket: Bucket, summed: torch.Tensor, ranks: int | None) -> MeanInFlight:
        """Starts that of `summed`, which is the bucket's or as large."""
        index = self._buckets.index(bucket)
        if self._hook is not None:
            is_last = index == len(self._buckets) - 1
            grad_bucket = GradBucket(bucket, summed, index=index, is_last=is_last)
            return self._hook.start(grad_bucket, self._tell_of_hook)
        # named after its parameters, so that residuals survive a restart with other buckets where they fit
        key = f"{bucket.names[0]}..{bucket.names[-1]}"
        gradients = summed[: bucket.summed_gradients.numel()]
        return start_mean(self._comm, key, summed, gradients, self._compression, ranks)

    def _tell_of_hook(self, error: Exception) -> None:
        """The others wait for operations that the hook would have started here: they are told why none come. Where the
        group has failed before, as it has when the hook failed because of that, this changes nothing."""
        assert self._hook is not None  # noqa: S101 - it raised
        if self._comm.world_size > 1:
            what = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_TOLD]
            self._comm.abort(f"the communication hook {self._hook.name} of rank {self._comm.rank} raised {what}")

    def _finish(self) -> None:
        if not self._active:
            return
        tolerant = self._find_unused or self._learning
        if not tolerant and not any(any(bucket.fired) for bucket in self._buckets):
            self._abandon()  # torch.autograd.grad() passed through: no gradient was accumulated, none is to be summed
            return
        early = len(self._means)
        missing = [name for bucket in self._buckets for name in bucket.missing_names()]
        try:
            with torch.no_grad():
                self._complete(bool(missing))
                blocked_ns = self._wait()
                self._sum_flag(self._buckets[-1].summed[-1:])
                some_missing = bool(self._buckets[-1].summed[-1] != 0)
                self._deliver(some_missing and tolerant)
        finally:
            self._abandon()
        self._armed = False
        self._count(early, blocked_ns)
        if some_missing and not tolerant:
            raise UsageError(_unused_message(missing, static=self._static))

    def _complete(self, missing: bool) -> None:
        """Zeros for the gradients that did not come, and the rest of the allreduces."""
        for bucket in self._buckets[len(self._means) :]:
            bucket.collect_missing()
        flag = self._buckets[-1].summed[-1:]
        if missing:
            flag.fill_(1)
        while len(self._means) < len(self._buckets):
            self._start_next()
        self._means.end()

    def _sum_flag(self, flag: torch.Tensor) -> None:
        """Beside the means of a hook, which do not carry it. After them: callbacks of a hook start collectives, too;
        over an hfreduce group these are operations of this communicator, which have one order on all ranks."""
        if self._hook is not None:
            self._comm.allreduce(flag, async_op=True).wait()

    def _wait(self) -> int:
        blocked_ns = 0
        before_ns = self._now_ns()
        for bucket in self._buckets:
            assert bucket.work is not None  # noqa: S101 - all were started
            bucket.work.wait()
            bucket.work = None
            after_ns = self._now_ns()
            blocked_ns, before_ns = blocked_ns + after_ns - before_ns, after_ns
            self._flight.look(after_ns)
        return blocked_ns

    def _deliver(self, some_unused: bool) -> None:
        unused = self._unused
        if some_unused:
            used = iter(self._agree_on_used())
            unused = [{slot for slot in range(len(bucket.names)) if not next(used)} for bucket in self._buckets]
        for number, bucket in enumerate(self._buckets):
            bucket.deliver(unused[number] if unused else frozenset())
        if self._learning:
            self._learning = False
            self._unused = unused
            for bucket in self._buckets:
                bucket.expected = list(bucket.fired)

    def _agree_on_used(self, *, present: bool = True) -> list[int]:
        """For each parameter, in the order of buckets, on how many ranks it was used. Collective."""
        own = [present and used for bucket in self._buckets for used in bucket.used]
        counts = torch.tensor(own, dtype=torch.int64)
        self._comm.allreduce(counts, async_op=True).wait()
        return [int(count) for count in counts]

    def _abandon(self) -> None:
        self._active = False
        self._flight.forget()

    def _count(self, early: int, blocked_ns: int) -> None:
        old = self._stats
        self._stats = ReducerStats(
            passes=old.passes + 1,
            allreduces=old.allreduces + len(self._buckets),
            allreduces_during_backward=old.allreduces_during_backward + early,
            reduced_bytes=old.reduced_bytes + self.size_bytes,
            in_flight_ns=self._flight.total_ns,
            blocked_ns=old.blocked_ns + blocked_ns,
        )


def _make_buckets(
    parameters: Sequence[tuple[str, torch.nn.Parameter]], bucket_bytes: int, comm: Communicator, *, as_views: bool
) -> list[Bucket]:
    sizes = [(f"{p.dtype} {p.device}", p.numel() * p.element_size()) for _, p in parameters]
    plan = plan_buckets(sizes, bucket_bytes)
    return [
        Bucket(
            [parameters[index][0] for index in members],
            [parameters[index][1] for index in members],
            spare=1 if number == len(plan) - 1 else 0,
            as_views=as_views,
            comm=comm,
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
        if parameter.dtype not in REDUCED_DTYPES:
            raise UsageError(
                f"parameter {name!r} is {parameter.dtype}; allowed are "
                + ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCED_DTYPES)
            )


def _unused_message(missing: list[str], *, static: bool) -> str:
    if not missing:
        return "another rank computed no gradient for some parameters; its own error names them"
    names = ", ".join(missing[:MAX_NAMES_IN_MESSAGE]) + (", ..." if len(missing) > MAX_NAMES_IN_MESSAGE else "")
    if static:
        return (
            f"{len(missing)} parameters received fewer gradients than in the first pass: {names}; the graph is not "
            "static: pass find_unused_parameters=True in place of static_graph=True"
        )
    return (
        f"{len(missing)} parameters received no gradient: {names}; use them in the loss, freeze them before wrapping, "
        "or pass find_unused_parameters=True to leave out those that no rank has used"
    )
