"""A meta service in the test's process: sessions are rows that the test writes, chunks are played in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self, TypeVar

from tests.support.fs.clusters.names import at

from fireflyer.base.errors import NotFound, StaleVersion
from fireflyer.base.units import SECOND
from fireflyer.fs.core.rows import SESSIONS, STATE_KEY, TABLES, SessionRow, StateRow
from fireflyer.fs.schema.inodes import ROOT
from fireflyer.fs.schema.meta import (
    Actor,
    Answer,
    Call,
    Calls,
    Found,
    MakeDirectory,
    Open,
    Opened,
    OpenFlag,
    PathRef,
    Request,
    SetAttributes,
)
from fireflyer.fs.schema.routing import ChainTable
from fireflyer.fs.service.meta.cluster_view import ClusterView
from fireflyer.fs.service.meta.config import MetaSettings
from fireflyer.fs.service.meta.group_commit import Later, in_loop
from fireflyer.fs.service.meta.requests import is_changing
from fireflyer.fs.service.meta.service import MetaService
from fireflyer.fs.service.rights import FS_ADMIN
from fireflyer.identity import Account, NodeCredential, Secret, new_secret
from fireflyer.kvstore import Engine, Transaction
from fireflyer.kvstore.core.rows import encode_row
from fireflyer.runtime.rpc import Caller

__all__ = ["ADA", "CHAINS", "CREATE", "EVE", "SERVICE", "FakeChunks", "MetaRig", "expect", "two_users", "user"]

CHAINS = (1, 2, 3, 4)
SERVICE = Caller("node", "test", "127.0.0.1:1", 1)
ADA = Account("ada", 1001, 1001, (50,))
EVE = Account("eve", 1002, 1002)
CREATE = OpenFlag.WRITE | OpenFlag.READ | OpenFlag.CREATE
T = TypeVar("T")


def user(name: str) -> Caller:
    return Caller("user", name, "127.0.0.1:2", 2)


def expect(answer: Answer, kind: type[T]) -> T:
    assert isinstance(answer, kind), answer
    return answer


class FakeChunks:
    """The chunk store of a session. Lengths only."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.lengths: dict[tuple[int, int, int], int] = {}
        """Of file, chain, index."""

    def chains(self, table: int) -> Sequence[int]:
        if table != 1:
            raise NotFound(f"there is no chain table {table}")
        return CHAINS

    async def last(self, file: int, chains: Sequence[int]) -> Sequence[tuple[int, int] | None]:
        return [max(self._of(file, chain), default=None) for chain in chains]

    async def list(self, chain: int, file: int, start: int, limit: int) -> Sequence[tuple[int, int]]:
        return sorted(one for one in self._of(file, chain) if one[0] >= start)[:limit]

    def _of(self, file: int, chain: int) -> Sequence[tuple[int, int]]:
        return [(key[2], length) for key, length in self.lengths.items() if key[:2] == (file, chain)]

    async def remove(self, file: int, chunks: Sequence[tuple[int, int]], *, session: int) -> None:
        self._check(session)
        for chain, index in chunks:
            self.lengths.pop((file, chain, index), None)

    async def truncate(self, file: int, chain: int, index: int, length: int, *, session: int) -> None:
        self._check(session)
        if self.lengths.get((file, chain, index), 0) > length:
            self.lengths[file, chain, index] = length

    async def write_zeros(self, file: int, chain: int, index: int, offset: int, size: int, *, session: int) -> None:
        self._check(session)

    def _check(self, session: int) -> None:
        if session not in (0, self.session):
            raise StaleVersion(f"the update is for session {session}, and this is {self.session}")

    async def close(self) -> None: ...


class _FakeClusterView(ClusterView):
    def __init__(self, secret: Secret, chunks: FakeChunks) -> None:
        async def managers() -> Sequence[str]:
            return ()

        async def open_chunks(*_: object) -> FakeChunks:
            return chunks

        super().__init__(NodeCredential(secret, "test"), managers, open_chunks)
        self.chunk_session = chunks


class MetaRig:
    """`async with`: the service has started. Several over one engine are several services."""

    def __init__(
        self,
        engine: Engine,
        settings: MetaSettings | None = None,
        *,
        accounts: Sequence[Account] = (),
        shared_store: bool = False,
        secret: Secret | None = None,
        chunks: FakeChunks | None = None,
        later: Later = in_loop,
    ) -> None:
        self.engine = engine
        self.secret = secret or new_secret()
        self.accounts = {one.name: one for one in accounts}
        self.chunks = chunks or FakeChunks(1000)
        self.service = MetaService(
            engine,
            settings or MetaSettings(trusted_root=True),
            self.secret,
            cluster_view=_FakeClusterView(self.secret, self.chunks),
            shared_store=shared_store,
            later=later,
        )
        self.numbers: dict[int, int] = {}

    async def __aenter__(self) -> Self:
        async def cluster(tx: Transaction) -> None:
            tx.set(TABLES.key(1), encode_row(ChainTable(1, CHAINS)))
            tx.set(STATE_KEY, encode_row(StateRow(1, 6 * SECOND, 1, 1)))

        await self.engine.transact(cluster)
        await self.open_session(self.chunks.session)
        await self.service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.close()

    async def open_session(self, client: int, user_name: str = "") -> int:
        async def body(tx: Transaction) -> None:
            tx.set(SESSIONS.key(client), encode_row(SessionRow(client, user_name, f"nonce {client}")))

        await self.engine.transact(body)
        return client

    async def end_session(self, client: int) -> None:
        async def body(tx: Transaction) -> None:
            tx.clear(SESSIONS.key(client))

        await self.engine.transact(body)

    async def rows(self, prefix: bytes) -> Sequence[bytes]:
        """Keys of the store that begin so, 1000 at most."""

        async def body(tx: Transaction) -> Sequence[bytes]:
            page = await tx.get_range(prefix, prefix + b"\xff" * 16, limit=1000)
            return [key for key, _ in page.items]

        return await self.engine.transact(body)

    async def ask(
        self, client: int, request: Request, caller: Caller = SERVICE, *, actor: Actor | None = None, number: int = 0
    ) -> Answer:
        """`number`: another than the client's next one."""
        return (await self.ask_all(client, [request], caller, actor=actor, number=number))[0]

    async def ask_all(
        self,
        client: int,
        requests: Sequence[Request],
        caller: Caller = SERVICE,
        *,
        actor: Actor | None = None,
        number: int = 0,
    ) -> tuple[Answer, ...]:
        done_below = number or self.numbers.get(client, 0) + 1
        calls = []
        for request in requests:
            if is_changing(request) and not number:
                self.numbers[client] = self.numbers.get(client, 0) + 1
            given = number or self.numbers.get(client, 0)
            calls.append(Call(request, given if is_changing(request) else 0, actor))
        if caller.role == "user":  # as the handshake would have found it
            roles = (FS_ADMIN,) if caller.identity == "admin" else ()
            caller = dataclasses.replace(caller, account=self.accounts.get(caller.identity), roles=roles)
        return (await self.service.serve(Calls(client, done_below, tuple(calls)), caller)).answers


async def two_users(rig: MetaRig) -> None:
    """Client 7 is Ada's, 8 Eve's, 5 a service's. "/a" is Ada's own, with file "f", which handle 1 has open."""
    await rig.open_session(5)
    await rig.open_session(7, "ada")
    await rig.open_session(8, "eve")
    await rig.ask(5, SetAttributes(PathRef(ROOT), mode=0o777))
    expect(await rig.ask(7, MakeDirectory(at("a"), 0o700), user("ada")), Found)
    expect(await rig.ask(7, Open(at("a/f"), CREATE, 1, 0o600), user("ada")), Opened)
