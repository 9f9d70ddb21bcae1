"""What a layer with experts calls: dispatches and combines under way. One thread for each dispatcher.

Operations of a dispatcher run one after the other in the order of the calls, which must be the same on all ranks; those
of several dispatchers, and what else the communicator does, are independent of each other. Every message has a header
with the dispatcher's number and its count of calls: where ranks are at different operations all of them get an error,
and nothing is taken for something else. What fails on one rank aborts the communicator, so that nobody waits for it.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import FireflyerError, Timeout, UsageError
from fireflyer.base.units import SECOND, format_duration
from fireflyer.collectives.communicator import Communicator
from fireflyer.collectives.dispatch.hops import VALUE_TYPES, Dispatched, Hops, Routed
from fireflyer.collectives.dispatch.messages import Limits
from fireflyer.collectives.dispatch.placement import ExpertPlacement
from fireflyer.collectives.dispatch.plan import MAX_ROWS, plan_source
from fireflyer.collectives.p2p.exchange import MAX_TAG
from fireflyer.collectives.tokens import TokenCodec, token_codec

__all__ = ["Dispatcher", "InFlightDispatch"]

Array = npt.NDArray[Any]
T = TypeVar("T")

_MAX_DISPATCHERS: Final = 1 << 16
_lock: Final = threading.Lock()
_made: Final[weakref.WeakKeyDictionary[Communicator, int]] = weakref.WeakKeyDictionary()
"""How many dispatchers each communicator has had."""


class InFlightDispatch(Generic[T]):
    """An operation under way. Its arrays belong to the dispatcher until it is done."""

    def __init__(self, future: Future[T], name: str) -> None:
        self._future = future
        self._name = name

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_ns: int | None = None) -> T:
        """The result. Raises what it failed with; `Timeout` when it still runs: it may be waited for again."""
        try:
            return self._future.result(None if timeout_ns is None else timeout_ns / SECOND)
        except FutureTimeout:
            waited = format_duration(timeout_ns or 0)
            raise Timeout(f"{self._name} has not completed within {waited}; it is still pending") from None


class Dispatcher:
    """Dispatch and combine of one rank and one layer. All ranks of a communicator make it at the same time, with the
    same arguments.

    Messages have the tags from `MAX_TAG` downwards, one for each dispatcher: leave these alone.
    """

    def __init__(
        self,
        comm: Communicator,
        placement: ExpertPlacement,
        *,
        width: int,
        per_token: int,
        max_tokens: int,
        dtype: str = "bf16",
        dispatch_codec: str | TokenCodec = "bf16",
        combine_codec: str | TokenCodec = "bf16",
    ) -> None:
        """A token has `width` values of `dtype` "bf16" (as uint16), "f32" or "f64" and chooses `per_token` experts; a
        rank has at most `max_tokens` tokens. Sums are in float32, of "f64" in float64.

        Collective. Raises `UsageError` where ranks pass different arguments, a codec cannot take the width, or the
        placement has other ranks than `comm`.
        """
        if dtype not in VALUE_TYPES:
            raise UsageError(f"dtype {dtype!r} is not one of {', '.join(VALUE_TYPES)}")
        if placement.ranks != comm.world_size:
            raise UsageError(f"the placement has {placement.ranks} ranks, the communicator {comm.world_size}")
        if width < 1 or per_token < 1 or not 0 <= max_tokens * placement.nodes * per_token <= MAX_ROWS:
            raise UsageError(
                f"width {width} and per_token {per_token} must be positive, and max_tokens {max_tokens} * nodes * "
                f"per_token at most {MAX_ROWS}"
            )
        codecs = (token_codec(dispatch_codec), token_codec(combine_codec))
        for codec in codecs:
            codec.row_bytes(width)  # raises
        self.placement = placement
        self.width = width
        self.per_token = per_token
        self.max_tokens = max_tokens
        self.dtype = VALUE_TYPES[dtype]
        self._comm = comm
        with _lock:
            self.number = _made.get(comm, 0)
            _made[comm] = self.number + 1
        if self.number >= _MAX_DISPATCHERS:
            raise UsageError(f"a communicator has at most {_MAX_DISPATCHERS} dispatchers; use one for several calls")
        self._hops = Hops(
            comm,
            placement,
            number=self.number,
            tag=MAX_TAG - self.number,
            width=width,
            dtype=dtype,
            codecs=codecs,
            limits=Limits(max_tokens, max_tokens * per_token),
        )
        _compare(
            comm,
            {
                "number of dispatchers before it": self.number,
                "placement of experts": placement.rank_of_expert.tolist(),
                "nodes": placement.node_of_rank.tolist(),
                "width, per_token, max_tokens": (width, per_token, max_tokens),
                "dtype and codecs": (dtype, codecs[0].name, codecs[1].name),
            },
        )
        self._calls = 0
        self._starting = threading.Lock()
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=f"dispatcher-{self.number}", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    @property
    def sent_bytes(self) -> Array:
        """Bytes sent so far to each rank, headers included; 0 to itself."""
        return self._hops.sent_bytes.copy()

    def start_dispatch(
        self, values: Array, experts: Array, weights: Array | None = None
    ) -> InFlightDispatch[Dispatched]:
        """Sends `values` (tokens, width) to the `experts` (tokens, per_token) that each token chose, with the `weights`
        of these choices; None: ones. Raises `UsageError` before anything is sent."""
        self._check("values", values)
        if experts.shape != (len(values), self.per_token) or len(values) > self.max_tokens:
            raise UsageError(
                f"experts has shape {experts.shape} for {len(values)} tokens; it needs {self.per_token} for each of at "
                f"most {self.max_tokens} tokens"
            )
        source = plan_source(experts, self.placement)
        chosen = np.ones(experts.shape, self._hops.sum_dtype) if weights is None else weights
        if chosen.shape != experts.shape:
            raise UsageError(f"weights has shape {chosen.shape}, not {experts.shape}")
        return self._start("dispatch", lambda call: self._hops.dispatch(call, values, source, chosen))

    def start_rows(self, routed: Routed, values: Array) -> InFlightDispatch[Array]:
        """Sends other `values` (tokens, width) along the same routes; gives what `Dispatched.rows` is of them."""
        self._check("values", values, routed.source.tokens)
        return self._start("dispatch", lambda call: self._hops.rows(call, routed, values))

    def start_combine(
        self, routed: Routed, outputs: Array, scalars: Array | None = None
    ) -> InFlightDispatch[tuple[Array, Array | None]]:
        """Hands back `outputs` (entries, width), in the order of `Dispatched.rows`, and gives for each token their sum
        over its experts, (tokens, width). `scalars` (entries,) come back one by one, (tokens, per_token): all ranks
        pass them, or none."""
        entries = int(routed.arrival.row.size)
        self._check("outputs", outputs, entries)
        if scalars is not None and scalars.shape != (entries,):
            raise UsageError(f"scalars has shape {scalars.shape}, not ({entries},)")
        return self._start("combine", lambda call: self._hops.combine(call, routed, outputs, scalars))

    def abort(self, reason: str) -> None:
        """Makes every pending and later operation of the communicator fail with `Aborted` on every rank."""
        self._comm.abort(f"dispatcher {self.number} of rank {self._comm.rank}: {reason}")

    def close(self) -> None:
        """Waits for what was started. Idempotent."""
        self._end()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def _start(self, name: str, step: Callable[[int], T]) -> InFlightDispatch[T]:
        future: Future[T] = Future()
        with self._starting:
            if not self._end.alive:
                raise UsageError(f"dispatcher {self.number} is closed; make another on all ranks")
            call = self._calls
            self._calls += 1
            self._jobs.put(lambda: self._run(future, step, call))
        return InFlightDispatch(future, f"{name} (call {call} of dispatcher {self.number})")

    def _run(self, future: Future[T], step: Callable[[int], T], call: int) -> None:
        """In the thread. Whatever fails, peers do not wait for this rank."""
        try:
            future.set_result(step(call))
        except BaseException as error:
            said = error.message if isinstance(error, FireflyerError) else f"{type(error).__name__}: {error}"
            self.abort(said)
            future.set_exception(error)

    def _check(self, name: str, values: Array, rows: int | None = None) -> None:
        fits = values.ndim == 2 and values.shape[1] == self.width and values.dtype == self.dtype
        if not fits or rows not in (None, len(values)):
            raise UsageError(
                f"{name} has shape {values.shape} of {values.dtype}; it needs {'some' if rows is None else rows} rows "
                f"of {self.width} {self.dtype}"
            )


def _work(jobs: queue.Queue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or it would keep the dispatcher alive


def _compare(comm: Communicator, arguments: dict[str, object]) -> None:
    """Raises `UsageError` that names a rank with other arguments than this one, and which."""
    digests = [hashlib.sha256(repr(value).encode()).digest()[:8] for value in arguments.values()]
    own = np.frombuffer(b"".join(digests), np.int64).copy()
    every = np.empty((comm.world_size, own.size), np.int64)
    comm.allgather(every, own)
    for rank, theirs in enumerate(every):
        for name, mine, other in zip(arguments, own, theirs, strict=True):
            if mine != other:
                raise UsageError(
                    f"rank {rank} makes a dispatcher with another {name} than rank {comm.rank}; all ranks must pass "
                    "the same arguments, in the same order of layers"
                )
