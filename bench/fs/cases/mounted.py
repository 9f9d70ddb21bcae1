"""Files through the mount, beside a local directory through the same native layer, by turns in the same run.

One file by pieces of 1 MiB: made, written and synced until `close` has returned; then opened and read, which finds
nothing in the kernel of the mount (its pages were dropped at the open), and everything in the page cache behind it. The
file of the round before is emptied and memory is taken back from the host before the clock starts, and the file is
compared after it has stopped.

The peer passes reads and writes through in native threads, to ext4: `fsync` makes its one copy durable, on the disk on
which ours has two, each of them durable before its piece counts as written. The bounds: `sendfile` to `recv` over one
loopback connection; for writes half of it, since every byte crosses twice, or half of 1 MiB writes with fdatasync.
"""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.fs.mounts.mounting import Mount, local_mount, missing, mounted

from bench.fs import bounds
from bench.fs.cluster import Cluster, processor_s, running, spread
from bench.fs.host_memory import take_back
from bench.fs.results import ONE_CONNECTION
from bench.report import Bound, Options, Result, figure
from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import GIB, MIB

__all__ = ["run"]

BYTES: Final = {"tiny": 16 * MIB, "brief": GIB // 2, "full": 4 * GIB}
ROUNDS: Final = {"tiny": 1, "brief": 3, "full": 3}
"""After one that does not count."""
BOUND_S: Final = {"tiny": 0.1, "brief": 0.7, "full": 2.0}
DEPTH: Final = 8
"""Of 1 MiB, under way at the bounds."""
NEEDED: Final = {"read": 1.25, "write": 2.25}
"""Memory that the pages take which appear meanwhile, at most, of the bytes."""
PIECES: Final = 33
"""Different ones, one after the other."""
LEAST_BYTES_PER_S: Final = {"read": 1e9, "write": 5e8}
SHARE: Final = 0.6
"""Of the peer, where that is less."""
HOW: Final = {"read": "cached behind the mount", "write": "durable, 2 replicas"}
PEERS: Final = {"read": "ext4 through the same layer", "write": "ext4 through the same layer, fsync at the end"}


class _Place(NamedTuple):
    """`processor_s`: what the mount's process has used, and all processes behind it."""

    path: str
    processor_s: Callable[[], tuple[float, float]]


class _Took(NamedTuple):
    elapsed_s: float
    program_s: float
    mount_s: float
    behind_s: float


def run(options: Options) -> Iterator[Result]:
    if options.selects("mount") and not missing():
        with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
            yield from asyncio.run(_measure(options, Path(directory)))


async def _measure(options: Options, directory: Path) -> list[Result]:
    place = directory / "place"
    place.mkdir()
    async with running(directory, nodes=2, chains=spread(2, 2)) as cluster:
        await cluster.add_table()
        where = ["--manager", cluster.manager.address, "--secret-file", str(directory / "secret")]
        command = [sys.executable, "-P", "-m", "fireflyer", "fs", "mount", str(place), *where]
        with (
            local_mount(str(directory / "source"), str(directory / "peer"), natively=True) as peer,
            mounted(command, str(place)) as mount,
        ):
            places = {"ours": _place(mount, cluster), "peer": _place(peer, None)}
            return await asyncio.to_thread(_by_turns, options, directory, places)


def _place(mount: Mount, cluster: Cluster | None) -> _Place:
    """The process that was started is the mount's: it has only changed its namespace."""

    def used() -> tuple[float, float]:
        return processor_s(mount.process.pid), 0.0 if cluster is None else cluster.processor_s()

    return _Place(os.path.join(mount.path, "file"), used)


def _by_turns(options: Options, directory: Path, places: dict[str, _Place]) -> list[Result]:
    stream, pieces = bounds.random_file(str(directory)), [os.urandom(MIB) for _ in range(PIECES)]
    total, bound_s = BYTES[options.scale], BOUND_S[options.scale]
    acts: dict[str, Callable[[str], None]] = {
        "write": functools.partial(_write, pieces, total),
        "read": functools.partial(_read, total),
    }
    took: dict[str, dict[str, list[_Took]]] = {what: {name: [] for name in places} for what in acts}
    limits: dict[str, list[float]] = {"loopback": [], "disk": []}
    for turn in range(ROUNDS[options.scale] + 1):
        for place in places.values():
            with open(place.path, "wb"):
                pass
        for what, act in acts.items():
            for name, place in places.items():
                take_back(NEEDED[what] * total)
                one = _measured(place, act)
                if turn:
                    took[what][name].append(one)
        for place in places.values():
            _compare(place.path, pieces, total)
        limits["loopback"].append(bounds.stream(stream, MIB, DEPTH, bound_s).per_s * MIB)
        limits["disk"].append(bounds.disk(str(directory), DEPTH, bound_s).per_s * MIB)
    medians = {name: statistics.median(some[1:]) for name, some in limits.items()}
    return [_result(what, total, took[what], medians) for what in acts]


def _measured(place: _Place, act: Callable[[str], None]) -> _Took:
    mine, before = resource.getrusage(resource.RUSAGE_SELF), place.processor_s()
    began_s = time.perf_counter()
    act(place.path)
    elapsed_s = time.perf_counter() - began_s
    now, after = resource.getrusage(resource.RUSAGE_SELF), place.processor_s()
    program_s = now.ru_utime + now.ru_stime - mine.ru_utime - mine.ru_stime
    return _Took(elapsed_s, program_s, after[0] - before[0], after[1] - before[1])


def _write(pieces: list[bytes], total: int, path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for number in range(total // MIB):
            if os.write(fd, pieces[number % len(pieces)]) != MIB:
                raise OSError(f"{path}: a piece was not written as a whole")
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(total: int, path: str) -> None:
    memory, count = bytearray(MIB), 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while got := os.readv(fd, [memory]):
            count += got
    finally:
        os.close(fd)
    if count != total:
        raise DataCorruption(f"{path} has {count} bytes of {total}")


def _compare(path: str, pieces: list[bytes], total: int) -> None:
    with open(path, "rb", buffering=0) as file:
        for number in range(total // MIB):
            if file.read(MIB) != pieces[number % len(pieces)]:
                raise DataCorruption(f"{path}: piece {number} came back with other bytes than were written")


def _result(what: str, total: int, took: dict[str, list[_Took]], limits: dict[str, float]) -> Result:
    rates = {name: figure([total / one.elapsed_s for one in some]) for name, some in took.items()}
    ours, peer = rates["ours"], rates["peer"]
    target = f"at least {LEAST_BYTES_PER_S[what] / 1e9:g} GB/s, or {SHARE:.0%} of the peer"
    met = ours.median >= min(LEAST_BYTES_PER_S[what], SHARE * peer.median)
    return Result(
        suite="fs", case=f"mount/{what}/1 MiB pieces of {total // MIB} MiB/{HOW[what]}", metric="rate_bytes_per_s",
        better="higher", ours=ours, peers={PEERS[what]: peer}, bound=_bound(what, limits), target=target, met=met,
        verdicts={target: met}, more=_used(total, took),
        note=f"{ours.median / 1e9:.2f} GB/s, {ours.median / peer.median:.0%} of the peer",
    )  # fmt: skip


def _bound(what: str, limits: dict[str, float]) -> Bound:
    if what == "read":
        return Bound(limits["loopback"], ONE_CONNECTION)
    formula = f"loopback / 2, or 1 MiB writes with fdatasync by {DEPTH} threads / 2, if that is less"
    return Bound(min(limits.values()) / 2, formula)


def _used(total: int, took: dict[str, list[_Took]]) -> dict[str, float]:
    """Processor time of 1 MiB, medians: of the program, of the mount, of the storage processes behind it."""
    used: dict[str, float] = {}
    for name, some in took.items():
        for part in ("program", "mount", "behind"):
            seconds = statistics.median(getattr(one, f"{part}_s") for one in some) * MIB / total
            if seconds:
                used[f"{name}_{part}_processor_s"] = seconds
    return used
