"""Dumps of groups in which something went wrong, as the ranks would have written them.

A world calls collectives in lockstep: each takes `STEP_NS`, a rank enters up to a tenth of that late. Its ranks stand
on nodes whose clocks have nothing in common. `trouble` is what befalls one rank at one collective.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

from fireflyer.base.units import MS, SECOND
from fireflyer.collectives.flight import Dump, Fault, PeerProgress, Record, Snapshot

Trouble: TypeAlias = Literal["none", "skip", "other", "absent", "gone", "stalled", "slow"]
Call: TypeAlias = tuple[str, str, str, int, int]  # kind, dtype, op, count, root

STEP_NS: Final = 40 * MS
TIMEOUT_NS: Final = 8 * SECOND
START_WALL_NS: Final = 1_790_000_000 * SECOND
CHUNKS: Final = 40


@dataclass
class World:
    """`calls` is the program of every rank; `trouble` befalls `rank` at call number `at`."""

    nodes: list[int]
    calls: list[Call]
    trouble: Trouble = "none"
    rank: int = 0
    at: int = 0
    raised: bool = False
    """Whether the native watch found it and all ranks raised; else somebody asked for the dumps by hand."""
    capacity: int = 1024
    queued: int = 0
    """Further calls that every rank had already made."""
    seed: int = 0
    skew_ns: int = 0
    """By which the wall clocks of nodes differ, at the most."""
    lost: set[int] = field(default_factory=set)
    """Ranks whose dump was not collected."""


def dumps_of(world: World) -> list[Dump]:
    rng = random.Random(world.seed)
    ranks = range(len(world.nodes))
    boots = {node: rng.randrange(1, 10**15) for node in sorted(set(world.nodes))}
    skews = {node: rng.randint(-world.skew_ns, world.skew_ns) for node in sorted(set(world.nodes))}
    programs = {rank: _program(world, rank) for rank in ranks}
    records: dict[int, list[Record]] = {rank: [] for rank in ranks}
    stop = _stop(world, programs)
    end_ns = (stop + 1) * STEP_NS + TIMEOUT_NS
    for seq in range(min(len(world.calls), stop + 1 + world.queued)):
        for rank in ranks:
            record = _record(world, rng, programs[rank], rank, seq, stop, end_ns)
            if record is not None:
                records[rank].append(record)
    return [
        _dump(world, rank, records[rank], boots[world.nodes[rank]], skews[world.nodes[rank]], stop, end_ns, records)
        for rank in ranks
        if rank not in world.lost and not (world.trouble == "gone" and rank == world.rank)
    ]


def _program(world: World, rank: int) -> list[Call]:
    calls = list(world.calls)
    if rank != world.rank:
        return calls
    if world.trouble == "skip":
        del calls[world.at]
    if world.trouble == "other":
        kind, dtype, op, count, root = calls[world.at]
        calls[world.at] = (kind, dtype, op, count + 1, root)
    return calls


def _stop(world: World, programs: dict[int, list[Call]]) -> int:
    """The first call that does not end; the number of calls where all do."""
    if world.trouble in ("absent", "gone", "stalled"):
        return world.at
    for seq in range(len(world.calls)):
        here = {tuple(calls[seq : seq + 1]) for calls in programs.values()}
        if len(here) > 1:
            return seq
    return len(world.calls)


def _record(
    world: World, rng: random.Random, program: list[Call], rank: int, seq: int, stop: int, end_ns: int
) -> Record | None:
    late_ns = rng.randrange(STEP_NS // 10)
    if world.trouble == "slow" and rank == world.rank:
        late_ns += STEP_NS // 2
    culprit = rank == world.rank and world.trouble in ("absent", "gone")
    if seq >= len(program) or (seq >= stop and culprit):
        return None
    kind, dtype, op, count, root = program[seq]
    submitted_ns = min(seq, stop) * STEP_NS + late_ns + 1
    done = CHUNKS
    if seq == stop:
        done = 0
        if world.trouble == "stalled":
            done = CHUNKS // 2 + (0 if rank == world.rank else rng.randint(1, 4))
    state = "done" if seq < stop else "queued" if seq > stop else "running"
    if world.raised and seq >= stop:
        state = "failed"
    started_ns = submitted_ns + 1000 if seq <= stop else 0
    return Record(
        id=seq,
        seq=seq,
        kind=kind,
        dtype=dtype,
        op=op,
        count=count,
        root=root,
        bytes=4 * count,
        path="pipeline",
        state=state,  # type: ignore[arg-type]
        failure="peer_failed" if state == "failed" else "",
        submitted_ns=submitted_ns,
        started_ns=started_ns,
        finished_ns=(seq + 1) * STEP_NS if state == "done" else end_ns if state == "failed" else 0,
        progress_ns=started_ns + done * 1000 if done and started_ns else 0,
        chunks=CHUNKS,
        chunks_done=done if started_ns else 0,
    )


def _moved(record: Record, by_ns: int) -> Record:
    times = ("submitted_ns", "started_ns", "finished_ns", "progress_ns")
    later = {name: getattr(record, name) + by_ns for name in times if getattr(record, name)}
    return msgspec.structs.replace(record, **later)


def _dump(
    world: World,
    rank: int,
    mine: list[Record],
    boot_ns: int,
    skew_ns: int,
    stop: int,
    end_ns: int,
    records: dict[int, list[Record]],
) -> Dump:
    now_ns = end_ns + MS * (rank + 1)
    kept = [r for r in mine if r.state != "done"]
    kept = [r for r in mine if r.state == "done"][-max(1, world.capacity - len(kept)) :] + kept
    peer_progress = tuple(
        PeerProgress(
            other,
            entered=sum(record.started_ns > 0 for record in records[other]),
            finished=sum(record.state == "done" for record in records[other]),
            seen_ns=boot_ns + now_ns,
        )
        for other in range(len(world.nodes))
        if other != rank and world.nodes[other] == world.nodes[rank]
    )
    fault = None
    if world.raised and stop < len(world.calls):
        text = f"{label(world, world.rank)} was to blame during #{stop}"
        fault = Fault("peer_failed", world.rank, stop, text)
    return Dump(
        group="attempt-0/collectives/world/1",
        plan="0123456789abcdef",
        rank=rank,
        world_size=len(world.nodes),
        node=world.nodes[rank],
        labels={other: label(world, other) for other in range(len(world.nodes))},
        timeout_ns=TIMEOUT_NS,
        reason="an operation failed" if world.raised else "asked for",
        fault=fault,
        snapshot=Snapshot(
            records=tuple(_moved(record, boot_ns) for record in kept),
            monotonic_ns=boot_ns + now_ns,
            realtime_ns=START_WALL_NS + now_ns + skew_ns,
            submitted=len(mine),
            finished=sum(record.state == "done" for record in mine),
            peer_progress=peer_progress,
        ),
    )


def label(world: World, rank: int) -> str:
    return f"rank {rank} (node {world.nodes[rank]}, host n{world.nodes[rank]})"


def message(
    kind: str, peer: int, *, seq: int = 0, count: int = 8, tag: int = 0, state: str = "running", failure: str = ""
) -> Record:
    """A send or receive that started at 1 s and, where it is over, ended at once."""
    return Record(
        id=seq,
        seq=seq,
        kind=kind,
        dtype="f32",
        count=count,
        peer=peer,
        tag=tag,
        bytes=4 * count,
        path="exchange",
        state=state,  # type: ignore[arg-type]
        failure=failure,
        submitted_ns=SECOND,
        started_ns=SECOND,
        finished_ns=0 if state == "running" else SECOND + 1000,
    )


def dump_with(rank: int, world_size: int, records: list[Record], *, fault: Fault | None = None) -> Dump:
    """A dump of 20 s after the start, all ranks on one host."""
    collectives = [record for record in records if not record.message]
    return Dump(
        group="attempt-0/collectives/world/1",
        plan="0123456789abcdef",
        rank=rank,
        world_size=world_size,
        node=0,
        labels={other: f"rank {other} (node 0, host n0)" for other in range(world_size)},
        timeout_ns=TIMEOUT_NS,
        reason="asked for",
        fault=fault,
        snapshot=Snapshot(
            records=tuple(records),
            monotonic_ns=20 * SECOND,
            realtime_ns=START_WALL_NS,
            submitted=len(collectives),
            finished=sum(record.state == "done" for record in collectives),
        ),
    )
