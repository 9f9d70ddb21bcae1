"""Files through the mount, beside a local directory through the same native layer, in the same run.

One file by pieces of 1 MiB: written until it is durable and closed, then opened and read (which finds nothing in the
kernel: its pages were dropped at the open). Reads and writes of the peer stay in native threads; its names go the same
way as ours.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tests.support.mounting import local_mount, missing, mounted

from bench.fs.cluster import running, spread
from bench.report import Figure, Options, Result, figure
from fireflyer.base.units import GIB, MIB

__all__ = ["run"]

BYTES: Final = {"tiny": 16 * MIB, "brief": GIB // 2, "full": 4 * GIB}
ROUNDS: Final = {"tiny": 1, "brief": 3, "full": 3}
PIECE: Final = MIB
LEAST_BYTES_PER_S: Final = {"read": 1e9, "write": 5e8}
SHARE: Final = 0.6
"""Of the peer, where that is less."""
_Rates = dict[str, Figure]


def run(options: Options) -> Iterator[Result]:
    if options.selects("mount") and not missing():
        with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
            yield from asyncio.run(_measure(options, Path(directory)))


async def _measure(options: Options, directory: Path) -> list[Result]:
    with local_mount(str(directory / "source"), str(directory / "peer"), natively=True) as peer:
        theirs = await asyncio.to_thread(_rates, options, peer.path)
    place = directory / "place"
    place.mkdir()
    async with running(directory, nodes=2, chains=spread(2, 2)) as cluster:
        await cluster.add_table()
        where = ["--manager", cluster.manager.address, "--secret-file", str(directory / "secret")]
        command = [sys.executable, "-P", "-m", "fireflyer", "fs", "mount", str(place), *where]
        with mounted(command, str(place)) as mount:
            ours = await asyncio.to_thread(_rates, options, mount.path)
    return [_result(options, what, ours[what], theirs[what]) for what in LEAST_BYTES_PER_S]


def _rates(options: Options, directory: str) -> _Rates:
    """Bytes per second."""
    total, path = BYTES[options.scale], os.path.join(directory, "file")
    acts: dict[str, Callable[[str, int], None]] = {"write": _write, "read": _read}
    samples: dict[str, list[float]] = {what: [] for what in acts}
    for _ in range(ROUNDS[options.scale]):
        for what, act in acts.items():
            began_s = time.perf_counter()
            act(path, total)
            samples[what].append(total / (time.perf_counter() - began_s))
    os.unlink(path)
    return {what: figure(some) for what, some in samples.items()}


def _write(path: str, total: int) -> None:
    piece = os.urandom(PIECE)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for _ in range(0, total, PIECE):
            os.write(fd, piece)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: str, total: int) -> None:
    memory, count = bytearray(PIECE), 0
    fd = os.open(path, os.O_RDONLY)
    try:
        while got := os.readv(fd, [memory]):
            count += got
    finally:
        os.close(fd)
    assert count == total


def _result(options: Options, what: str, ours: Figure, peer: Figure) -> Result:
    least = min(LEAST_BYTES_PER_S[what], SHARE * peer.median)
    target = f"at least {LEAST_BYTES_PER_S[what] / 1e9:g} GB/s, or {SHARE:.0%} of the peer"
    met = ours.median >= least
    return Result(
        suite="fs", case=f"mount/{what}/1 MiB of {BYTES[options.scale] // MIB} MiB", metric="rate_bytes_per_s",
        better="higher", ours=ours, peers={"local directory through the same layer": peer}, bound=None, target=target,
        met=met, verdicts={target: met}, note=f"{ours.median / 1e9:.2f} GB/s",
    )  # fmt: skip
