"""Virtual time, ordered events, nodes that crash and come back.

One `World` owns one clock, one random generator and one queue. An event is a call at an instant; events of the same
instant run in the order in which they were asked for, so a seed and a program give one history. Whatever happens is
written into the `Trace`; two runs with the same seed must have the same trace, byte for byte.

A `SimNode` is a process on a machine. Everything it has is bound to its *incarnation*: timers, tasks (generators that
advance one step per event) and message handlers of a dead incarnation never run again. `boot` is called at the first
start and at each restart, with nothing but the node: what survives is what the node finds on its disk.

Code on a node is crashed from inside by `SimCrash`, which no `except Exception` can swallow: the simulated disk raises
it at a fault point, and the world then marks the node dead.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Generator

from fireflyer.base.errors import InvariantViolation, UsageError
from fireflyer.base.units import MS

__all__ = ["SimClock", "SimCrash", "SimNode", "Timer", "Trace", "World"]

MAX_EVENTS = 10_000_000
"""A run that needs more is taken for a livelock."""


class SimCrash(BaseException):
    """The node on which this is raised is dead; only the world may catch it."""


class SimClock:
    """A node's monotonic clock: the world's time, shifted and drifting by what the test gave it."""

    def __init__(self, world: World, *, offset_ns: int = 0, drift_ppm: int = 0) -> None:
        self._world = world
        self._offset_ns = offset_ns
        self._drift_ppm = drift_ppm

    def now_ns(self) -> int:
        now_ns = self._world.now_ns
        return self._offset_ns + now_ns + now_ns * self._drift_ppm // 1_000_000


class Trace:
    """Record of events, a line each: `time kind field field …`. Fields: integers, text or bytes (shown as a hash)."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def add(self, now_ns: int, kind: str, *fields: object) -> None:
        self._lines.append(" ".join([str(now_ns), kind, *map(_shown, fields)]).encode())

    def to_bytes(self) -> bytes:
        return b"\n".join(self._lines) + b"\n"

    def __len__(self) -> int:
        return len(self._lines)


def _shown(field: object) -> str:
    if isinstance(field, bytes | bytearray | memoryview):
        return f"[{len(field)}:{hashlib.blake2b(field, digest_size=6).hexdigest()}]"
    if isinstance(field, bool | int | str):
        return str(field)
    raise UsageError(f"trace field {field!r} is neither int, str nor bytes")


class Timer:
    """A call that has not happened yet."""

    def __init__(self, due_ns: int, call: Callable[[], None]) -> None:
        self.due_ns = due_ns
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    @property
    def pending(self) -> bool:
        return self._call is not None

    def fire(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class World:
    """One seeded history. `random` is the only source of chance; take a child of it with `fork_random`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_ns = 0
        self.random = random.Random(seed)
        self.trace = Trace()
        self.nodes: dict[str, SimNode] = {}
        self._queue: list[tuple[int, int, Timer]] = []
        self._asked = 0

    def fork_random(self, name: str) -> random.Random:
        """A generator of its own for `name`: using it more often does not shift the chances of others."""
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "big"))

    def record(self, kind: str, *fields: object) -> None:
        self.trace.add(self.now_ns, kind, *fields)

    def call_at(self, due_ns: int, call: Callable[[], None]) -> Timer:
        """Calls in the past run at the present instant, after those already asked for."""
        timer = Timer(max(due_ns, self.now_ns), call)
        self._asked += 1
        heapq.heappush(self._queue, (timer.due_ns, self._asked, timer))
        return timer

    def call_after(self, delay_ns: int, call: Callable[[], None]) -> Timer:
        return self.call_at(self.now_ns + delay_ns, call)

    def node(self, name: str, boot: Callable[[SimNode], None], *, clock: SimClock | None = None) -> SimNode:
        """A new node, started at the present instant. Raises `UsageError` if the name is taken."""
        if name in self.nodes:
            raise UsageError(f"node {name!r} exists already; choose another name")
        node = self.nodes[name] = SimNode(self, name, boot, clock or SimClock(self))
        node.restart()
        return node

    def step(self) -> bool:
        """Runs the next event. False when none is left."""
        while self._queue:
            due_ns, _, timer = heapq.heappop(self._queue)
            if timer.pending:
                self.now_ns = due_ns
                timer.fire()
                return True
        return False

    def run(self, *, until_ns: int | None = None, stop: Callable[[], bool] | None = None) -> None:
        """Runs until nothing is left to do, or until `until_ns` or `stop()`. A livelock raises `InvariantViolation`."""
        for _ in range(MAX_EVENTS):
            if stop is not None and stop():
                return
            if until_ns is not None and (not self._queue or self._queue[0][0] > until_ns):
                self.now_ns = max(self.now_ns, until_ns)
                return
            if not self.step():
                return
        raise InvariantViolation(f"simulation with seed {self.seed} did not end within {MAX_EVENTS} events")


class SimNode:
    """A process that can be crashed and restarted. Made by `World.node`."""

    def __init__(self, world: World, name: str, boot: Callable[[SimNode], None], clock: SimClock) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.incarnation = 0
        self.alive = False
        self._boot = boot
        self._receive: Callable[[str, bytes], None] | None = None

    def restart(self) -> None:
        """Boots a fresh incarnation; a live one is crashed first."""
        if self.alive:
            self.crash()
        self.incarnation += 1
        self.alive = True
        self.world.record("boot", self.name, self.incarnation)
        self.guarded(lambda: self._boot(self))

    def crash(self) -> None:
        """Timers, tasks, handlers and all memory of this incarnation are gone."""
        if self.alive:
            self.alive = False
            self._receive = None
            self.world.record("crash", self.name, self.incarnation)

    def guarded(self, call: Callable[[], None]) -> None:
        """Runs code of this node; a `SimCrash` out of it kills the node."""
        try:
            call()
        except SimCrash:
            self.crash()

    def after(self, delay_ns: int, call: Callable[[], None]) -> Timer:
        incarnation = self.incarnation

        def fire() -> None:
            if self.alive and self.incarnation == incarnation:
                self.guarded(call)

        return self.world.call_after(delay_ns, fire)

    def spawn(
        self, task: Generator[int | None, None, None], *, done: Callable[[], None] | None = None, jitter_ns: int = MS
    ) -> None:
        """Runs a generator, one step per event. What it yields is a delay in nanoseconds, or None for a random one
        up to `jitter_ns`: other nodes run in between."""
        incarnation = self.incarnation

        def advance() -> None:
            try:
                delay_ns = next(task)
            except StopIteration:
                if done is not None:
                    done()
                return
            if self.incarnation == incarnation:
                self.after(self.world.random.randrange(jitter_ns) if delay_ns is None else delay_ns, advance)

        self.after(self.world.random.randrange(jitter_ns), advance)

    def on_message(self, receive: Callable[[str, bytes], None]) -> None:
        """`receive(source, payload)` for messages to this incarnation."""
        self._receive = receive

    def deliver(self, source: str, payload: bytes) -> bool:
        """Hands a message over; False when the node is dead or does not listen."""
        receive = self._receive
        if not self.alive or receive is None:
            return False
        self.guarded(lambda: receive(source, payload))
        return True

    def __repr__(self) -> str:
        return f"SimNode({self.name!r}, incarnation={self.incarnation}, alive={self.alive})"
