"""Checkpoints on 3FS: each chunk on two disks of this machine, beside what the chunk client alone does there.

`save/3FS/SHAPE`: from the call until the checkpoint is durable. `load/3FS/SHAPE/existing`: the newest one, into tensors
that are there. The chunk client writes the same number of bytes from ready memory, and reads them into ready memory,
in chunks as large as those of files and with as many bytes under way as a checkpoint has: no names, no checksums of
tensors, no copy. Storage processes, disks and both clients share the processors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import fireflyer.fs
from bench.checkpoint.contenders import empty_like
from bench.checkpoint.program import aligned
from bench.checkpoint.states import Shape, random_state, same
from bench.fs.cluster import Cluster, running, spread
from bench.report import Bound, Options, Result, figure
from fireflyer.checkpoint import CheckpointManager, State
from fireflyer.fs.client import ChunkId, Ring
from fireflyer.fs.client.files.disk import DISK_OPTIONS, FileSystemDisk

__all__ = ["cases_of", "measure"]

_NODES: Final = 4
_REPLICAS: Final = 2
_CHUNK_BYTES: Final = 1 << 20
"""What files have by default."""
_IN_FLIGHT_BYTES: Final = 48 << 20
_SHARE: Final = 0.85
"""Of the speed of the chunk client, what a checkpoint is to have at least."""
_FIRST_FILE: Final = 1 << 50
"""No inode has such a number yet."""


def cases_of(shape: Shape) -> tuple[str, str]:
    return f"save/3FS/{shape.name}", f"load/3FS/{shape.name}/existing"


def measure(options: Options, shape: Shape, directory: str) -> list[Result]:
    return asyncio.run(_measure(options, shape, Path(directory)))


async def _measure(options: Options, shape: Shape, directory: Path) -> list[Result]:
    chains = spread(_NODES, _REPLICAS)
    async with running(directory, nodes=_NODES, chains=chains) as cluster:
        await cluster.add_table()
        return await asyncio.to_thread(_take_turns, options, shape, cluster, [one.id for one in chains])


def _take_turns(options: Options, shape: Shape, cluster: Cluster, chains: list[int]) -> list[Result]:
    state, image = random_state(shape.tensors, shape.size_bytes), aligned(shape.total_bytes)
    image.copy_(torch.randint(0, 256, (len(image),), dtype=torch.uint8))
    target = empty_like(state)
    address = f"ff://{cluster.manager.address}"
    samples: dict[str, dict[str, list[float]]] = {case: {"ours": [], "chunks": []} for case in cases_of(shape)}
    save, load = cases_of(shape)
    files = fireflyer.fs.connect(address, credential=cluster.credential, options=DISK_OPTIONS)
    disk = FileSystemDisk(files, address)
    with files, cluster.ring() as ring:
        manager = CheckpointManager("/checkpoints", rank=0, world_size=1, store=None, disk=disk, keep=1)
        manager.reserve(State(state))

        def saving(step: int) -> Callable[[], object]:
            return lambda: manager.save(step, State(state)).result()

        for number in range(options.rounds + 1):
            raw = _Raw(ring, chains, _FIRST_FILE + number, image)
            turn = {
                (save, "ours"): _timed(saving(number + 1)),
                (save, "chunks"): _timed(raw.write),
            }
            manager.wait()
            turn[load, "ours"] = _timed(lambda: manager.restore(target))
            assert same(target, state), "what was loaded is not what was saved"
            turn[load, "chunks"] = _timed(raw.read)
            raw.remove()
            if number:  # the first round touches memory, and connects
                for (case, who), elapsed_s in turn.items():
                    samples[case][who].append(elapsed_s)
        manager.close()
    metrics = {save: "committed_s", load: "loaded_s"}
    return [_result(shape, case, metrics[case], samples[case]) for case in cases_of(shape)]


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class _Raw:
    """The same bytes as chunks of one file number, by the chunk client alone."""

    def __init__(self, ring: Ring, chains: list[int], file: int, image: torch.Tensor) -> None:
        self._ring, self._file = ring, file
        data = image.numpy().data
        self._parts = [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
        self._chains = [chains[index % len(chains)] for index in range(len(self._parts))]

    def write(self) -> None:
        self._each(lambda index, chain, chunk: self._ring.prepare_write(index, chain, chunk, self._parts[index]))

    def read(self) -> None:
        self._each(lambda index, chain, chunk: self._ring.prepare_read(index, chain, chunk, self._parts[index]))

    def remove(self) -> None:
        self._each(self._ring.prepare_remove)

    def _each(self, prepare: Callable[[int, int, ChunkId], Any]) -> None:
        for index, chain in enumerate(self._chains):
            while self._ring.under_way * _CHUNK_BYTES >= _IN_FLIGHT_BYTES:
                self._end(1)
            prepare(index, chain, ChunkId(self._file, index))
            self._ring.submit()
        while self._ring.under_way:
            self._end(self._ring.under_way)

    def _end(self, least: int) -> None:
        for error in self._ring.wait(least).errors.values():
            raise error


def _result(shape: Shape, case: str, metric: str, samples: dict[str, list[float]]) -> Result:
    ours, chunks = figure(samples["ours"]), figure(samples["chunks"])
    target = f"at least {_SHARE:.0%} of the chunk client's speed" if shape.judged else ""
    met = ours.median * _SHARE <= chunks.median
    return Result(
        suite="checkpoint",
        case=case,
        metric=metric,
        better="lower",
        ours=ours,
        peers={"chunk client": chunks},
        bound=Bound(chunks.median, "the same bytes from ready memory, or into it, by the chunk client alone"),
        target=target,
        met=met if target else None,
        verdicts={target: met} if target else {},
    )
