"""Chunks for one thread: prepare any number of operations, submit them, wait for some of them.

    with open_ring(["10.0.0.1:7000"], credential) as ring:
        reads = np.zeros(64, READ)
        reads["chain"], reads["file"], reads["index"] = …
        reads["at"], reads["length"] = np.arange(64) * 4096, 4096
        ring.prepare_reads(0, reads, memory)                       # tags 0 … 63
        done = ring.wait(64)                                       # done.tags, done.counts

Reads of a batch go from NumPy arrays to the native ring and back without a Python object for each; those that are not
simply answered (a version has changed, a node is gone, an update is under way) are taken over by the machine of
`core.requests.state_machine`, which decides about all other operations. Their meaning is that of
`fireflyer.fs.client.Chunks`.

Tags are the caller's; those under way must differ. Memory must stay as it is until its tag has come back.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np

from fireflyer.base.errors import Aborted, Busy, FireflyerError, PermissionDenied, UsageError, error_from_wire
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.client.chunks import DEFAULT_TIMEOUT_NS, Options, chains_of, change_of
from fireflyer.fs.client.control.capabilities import ATTEMPTS, Right
from fireflyer.fs.client.control.control_thread import ControlThread
from fireflyer.fs.client.control_listener import ControlListener
from fireflyer.fs.client.dispatch import Dispatch, ReadStatus
from fireflyer.fs.client.fork_safety import ProcessBound
from fireflyer.fs.client.memory import memory_of
from fireflyer.fs.client.replica_selector import ANSWER, Reads, ReplicaSelector, check_reads
from fireflyer.fs.core.requests.effects import DataArrived, Failed, QuerySpec
from fireflyer.fs.schema.chunks import MAX_PAGE, Change, ChunkEntry, ChunkVersion, Done, Found, Operation, QueryKind
from fireflyer.fs.schema.ids import ChainId, ChunkId
from fireflyer.fs.schema.routing import Routing
from fireflyer.identity.handshake import Credential

__all__ = ["MISSING", "Completed", "Ring", "open_ring", "ring_of"]

MISSING: Final = -1
"""Count of a read of a chunk that is not there."""
FAILED: Final = -2
MAX_PLAIN_READS: Final = 1 << 16
"""Of batches, under way at once."""
Value: TypeAlias = Done | ChunkVersion | ChunkEntry | tuple[ChunkEntry, ...]
_LONGEST_WAIT_NS: Final = 200 * MS
"""In one native call: how late a change of routing is noticed that nobody asked for."""


class Completed(NamedTuple):
    """Operations that are over, in no order. `counts`: of reads the bytes that there were, or `MISSING`; of others 0;
    of those in `errors`, -2. `values`: what updates, stats and lists say, by tag."""

    tags: np.ndarray[Any, np.dtype[np.uint64]]
    counts: np.ndarray[Any, np.dtype[np.int64]]
    values: dict[int, Value]
    errors: dict[int, FireflyerError]


@dataclass(slots=True)
class _Batch:
    """Plain reads. `open`: which of them the ring still has."""

    tag: int
    reads: Reads
    memory: memoryview
    first: int
    late_ns: int
    open: np.ndarray[Any, np.dtype[np.bool_]]
    left: int


def open_ring(
    managers: Sequence[str], credential: Credential, *, name: str = "", options: Options | None = None,
    timeout_ns: int = DEFAULT_TIMEOUT_NS,
) -> Ring:  # fmt: skip
    """Connect as `fireflyer.fs.client.connect` does; also wait for the routing and for connections with all nodes."""
    return ring_of(ControlThread(managers, credential, name=name), options or Options(), timeout_ns)


def ring_of(background: ControlThread, options: Options, timeout_ns: int) -> Ring:
    """As `open_ring`; the background is closed with it."""
    try:
        session = background.open(timeout_ns)
        ring = Ring(background, session.client, options)
    except BaseException:
        background.close()
        raise
    ring.warm(timeout_ns)
    return ring


class Ring(ControlListener, ProcessBound):
    """Made by `open_ring`; one thread at a time."""

    def __init__(self, background: ControlThread, client: int, options: Options) -> None:
        ProcessBound.__init__(self)
        dispatch = Dispatch(
            client, limits=options.limits, seed=options.seed or client, connect=background.connect,
            ask_routing=background.want_routing, ask_right=background.want_right,
            exchange=background.exchange,
        )  # fmt: skip
        ControlListener.__init__(self, client, dispatch)
        self._options = options
        self._background = background
        self._selector = ReplicaSelector(Routing(0), {})
        self._batches: list[_Batch] = []
        self._plain = 0
        self._over: list[tuple[int, int]] = []
        self._over_plain: list[tuple[Any, Any]] = []
        self._count = 0
        self._values: dict[int, Value] = {}
        self._errors: dict[int, FireflyerError] = {}
        self._poll = select.poll()
        self._fds = (self._dispatch.ring.fd, background.fd)
        for fd in self._fds:
            self._poll.register(fd, select.POLLIN)
        self._closed = False

    @property
    def routing(self) -> Routing:
        return self._dispatch.routing

    def chains(self, table: int = 1) -> tuple[ChainId, ...]:
        """Chains of this chain table, in its order. Raises `NotFound`."""
        return chains_of(self.routing, table)

    @property
    def under_way(self) -> int:
        """Operations that were prepared and have not come back from `wait`."""
        return self._dispatch.open + self._plain + self._count

    # --- prepare ---

    def prepare_reads(self, tag: int, reads: Reads, memory: Any, *, timeout_ns: int | None = None) -> None:
        """Read `i` of the array gets the tag `tag + i`. Raises `UsageError`, `Busy`; then none is prepared."""
        self.check_process()
        view = memory_of(memory, writable=True)
        check_reads(reads, view.nbytes)
        count = len(reads)
        if self._plain + count > MAX_PLAIN_READS:
            raise Busy(
                f"{self._plain} reads of batches are in flight, at most {MAX_PLAIN_READS} are allowed; wait for some"
            )
        self._deliver()
        limits = self._options.limits
        if limits.senders and count and int(reads["length"].max()) >= limits.large_bytes:
            self._take_over(tag, reads, view, range(count), timeout_ns)
            return
        placed, lost = self._selector.place(reads)
        if lost is None:
            first = self._dispatch.ring.prepare_reads(placed, view, tag)
            still = np.ones(count, dtype=np.bool_)
            patience_ns = limits.attempt_ns + int(reads["length"].sum()) * SECOND // limits.least_bytes_per_s
            self._batches.append(_Batch(tag, reads, view, first, time.monotonic_ns() + patience_ns, still, count))
            self._plain += count
        else:
            self._take_over(tag, reads, view, range(count), timeout_ns)

    def prepare_read(
        self, tag: int, chain: ChainId, chunk: ChunkId, into: Any, offset: int = 0, *, timeout_ns: int | None = None
    ) -> None:
        memory = memory_of(into, writable=True)
        self._begin(tag, chain, chunk, QuerySpec(QueryKind.READ, offset, memory.nbytes), memory, timeout_ns)

    def prepare_stat(self, tag: int, chain: ChainId, chunk: ChunkId, *, timeout_ns: int | None = None) -> None:
        self._begin(tag, chain, chunk, QuerySpec(QueryKind.STAT), None, timeout_ns)

    def prepare_last_chunk(
        self, tag: int, chain: ChainId, file: int, *, below: int = 1 << 32, timeout_ns: int | None = None
    ) -> None:
        """The last chunk of the file on this chain whose index is less than `below`, as a `ChunkEntry`; `MISSING` if
        there
        is none."""
        if not 0 < below <= 1 << 32:
            raise UsageError(f"below {below}: indices of chunks are from 0 to 2^32 - 1")
        self._begin(tag, chain, ChunkId(file, below - 1), QuerySpec(QueryKind.LAST), None, timeout_ns)

    def prepare_list(
        self, tag: int, chain: ChainId, file: int, *, start: int = 0, limit: int = MAX_PAGE,
        timeout_ns: int | None = None,
    ) -> None:  # fmt: skip
        """Chunks of the file on this chain from index `start` on, in order, as a tuple of `ChunkEntry`: `limit` at
        most,
        which is right as a whole."""
        _check_page(limit)
        self._begin(tag, chain, ChunkId(file, start), QuerySpec(QueryKind.LIST, 0, limit), None, timeout_ns)

    def prepare_list_all(
        self, tag: int, chain: ChainId, start: ChunkId, *, limit: int = MAX_PAGE, timeout_ns: int | None = None
    ) -> None:
        """Chunks of all files on this chain from `start` on, in order, `limit` at most, as a tuple of `ChunkEntry`.
        Each is
        right by itself; `held` is None where an update is under way, or the replica that answered has it damaged: ask
        for that chunk alone. Only with the node secret."""
        _check_page(limit)
        self._begin(tag, chain, start, QuerySpec(QueryKind.CHAIN, 0, limit), None, timeout_ns)

    def prepare_write(
        self, tag: int, chain: ChainId, chunk: ChunkId, data: Any, offset: int = 0, *, timeout_ns: int | None = None
    ) -> None:
        memory = memory_of(data, writable=False)
        self._begin(tag, chain, chunk, change_of(memory, offset), memory, timeout_ns)

    def prepare_truncate(
        self, tag: int, chain: ChainId, chunk: ChunkId, length: int, *, timeout_ns: int | None = None
    ) -> None:
        self._begin(tag, chain, chunk, Change(Operation.TRUNCATE, 0, length), None, timeout_ns)

    def prepare_remove(self, tag: int, chain: ChainId, chunk: ChunkId, *, timeout_ns: int | None = None) -> None:
        self._begin(tag, chain, chunk, Change(Operation.REMOVE), None, timeout_ns)

    def submit(self) -> None:
        """Sends what was prepared; `wait` does it too."""
        self.check_process()
        self._dispatch.ring.submit()

    # --- wait ---

    def wait(self, least: int = 1, timeout_ns: int = -1) -> Completed:
        """Wait for at least so many operations, fewer when `timeout_ns` has passed or so many are not under way."""
        self.check_process()
        self._dispatch.ring.submit()
        least = min(least, self.under_way)
        until_ns = time.monotonic_ns() + timeout_ns if timeout_ns >= 0 else None
        while True:
            self._deliver()
            now_ns = time.monotonic_ns()
            self._check_times(now_ns)
            expired = until_ns is not None and now_ns >= until_ns
            self._turn(0 if expired else least - self._count, now_ns, until_ns)
            if expired or self._count >= least:
                return self._collect()

    def _turn(self, least: int, now_ns: int, until_ns: int | None) -> None:
        """Waits once, and takes what has come."""
        dispatch = self._dispatch
        limit_ns = _LONGEST_WAIT_NS if least > 0 else 0
        for end_ns in (dispatch.due_ns, until_ns):
            if end_ns is not None:
                limit_ns = min(limit_ns, max(0, end_ns - now_ns))
        if limit_ns and (self._background.expected or not dispatch.ring.under_way):
            self._poll.poll(limit_ns / MS)
            limit_ns = 0
        completions = dispatch.ring.wait(max(0, least) if limit_ns else 0, limit_ns)
        dispatch.take(completions)
        for completion in completions:
            if completion[0] == "reads":
                self._take_plain(np.frombuffer(completion[1], dtype=ANSWER))
        dispatch.flush()

    def _collect(self) -> Completed:
        plain = self._over_plain
        tags, counts = [one for one, _ in plain], [one for _, one in plain]
        if self._over or not plain:
            tags.append(np.array([one for one, _ in self._over], dtype=np.uint64))
            counts.append(np.array([one for _, one in self._over], dtype=np.int64))
        whole = Completed(
            tags[0] if len(tags) == 1 else np.concatenate(tags),
            counts[0] if len(counts) == 1 else np.concatenate(counts), self._values, self._errors,
        )  # fmt: skip
        self._over, self._over_plain, self._count, self._values, self._errors = [], [], 0, {}, {}
        return whole

    # --- plain reads ---

    def _take_plain(self, answers: Any) -> None:
        status, tags = answers["status"], answers["tag"]
        found = status == ReadStatus.FOUND
        odd = None
        if not found.all():
            missing = status == ReadStatus.MISSING
            odd = answers[~(found | missing)]
            counts = np.where(found, answers["length"].astype(np.int64), MISSING)
            if len(odd):
                kept = found | missing
                self._over_plain.append((tags[kept], counts[kept]))
            else:
                self._over_plain.append((tags, counts))
        else:
            self._over_plain.append((tags, answers["length"].astype(np.int64)))
        self._count += len(self._over_plain[-1][0])
        self._plain -= len(answers)
        again = [] if odd is None else odd["tag"].tolist()
        for batch in self._batches:
            at = tags - np.uint64(batch.tag)  # what is below the first one becomes very large
            mine = at[at < len(batch.reads)]
            batch.open[mine] = False
            batch.left -= len(mine)
        for tag in again:
            batch = next(one for one in self._batches if 0 <= tag - one.tag < len(one.reads))
            self._take_over(batch.tag, batch.reads, batch.memory, [tag - batch.tag], None)
        self._batches = [one for one in self._batches if one.left]

    def _take_over(
        self, tag: int, reads: Reads, memory: memoryview, which: Sequence[int], timeout_ns: int | None
    ) -> None:
        """The machine reads these."""
        for at in which:
            one = reads[at]
            begin, length = int(one["at"]), int(one["length"])
            chunk = ChunkId(int(one["file"]), int(one["index"]))
            what = QuerySpec(QueryKind.READ, int(one["offset"]), length)
            self._begin(tag + at, int(one["chain"]), chunk, what, memory[begin : begin + length], timeout_ns)

    def _check_times(self, now_ns: int) -> None:
        due_ns = self._dispatch.due_ns
        if due_ns is not None and due_ns <= now_ns:
            self._dispatch.tick()
        if self._batches and now_ns > self._batches[0].late_ns:
            batch = self._batches.pop(0)
            late = [at for at in np.flatnonzero(batch.open).tolist() if self._dispatch.ring.cancel(batch.first + at)]
            self._plain -= len(late)
            batch.left -= len(late)
            if batch.left:  # those have been answered, and come with the next completions
                batch.late_ns = now_ns + self._options.limits.attempt_ns
                self._batches.append(batch)
            self._take_over(batch.tag, batch.reads, batch.memory, late, None)

    # --- for those who build on it ---

    def begin(
        self, chain: ChainId, chunk: ChunkId, what: Change | QuerySpec, memory: memoryview | None,
        done: Callable[[Any], None], timeout_ns: int | None = None,
    ) -> int:  # fmt: skip
        """The number of an operation that goes out with the next `send`; `done` has its result, as the machine says it
        (`core.requests.effects.Finish`), perhaps at once. It has no tag, and `wait` does not count it."""
        self.check_process()
        if self._closed:
            raise Aborted("this ring is closed")
        limit_ns = self._options.timeout_ns if timeout_ns is None else timeout_ns
        return self._dispatch.begin(chain, chunk, what, memory, limit_ns, done)

    def send(self) -> None:
        self._dispatch.flush()

    def give_up(self, operation: int) -> None:
        """Give up an operation: its memory is not touched any more, and `done` is not called."""
        self._dispatch.give_up(operation)

    def present(self, right: Right, capability: bytes, presented: Callable[[FireflyerError | None], None]) -> None:
        """Present a capability to all nodes, on all connections from now on."""
        self._dispatch.present(right, capability, presented)

    def forget(self, right: Right) -> None:
        self._dispatch.forget(right)

    def until_ready(self, limit_ns: int) -> None:
        """Waits until `take` has something to do. It touches nothing: other threads may use the ring meanwhile."""
        due_ns = self._dispatch.due_ns
        if due_ns is not None:
            limit_ns = min(limit_ns, max(0, due_ns - time.monotonic_ns()))
        poll = select.poll()  # one that is in use refuses another thread
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        poll.poll(limit_ns / MS)

    def take(self, least: int = 0, limit_ns: int = 0) -> Completed | None:
        """Take what has come; with `least`, waits about so long for so many. None: nothing that has a tag."""
        self._deliver()
        now_ns = time.monotonic_ns()
        self._turn(least, now_ns, now_ns + limit_ns)
        self._check_times(time.monotonic_ns())
        return self._collect() if self._count else None

    # --- the machine ---

    def _begin(
        self, tag: int, chain: ChainId, chunk: ChunkId, what: Change | QuerySpec, memory: memoryview | None,
        timeout_ns: int | None,
    ) -> None:  # fmt: skip
        self.check_process()
        if self._closed:
            raise Aborted("this ring is closed")
        limit_ns = self._options.timeout_ns if timeout_ns is None else timeout_ns
        self._dispatch.begin(chain, chunk, what, memory, limit_ns, self._ended(tag, what))

    def _ended(self, tag: int, what: Change | QuerySpec) -> Callable[[Any], None]:
        def take(result: Any) -> None:
            count = 0
            if isinstance(result, DataArrived):
                count = result.length
            elif isinstance(result, Failed):
                count, self._errors[tag] = FAILED, error_from_wire(result.code, result.message)
            elif isinstance(result, Done):
                self._values[tag] = result
            elif isinstance(result, Found) and (value := _value(what, result.entries)) is not None:
                self._values[tag] = value
            else:
                count = MISSING
            self._over.append((tag, count))
            self._count += 1

        return take

    def _deliver(self) -> None:
        self._background.deliver(self)
        if self._dispatch.changed:
            self._dispatch.changed = False
            self._selector = ReplicaSelector(self.routing, self._dispatch.servers())

    def learned(self, routing: Routing) -> None:
        super().learned(routing)
        self._dispatch.warm()

    def warm(self, timeout_ns: int) -> None:
        """Waits until routing is known and every node is connected, or cannot be."""
        until_ns = time.monotonic_ns() + timeout_ns
        while (not self.routing.version or self._background.expected) and time.monotonic_ns() < until_ns:
            self._poll.poll(max(0, until_ns - time.monotonic_ns()) / MS)
            self._deliver()

    def acquire(self, first_file: int, last_file: int, rights: int) -> None:
        """Asks the manager for the right to these files, presents it to all nodes, and renews it from then on, in calls
        of `wait`. Clients with the node secret need none. Raises `PermissionDenied`."""
        self.check_process()
        right, attempt, background = Right(first_file, last_file, rights), 0, self._background
        while True:
            client, answer = self.client, background.call(background.control.rights.ask(right, attempt))
            error = self._presented(right, answer.capability)
            attempt += 1
            if attempt == ATTEMPTS or not (client != self.client or isinstance(error, PermissionDenied)):
                break
        if error is not None:
            self._dispatch.forget(right)
            raise error
        background.keep_right(right, answer.expires_unix_s)

    def _presented(self, right: Right, capability: bytes) -> FireflyerError | None:
        presented: list[FireflyerError | None] = []
        self._dispatch.present(right, capability, presented.append)
        self._dispatch.flush()
        while not presented:
            self._deliver()
            self._turn(0 if presented else 1, time.monotonic_ns(), None)
        return presented[0]

    def close(self) -> None:
        """Ends the session; idempotent, and nothing in a forked child. What is under way is given up; updates of it may
        have been done."""
        if not self._closed and not self.elsewhere:
            self._closed = True
            self._dispatch.close()
            self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_page(limit: int) -> None:
    if not 0 < limit <= MAX_PAGE:
        raise UsageError(f"limit {limit}; list 1 to {MAX_PAGE} chunks at a time, and continue after the last of them")


def _value(what: Change | QuerySpec, entries: tuple[ChunkEntry, ...]) -> Value | None:
    """None: there is no such chunk."""
    kind = what.kind if isinstance(what, QuerySpec) else None
    if kind in (QueryKind.LIST, QueryKind.CHAIN):
        return entries
    return next((one if kind is QueryKind.LAST else one.held for one in entries), None)
