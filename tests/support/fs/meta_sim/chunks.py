"""A chunk store for the simulation of the meta service, as 0025 and 0027 promise it, played in memory.

Chunks are lists of cells, each with the tag of who wrote it. An update arrives late at times, also after its sender has
given it up: until a later update of the same sender to the same chunk is done, or the store has learnt that the
sender's session is over. Chains stop for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from tests.support.fs.meta_sim.steps import Gate, sleep

from fireflyer.base.errors import Aborted, StaleVersion, Timeout
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.schema.ids import ChainId, ClientId
from fireflyer.sim import World

__all__ = ["CELLS", "CELL_BYTES", "CHAINS", "CHUNK_BYTES", "ChunkClient", "ChunkStore"]

CELL_BYTES: Final = 16384
CELLS: Final = 4
"""Of a chunk."""
CHUNK_BYTES: Final = CELLS * CELL_BYTES
CHAINS: Final = (11, 12, 13, 14)
GIVEN_UP_NS: Final = 400 * MS
LATE_NS: Final = 4 * SECOND

Key = tuple[ChainId, int, int]
Cells = list[int]
Change = Callable[[Cells | None], Cells | None]
T = TypeVar("T")


class ChunkStore:
    def __init__(self, world: World) -> None:
        self.world = world
        self.chunks: dict[Key, Cells] = {}
        self.over: dict[ClientId, None] = {}
        """Sessions whose end the storage nodes know."""
        self.late = 0.0
        """The chance of an update to arrive late."""
        self.down_until_ns = dict.fromkeys(CHAINS, 0)
        self.random = world.fork_random("chunks")
        self._sent = 0
        self._done: dict[tuple[ClientId, Key], int] = {}

    def send(self, session: ClientId, key: Key, change: Change) -> Gate[str]:
        """The gate opens with "" or with why it was refused."""
        self._sent += 1
        number, gate = self._sent, Gate[str]()
        delay_ns = self.random.randrange(4 * MS)
        if self.random.random() < self.late:
            delay_ns += self.random.randrange(LATE_NS)

        def arrive() -> None:
            if session in self.over:
                gate.open("ended")
            elif self.world.now_ns < self.down_until_ns[key[0]]:
                self.world.call_at(self.down_until_ns[key[0]] + self.random.randrange(50 * MS), arrive)
            elif number > self._done.get((session, key), 0):
                self._done[session, key] = number
                after = change(self.chunks.get(key))
                self.world.record("chunk", *key, -1 if after is None else len(after))
                if after is None:
                    self.chunks.pop(key, None)
                else:
                    self.chunks[key] = after
                self.world.call_after(self.random.randrange(2 * MS), lambda: gate.open(""))

        self.world.call_after(delay_ns, arrive)
        return gate

    def of(self, file: int) -> dict[int, Cells]:
        """The chunks of the file by index."""
        return {key[2]: cells for key, cells in sorted(self.chunks.items()) if key[1] == file}


class ChunkClient:
    """`core.meta.ports.ChunkPort`; clients use it too."""

    def __init__(self, store: ChunkStore, session: Callable[[], ClientId], *, exchanges: bool = False) -> None:
        """`session`: the present one; 0: it is being exchanged. `exchanges`: what could not be sent by a session is
        sent by the next one, as the machine of requests does it."""
        self._store, self._session, self._exchanges = store, session, exchanges

    def chains(self, table: int) -> Sequence[ChainId]:
        assert table == 1
        return CHAINS

    async def last(self, file: int, chains: Sequence[ChainId]) -> Sequence[tuple[int, int] | None]:
        found: list[tuple[int, int] | None] = []
        for chain in chains:
            listed = await self.list(chain, file, 0, 1 << 32)
            found.append(listed[-1] if listed else None)
        return found

    async def list(self, chain: ChainId, file: int, start: int, limit: int) -> Sequence[tuple[int, int]]:
        await self._look(chain)
        found = sorted(key[2] for key in self._store.chunks if key[:2] == (chain, file) and key[2] >= start)
        return [(index, CELL_BYTES * len(self._store.chunks[chain, file, index])) for index in found[:limit]]

    async def read(self, chain: ChainId, file: int, index: int) -> Cells:
        await self._look(chain)
        return list(self._store.chunks.get((chain, file, index), ()))

    async def remove(self, file: int, chunks: Sequence[tuple[ChainId, int]], *, session: ClientId = 0) -> None:
        await self._update([(chain, file, index) for chain, index in chunks], lambda _: None, session)

    async def truncate(self, file: int, chain: ChainId, index: int, length: int, *, session: ClientId) -> None:
        count, rest = divmod(length, CELL_BYTES)
        assert not rest
        await self._update([(chain, file, index)], lambda cells: ((cells or []) + [0] * count)[:count], session)

    async def write_zeros(
        self, file: int, chain: ChainId, index: int, offset: int, size: int, *, session: ClientId
    ) -> None:
        tags = [0] * (size // CELL_BYTES)
        await self.write(file, chain, index, offset // CELL_BYTES, tags, session=session)

    async def write(
        self, file: int, chain: ChainId, index: int, first: int, tags: Sequence[int], *, session: ClientId = 0
    ) -> None:
        def change(cells: Cells | None) -> Cells:
            grown = (cells or []) + [0] * max(0, first + len(tags) - len(cells or []))
            return [*grown[:first], *tags, *grown[first + len(tags) :]]

        await self._update([(chain, file, index)], change, session)

    async def _update(self, keys: Sequence[Key], change: Change, session: ClientId) -> None:
        while keys:
            present = await self._turn(session)
            gates = [self._store.send(present, key, change) for key in keys]
            refusals = [await gate.wait(GIVEN_UP_NS) for gate in gates]
            if None in refusals:
                raise Timeout("the chain did not answer; it may be done yet")
            keys = [key for key, refusal in zip(keys, refusals, strict=True) if refusal]
            if keys and not self._exchanges:
                raise Aborted("the session is over")
            while keys and self._session() == present:
                await sleep(10 * MS)

    async def _turn(self, session: ClientId) -> ClientId:
        """By which session it is sent."""
        while not (present := self._session()):
            self._check(session, present)
            await sleep(10 * MS)
        self._check(session, present)
        return present

    def _check(self, session: ClientId, present: ClientId) -> None:
        if session not in (0, present):
            raise StaleVersion("that session is over, and this update is for it alone")

    async def _look(self, chain: ChainId) -> None:
        store = self._store
        await sleep(store.random.randrange(2 * MS))
        if store.world.now_ns < store.down_until_ns[chain]:
            await sleep(GIVEN_UP_NS)
            raise Timeout("the chain did not answer")
