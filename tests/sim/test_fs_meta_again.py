"""Each kind of request, with a fault at each of its steps: what comes of it is what comes of it without one.

A step is a transaction or a use of chunks. Before each of them, one after the other: the service dies; the commit that
follows is lost, or done and not answered, or in conflict; the same request comes again, at the other service. The
client asks until it has its answer, and once more behind it, of both services.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import pytest
from tests.support.fs.meta_sim.chaos import begin, check_store, quiet
from tests.support.fs.meta_sim.chunks import CELL_BYTES, CHAINS, CHUNK_BYTES
from tests.support.fs.meta_sim.steps import drive
from tests.support.fs.meta_sim.workload import MetaClient
from tests.support.fs.meta_sim.world import MetaService, MetaWorld

from fireflyer.base.units import SECOND
from fireflyer.fs.core.meta import tables
from fireflyer.fs.core.meta.inodes.layout import chain_of, order_of
from fireflyer.fs.schema import meta
from fireflyer.fs.schema.inodes import ROOT, Defaults, DirectoryDetails, FileDetails, Inode, Kind
from fireflyer.fs.schema.meta import Answer, Call, Calls, ErrorReply, OpenFlag, PathRef, Request
from fireflyer.kvstore.memory import CommitFault
from fireflyer.sim import SimCrash

WRITING: Final = OpenFlag.READ | OpenFlag.WRITE | OpenFlag.CREATE
MINE: Final = 1
"""The handle that the client has open on d/open, with 9 cells that it has not reported."""
CELLS: Final = 9
STEPS: Final = 40
"""More than any request has."""


def at(path: str) -> PathRef:
    return PathRef(ROOT, path.encode())


PREPARED: Final[tuple[Request, ...]] = (
    meta.MakeDirectory(at("d/full")),
    meta.MakeDirectory(at("d/full/inner")),
    meta.MakeNode(at("d/full/file"), Kind.FILE),
    meta.MakeDirectory(at("d/empty")),
    meta.MakeDirectory(at("d/kept")),
    meta.SetDefaults(at("d/kept"), Defaults(trash_s=1000)),
    meta.MakeNode(at("d/kept/file"), Kind.FILE),
    meta.MakeNode(at("d/file"), Kind.FILE),
    meta.MakeNode(at("q/file"), Kind.FILE),
    meta.SetXattr(at("d/file"), b"user.a", b"1"),
    meta.Open(at("d/open"), WRITING, MINE),
)

Asks = Callable[[int], Request]
"""Given the number of the inode of d/open."""
KINDS: Final[dict[str, Asks]] = {
    "create": lambda _: meta.Open(at("d/new"), WRITING | OpenFlag.EXCLUSIVE, 2),
    "open to truncate": lambda _: meta.Open(at("d/open"), OpenFlag.WRITE | OpenFlag.TRUNCATE, 2),
    "report": lambda inode: meta.Report(inode, MINE, CELLS * CELL_BYTES, 0),
    "report after a cut": lambda inode: meta.Report(inode, MINE, 0, 7),
    "close": lambda inode: meta.Close(inode, MINE, CELLS * CELL_BYTES, 0),
    "close after a cut": lambda inode: meta.Close(inode, MINE, 0, 7),
    "reserve": lambda inode: meta.Reserve(inode, MINE, 3 * CELL_BYTES),
    "truncate": lambda inode: meta.Truncate(PathRef(inode), 2 * CELL_BYTES, MINE),
    "truncate by name": lambda _: meta.Truncate(at("d/open"), 0),
    "make longer": lambda inode: meta.Truncate(PathRef(inode), 50 * CELL_BYTES, MINE),
    "allocate": lambda inode: meta.Allocate(inode, MINE, meta.AllocateMode.DEFAULT, 0, 20 * CELL_BYTES),
    "punch": lambda inode: meta.Allocate(inode, MINE, meta.AllocateMode.PUNCH_HOLE, CELL_BYTES, 6 * CELL_BYTES),
    "zero": lambda inode: meta.Allocate(inode, MINE, meta.AllocateMode.ZERO_RANGE, CELL_BYTES, 12 * CELL_BYTES),
    "make directory": lambda _: meta.MakeDirectory(at("q/new")),
    "make node": lambda _: meta.MakeNode(at("q/new"), Kind.FIFO),
    "symlink": lambda _: meta.Symlink(at("q/new"), b"target"),
    "link": lambda _: meta.Link(at("d/file"), at("d/empty/link")),
    "remove": lambda _: meta.Remove(at("q/file")),
    "remove what is open": lambda _: meta.Remove(at("d/open")),
    "remove to the trash": lambda _: meta.Remove(at("d/kept/file")),
    "remove directory": lambda _: meta.RemoveDirectory(at("d/empty")),
    "remove tree": lambda _: meta.RemoveTree(at("d/full")),
    "remove some of a tree": lambda _: meta.RemoveTree(at("d/full"), 1),
    "tree to the trash": lambda _: meta.RemoveTree(at("d/kept")),
    "rename": lambda _: meta.Rename(at("d/full"), at("d/empty")),
    "rename over what is open": lambda _: meta.Rename(at("d/file"), at("d/open")),
    "exchange": lambda _: meta.Rename(at("d/full"), at("d/file"), meta.RenameFlag.EXCHANGE),
    "set attributes": lambda _: meta.SetAttributes(at("d/file"), mode=0o4711, uid=5, mtime_ns=77),
    "set value": lambda _: meta.SetXattr(at("d/file"), b"user.b", b"2", meta.XattrFlag.CREATE),
    "remove value": lambda _: meta.RemoveXattr(at("d/file"), b"user.a"),
    "lock": lambda inode: meta.Lock(inode, meta.Window.RANGE, 1, meta.LockKind.WRITE, 5, 50),
    "beat": lambda inode: meta.ClientHeartbeat(1000, (inode,)),
    "set area": lambda _: meta.SetQuota(at("d/full"), bytes=1 << 30, inodes=3),
    "set defaults": lambda _: meta.SetDefaults(at("d"), Defaults(chunk_bytes=CHUNK_BYTES, stripe=1)),
    "refused": lambda _: meta.MakeDirectory(at("d/file")),
    "refused after long": lambda _: meta.Truncate(at("q/file"), 1000 * CELL_BYTES),
}  # fmt: skip
REFUSED: Final = {"refused": errno.EEXIST, "refused after long": errno.EDQUOT}


def test_every_request_that_changes_something_is_here() -> None:
    assert {type(ask(5)) for ask in KINDS.values()} == {meta.Open, *get_args(meta.Changing)}


Fault = Callable[["Play", MetaService], None]


def dies(_: Play, service: MetaService) -> None:
    service.crash()
    raise SimCrash


def commit(fault: CommitFault) -> Fault:
    return lambda play, _: play.world.next_faults.append(fault)


def comes_again(play: Play, service: MetaService) -> None:
    (other,) = [one for one in play.world.services if one is not service]
    play.client.send_again(play.request, play.number, other.name)


FAULTS: Final[dict[str, Fault]] = {
    "dies": dies,
    "commit is lost": commit(CommitFault.UNKNOWN_LOST),
    "commit is done": commit(CommitFault.UNKNOWN_DONE),
    "commit conflicts": commit(CommitFault.CONFLICT),
    "comes again": comes_again,
}


@dataclass(slots=True)
class Play:
    """One request in a world of its own, with this fault before its `step`th step (from 0)."""

    kind: str
    fault: Fault | None = None
    step: int = 0
    world: MetaWorld = field(init=False)
    client: MetaClient = field(init=False)
    request: Request = field(init=False)
    number: int = 0
    """Of the request."""
    steps: int = 0
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = MetaWorld(1)
        begin(self.world)
        self.client = MetaClient(self.world, "c", busy=False)
        self._run(self._prepare)
        self.world.before_step = self._before_step
        self._run(self._ask)
        self.world.before_step = lambda *_: None

    def _run(self, work: Callable[[], Any], limit_s: int = 200) -> None:
        over: list[bool] = []

        async def all_of_it() -> None:
            await work()
            over.append(True)

        drive(self.client.node, all_of_it)
        self.world.sim.run(until_ns=self.world.sim.now_ns + limit_s * SECOND, stop=lambda: bool(over))
        assert over, "it did not come to an end"

    async def _prepare(self) -> None:
        answer: Answer | None = None
        for one in PREPARED:
            answer = await self.client.ask(one)
            assert not isinstance(answer, ErrorReply), answer
        assert isinstance(answer, meta.Opened)
        body = answer.inode.body
        assert isinstance(body, FileDetails)
        for index in range(-(-CELLS * CELL_BYTES // CHUNK_BYTES)):
            cells = min(CELLS - index * CHUNK_BYTES // CELL_BYTES, CHUNK_BYTES // CELL_BYTES)
            chain = chain_of(order_of(body.layout, CHAINS), index)
            await self.client.chunks.write(answer.inode.id, chain, index, 0, [1 + index] * cells)
        if self.kind not in ("report", "close"):
            await self.client.ask(meta.Report(answer.inode.id, MINE, CELLS * CELL_BYTES, 0))
        self.request = KINDS[self.kind](answer.inode.id)

    async def _ask(self) -> None:
        self.number = self.client.last_number + 1
        self.answers.append(await self.client.ask(self.request))
        for service in self.world.services:
            answer = None
            while answer is None or (isinstance(answer, ErrorReply) and answer.errno == 0):
                answer = await self.client.send_again(self.request, self.number, service.name).wait(SECOND)
            self.answers.append(answer)

    def _before_step(self, service: MetaService, calls: Calls, call: Call) -> None:
        if (calls.client, call.number, call.request) != (self.client.client, self.number, self.request):
            return
        self.steps += 1
        if self.fault is not None and self.steps == self.step + 1:
            self.fault(self, service)

    # --- what came of it ---

    def outcome(self) -> dict[str, Any]:
        rows = dict(self.world.items())
        inodes = {key: tables.decode_inode(key, value) for key, value in rows.items() if key[:2] == tables.INODES}
        by_id = {inode.id: inode for inode in inodes.values()}
        paths = dict(self._walk(rows, by_id, ROOT, ""))
        ids = {inode.id: path for path, inode in paths.items()}
        found: dict[str, Any] = {path: self._shown(inode) for path, inode in paths.items()}
        for key, value in rows.items():
            table, number = key[:2], int.from_bytes(key[2:10], "big")
            if table in (tables.WRITERS, tables.LOCKS, tables.HOLDS, tables.VALUES, tables.AREAS):
                name = f"{table.decode()} {ids.get(number, 'no name')} {key[10:].hex()}"
                found[name] = value if table != tables.AREAS else self._area(key, value)
        found["in the trash"] = sum(key[:2] == tables.TRASH for key in rows)
        found["answer"] = type(self.answers[0]), getattr(self.answers[0], "errno", 0)
        return found

    def _walk(
        self, rows: dict[bytes, bytes], by_id: dict[int, Inode], directory: int, path: str
    ) -> Iterator[tuple[str, Inode]]:
        yield path, by_id[directory]
        for key in sorted(key for key in rows if key.startswith(tables.ENTRIES + directory.to_bytes(8, "big"))):
            name = key[tables.ENTRY_PREFIX_BYTES :].decode()
            child = tables.decode_entry(key, rows[key]).id
            if isinstance(by_id[child].body, DirectoryDetails):
                yield from self._walk(rows, by_id, child, f"{path}/{name}")
            else:
                yield f"{path}/{name}", by_id[child]

    def _shown(self, inode: Inode) -> tuple[Any, ...]:
        body = inode.body
        content: tuple[Any, ...] | None = None
        if isinstance(body, FileDetails):
            content = body.length, body.layout.chunk_bytes, body.layout.stripe, self.world.chunks.of(inode.id)
        elif isinstance(body, DirectoryDetails):
            content = body.entries, body.subdirectories, body.defaults, bool(inode.quota_tree)
        return inode.kind, inode.mode, inode.uid, inode.gid, inode.links, content

    def _area(self, key: bytes, value: bytes) -> tuple[Any, ...]:
        row = tables.AREA_ROWS.decode(key, value)
        return row.bytes, row.inodes

    def end(self) -> None:
        """All is closed and collected, and the store is right."""
        self.client.crash()
        self.client.stay_away = True
        quiet(self.world, [])
        check_store(self.world)


def check(kind: str, faults: list[str]) -> int:
    """How many faults there were."""
    plain = Play(kind)
    wanted = plain.outcome()
    plain.end()
    assert wanted["answer"][1] == REFUSED.get(kind, 0)
    count = 0
    for name in faults:
        for step in itertools.count():
            assert step < STEPS
            play = Play(kind, FAULTS[name], step)
            if play.steps <= step:
                break  # there is no such step
            count += 1
            where = f"{kind}, {name} before step {step}"
            assert play.outcome() == wanted, where
            assert play.answers[1:] == play.answers[:1] * 2, where
            play.end()
    return count


QUICK: Final = ("close", "truncate", "remove to the trash", "rename over what is open", "refused")


@pytest.mark.parametrize("kind", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in KINDS])
def test_a_fault_at_any_step_changes_nothing(kind: str) -> None:
    assert check(kind, ["dies", "comes again"]) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_of_unknown_outcome_at_any_step_changes_nothing(kind: str) -> None:
    assert check(kind, ["commit is lost", "commit is done", "commit conflicts"]) >= 3
