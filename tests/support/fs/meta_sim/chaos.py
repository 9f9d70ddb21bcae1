"""Clients and meta services under faults; then everything heals, all is closed and collected, and the store is checked.

At the end: the namespace is a tree with its links and entries counted and its areas exact; nothing is open, locked,
held, under way or unlinked; each chunk is a living file's and within its length; what files contain is what clients
were told.
"""

from __future__ import annotations

from typing import Final

from tests.support.fs.clusters.names import violations
from tests.support.fs.meta_sim.chunks import CELL_BYTES, CELLS, CHAINS, CHUNK_BYTES
from tests.support.fs.meta_sim.workload import DIRECTORIES, FILE_CELLS, PATHS, MetaClient
from tests.support.fs.meta_sim.world import MetaWorld

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.meta import tables
from fireflyer.fs.core.meta.inodes.layout import chain_of, order_of
from fireflyer.fs.core.meta.open_files.write_grants import GRANTS
from fireflyer.fs.core.meta.open_rows import CUTS, WAITS
from fireflyer.fs.schema.inodes import ROOT, FileDetails, Kind
from fireflyer.fs.schema.meta import Found, MakeDirectory, MakeNode, PathRef, SetQuota
from fireflyer.sim import Link

__all__ = ["begin", "chaos", "check_store", "quiet"]

FAULTS_NS: Final = 12 * SECOND
AFTER_NS: Final = 3 * SECOND
"""So long clients go on when all is healed."""
QUIET_NS: Final = 90 * SECOND
"""In which everything has to come to an end then."""
LIMIT_BYTES: Final = 60 * CELL_BYTES
PLANS: Final = (
    "mixed",
    "mixed",
    "services",
    "clients",
    "chains",
    "network",
    "cuts",
    "sessions",
    "deaths",
    "holds",
    "none",
)
BAD: Final = Link(max_delay_ns=10 * MS, slow_probability=0.05, slow_ns=4 * SECOND, loss=0.05, duplication=0.08)
SLOW: Final = Link(max_delay_ns=10 * MS, slow_probability=0.4, slow_ns=SECOND)
_KINDS_LEFT: Final = {
    tables.WRITERS: "writers", tables.HOLDS: "holds", tables.LOCKS: "locks", WAITS: "waits", CUTS: "cuts",
    tables.UNLINKED: "unlinked inodes", GRANTS: "grants",
}  # fmt: skip


def chaos(seed: int, *, clients: int = 3, plan: str = "", with_tokens: bool = False) -> MetaWorld:
    """Raises `AssertionError` for what must not be. `plan`: the kind of faults; by default of `PLANS` by chance."""
    world = MetaWorld(seed)
    world.with_tokens = with_tokens
    begin(world)
    world.plan = plan or world.rng.choice(PLANS)
    world.paths = (
        PATHS[:1] if world.plan in ("cuts", "sessions", "holds") else world.rng.choice([PATHS, PATHS[:1], PATHS[::2]])
    )
    workload = [MetaClient(world, f"c{at}") for at in range(clients)]
    _faults(world, workload)
    world.sim.run(until_ns=FAULTS_NS)
    heal(world)
    world.sim.run(until_ns=FAULTS_NS + AFTER_NS)
    for one in workload:
        one.busy = False
    quiet(world, workload)
    for file, body in check_store(world).items():
        _check_file(world, file, body)
    world.done = {name: sum(one.done.get(name, 0) for one in workload) for one in workload for name in one.done}
    return world


def begin(world: MetaWorld) -> None:
    places = [PathRef(ROOT, name) for name in DIRECTORIES]
    answers = world.begin(
        *[MakeDirectory(one) for one in places],
        SetQuota(places[-1], bytes=LIMIT_BYTES, inodes=5),
        MakeNode(PathRef(ROOT, b"locked"), Kind.FILE),
    )
    locked = answers[-1]
    assert isinstance(locked, Found)
    world.lock_inode = locked.inode.id


def _faults(world: MetaWorld, workload: list[MetaClient]) -> None:
    rng = world.rng
    plan = world.plan
    if plan == "none":
        return
    world.commit_faults = rng.choice([0.0, 0.03])
    world.crashes = rng.choice([0.0, 0.01, 0.04]) if plan != "services" else 0.05
    world.pauses = rng.choice([0.0, 0.02, 0.15])
    world.chunks.late = rng.choice([0.0, 0.05, 0.2]) if plan not in ("cuts", "sessions") else 0.3
    if plan in ("network", "mixed"):
        world.net.set_default(BAD)
    if plan == "holds":
        world.net.set_default(SLOW)
    if plan == "deaths":
        world.chunks.late = 0.5
    for _ in range(rng.randrange(6, 30) if plan == "deaths" else rng.randrange(1, 6)):
        at_ns = rng.randrange(FAULTS_NS)
        kinds = [lambda: rng.choice(workload).crash(), lambda: rng.choice(world.services).crash()]
        kinds += [lambda: _stop_chain(world), lambda: world.end_session(rng.choice(workload).client)]
        pick = {
            "services": kinds[1:2],
            "clients": [kinds[0], kinds[3]],
            "deaths": [kinds[0], kinds[3]],
            "chains": kinds[2:3],
        }.get(plan, kinds)
        world.sim.call_at(at_ns, rng.choice(pick))
    if plan in ("mixed", "services", "cuts"):
        _lose_sessions(world, 4)
    elif plan == "sessions":
        _lose_sessions(world, 30)


def _lose_sessions(world: MetaWorld, below: int) -> None:
    """Of services that live."""
    rng = world.lost_sessions
    for _ in range(rng.randrange(below)):
        world.sim.call_at(rng.randrange(FAULTS_NS), rng.choice(world.services).lose_session)


def _stop_chain(world: MetaWorld) -> None:
    chain = world.rng.choice(CHAINS)
    world.chunks.down_until_ns[chain] = world.sim.now_ns + world.rng.randrange(4 * SECOND)


def heal(world: MetaWorld) -> None:
    world.commit_faults = world.crashes = world.pauses = world.chunks.late = 0.0
    world.net.set_default(Link())
    world.chunks.down_until_ns = dict.fromkeys(CHAINS, 0)


def quiet(world: MetaWorld, workload: list[MetaClient]) -> None:
    """Until nothing is left to be done."""
    until_ns = world.sim.now_ns + QUIET_NS
    while left := [*[one.name for one in workload if not one.idle], *_left(world)]:
        assert world.sim.now_ns < until_ns, f"there are still {left}"
        world.sim.run(until_ns=world.sim.now_ns + SECOND)


def _left(world: MetaWorld) -> list[str]:
    return [f"{_KINDS_LEFT[key[:2]]} {key[2:].hex()}" for key, _ in world.items() if key[:2] in _KINDS_LEFT]


def check_store(world: MetaWorld) -> dict[int, FileDetails]:
    """All but what the files contain; the files."""
    items = world.items()
    assert violations(items) == []
    files: dict[int, FileDetails] = {}
    for key, value in items:
        if key[:2] == tables.INODES:
            inode = tables.decode_inode(key, value)
            assert inode.links > 0, f"{inode} has no name and was not collected"
            if isinstance(inode.body, FileDetails):
                files[inode.id] = inode.body
    for chain, file, index in sorted(world.chunks.chunks):
        assert file in files, f"chunk {index} of inode {file}, which is no more, was left on chain {chain}"
        body = files[file]
        assert chain == chain_of(order_of(body.layout, CHAINS), index), f"chunk {index} of {file} is on chain {chain}"
        end = index * CHUNK_BYTES + len(world.chunks.chunks[chain, file, index]) * CELL_BYTES
        assert end <= body.length, f"chunk {index} of inode {file} ends at {end}, the file at {body.length}"
    assert all(body.cutting is None for body in files.values())
    return files


def _check_file(world: MetaWorld, file: int, body: FileDetails) -> None:
    chunks = world.chunks.of(file)
    now_ns = world.sim.now_ns
    world.files.check_length(file, body.length // CELL_BYTES, now_ns, now_ns)
    for cell in range(FILE_CELLS):
        cells = chunks.get(cell // CELLS, [])
        within = cell % CELLS
        value = cells[within] if within < len(cells) else 0
        world.files.check(file, cell, value, now_ns, now_ns, final=True)
