"""Checkpoints on 3FS, each chunk on two disks of this machine: in turns with what the chunk client alone does there,
and with peers that write files of the same file system through a mount (FUSE).

`save/3FS/SHAPE`: from the call until the checkpoint is durable; `stall/3FS/SHAPE`: how long the caller is held up.
`load/3FS/SHAPE/existing`: the newest one, into tensors that are there. The chunk client writes the same number of bytes
from ready memory, and reads them into ready memory, in chunks as large as those of files and with as many bytes under
way as a checkpoint has: no names, no checksums of tensors, no copy. Storage processes, disks and all clients share the
processors. Processor time is that of the process that saves, and of the mount where it goes through one, without the
storage processes behind; memory is that of the process that saves alone. Where nothing can be mounted, why is said in
the place of the figures.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tests.support.fs.mounts.mounting import Mount, missing, mounted

import fireflyer.fs
from bench.checkpoint.contenders import CONTENDERS, Contender, Ours, empty_like
from bench.checkpoint.peak import peaks_of
from bench.checkpoint.program import State, aligned
from bench.checkpoint.states import Shape, random_state, same
from bench.checkpoint.turns import Turn, timed
from bench.fs.cluster import Cluster, processor_s, running, spread
from bench.held_open import held_open
from bench.report import Bound, Figure, Options, Result, figure
from fireflyer.fs.client import ChunkId, Ring
from fireflyer.fs.client.files.disk import DISK_OPTIONS, FileSystemDisk
from fireflyer.identity import NodeCredential, load_secret

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
_CHUNKS: Final = "chunk client"
_PEERS: Final = ("torch.save", "safetensors", "DCP", "DCP async")
_Figures = dict[str, Figure | str]


def cases_of(shape: Shape) -> tuple[str, str, str]:
    return f"save/3FS/{shape.name}", f"stall/3FS/{shape.name}", f"load/3FS/{shape.name}/existing"


def measure(options: Options, shape: Shape, directory: str) -> Iterator[Result]:
    chains = spread(_NODES, _REPLICAS)
    with held_open(running(Path(directory), nodes=_NODES, chains=chains)) as (runner, cluster):
        runner.run(cluster.add_table())
        yield from _on_cluster(options, shape, cluster, [one.id for one in chains])


class _OnFiles(Ours):
    """By the client of 3FS in this process."""

    def __init__(self, address: str, secret_file: str, directory: str, state: State) -> None:
        credential = NodeCredential(load_secret(secret_file), "bench")
        self.files = fireflyer.fs.connect(address, credential=credential, options=DISK_OPTIONS)
        super().__init__(directory, state, FileSystemDisk(self.files, address))

    def tidy(self) -> None:
        self._manager.wait()

    def close(self) -> None:
        self._manager.close()
        self.files.close()


class _Run(NamedTuple):
    shape: Shape
    state: State
    contenders: dict[str, Contender]
    mount: Mount | None
    no_mount: str
    """Why there is none."""

    def mount_s(self, name: str) -> float:
        """Processor time of the mount, for who goes through it."""
        return 0.0 if self.mount is None or name == "ours" else processor_s(self.mount.process.pid)


def _on_cluster(options: Options, shape: Shape, cluster: Cluster, chains: list[int]) -> Iterator[Result]:
    state, secret_file = random_state(shape.tensors, shape.size_bytes), str(cluster.directory / "secret")
    ours = functools.partial(_OnFiles, f"ff://{cluster.manager.address}", secret_file)
    with contextlib.ExitStack() as cleanup:
        files = ours("/checkpoints", state)
        cleanup.callback(files.close)
        mount, no_mount = None, missing() or _missing_room(shape, cluster)
        if not no_mount:
            mount = cleanup.enter_context(_mounted(cluster, secret_file))
        contenders: dict[str, Contender] = {"ours": files}
        if mount is not None:
            contenders |= {name: CONTENDERS[name](_made(mount, name), state) for name in _PEERS}
        run = _Run(shape, state, contenders, mount, no_mount)
        with cluster.ring() as ring:
            raw = _Raw(ring, chains, shape.total_bytes)
            yield from _saves(run, _save_in_turns(options, run, raw))
            yield from _loads(run, _load_in_turns(options, run, raw))
            raw.remove()
        contenders.clear()  # memory of peers
        yield from _peaks(options, run, ours, files)


def _missing_room(shape: Shape, cluster: Cluster) -> str:
    """For peers: of each two files, on each replica. Ours and the chunk client have no need of it."""
    needed_bytes = _REPLICAS * (2 * len(_PEERS) + 3) * shape.total_bytes
    free_bytes = shutil.disk_usage(cluster.directory).free
    if free_bytes >= needed_bytes:
        return ""
    return f"peers need {needed_bytes >> 20} MiB of space on the disk, {free_bytes >> 20} MiB are free"


@contextlib.contextmanager
def _mounted(cluster: Cluster, secret_file: str) -> Iterator[Mount]:
    place = cluster.directory / "place"
    place.mkdir()
    where = ["--manager", cluster.manager.address, "--secret-file", secret_file]
    with mounted([sys.executable, "-P", "-m", "fireflyer", "fs", "mount", str(place), *where], str(place)) as mount:
        yield mount


def _made(mount: Mount, name: str) -> str:
    path = os.path.join(mount.path, name.replace(" ", "-"))
    os.mkdir(path)
    return path


_Turns = dict[str, list[Turn]]


def _save_in_turns(options: Options, run: _Run, raw: _Raw) -> _Turns:
    saves: _Turns = {name: [] for name in (*run.contenders, _CHUNKS)}
    for number in range(options.rounds + 1):
        for name, contender in run.contenders.items():
            turn = _with_mount(run, name, lambda contender=contender: contender.save(run.state))  # type: ignore[misc]
            contender.tidy()
            if number:  # the first round touches memory, and connects
                saves[name].append(turn)
        raw.next_file()
        turn = timed(raw.write)
        if number:
            saves[_CHUNKS].append(turn)
    return saves


def _load_in_turns(options: Options, run: _Run, raw: _Raw) -> _Turns:
    """Of what was saved last."""
    target = empty_like(run.state)
    names = [name for name in run.contenders if name != "DCP async"]  # its files are those of DCP
    loads: _Turns = {name: [] for name in (*names, _CHUNKS)}
    for number in range(options.rounds + 1):
        for name in names:
            contender = run.contenders[name]
            contender.tidy()  # the page cache has nothing of it
            for tensor in target.values():
                tensor.zero_()
            turn = _with_mount(run, name, lambda contender=contender: contender.load(target))  # type: ignore[misc]
            assert same(target, run.state), f"{name} has not loaded what was saved"
            if number:
                loads[name].append(turn)
        turn = timed(raw.read)
        if number:
            loads[_CHUNKS].append(turn)
    return loads


def _with_mount(run: _Run, name: str, work: Callable[[], object]) -> Turn:
    before_s = run.mount_s(name)
    turn = timed(work)
    return turn._replace(processor_s=turn.processor_s + run.mount_s(name) - before_s)


def _shown(name: str) -> str:
    return name if name in ("ours", _CHUNKS) else f"{name}, FUSE"


def _figures(run: _Run, turns: _Turns, take: Callable[[Turn], float]) -> _Figures:
    """Of all that took turns, and why those did not that need a mount."""
    found: _Figures = {_shown(name): figure([take(turn) for turn in some]) for name, some in turns.items()}
    if run.mount is None:
        found |= {_shown(name): f"not mounted: {run.no_mount}" for name in _PEERS}
    return found


def _saves(run: _Run, turns: _Turns) -> list[Result]:
    save, stall, _ = cases_of(run.shape)
    stalls = {name: some for name, some in turns.items() if name in ("ours", "DCP async")}
    stall_of = _figures(run, stalls, lambda turn: turn.stall_s)
    kept = ("ours", _shown("DCP async"))
    return [
        _judged(run.shape, save, "committed_s", _figures(run, turns, lambda turn: turn.elapsed_s)),
        _result(save, "processor_s", _figures(run, turns, lambda turn: turn.processor_s)),
        _result(stall, "stall_s", {name: one for name, one in stall_of.items() if name in kept}),
    ]


def _loads(run: _Run, turns: _Turns) -> list[Result]:
    _, _, load = cases_of(run.shape)
    both = (
        _judged(run.shape, load, "loaded_s", _figures(run, turns, lambda turn: turn.elapsed_s)),
        _result(load, "processor_s", _figures(run, turns, lambda turn: turn.processor_s)),
    )
    return [_without(one, _shown("DCP async")) for one in both]


def _without(result: Result, peer: str) -> Result:
    result.peers.pop(peer, None)
    return result


def _peaks(options: Options, run: _Run, ours: Callable[[str, State], Contender], files: _OnFiles) -> list[Result]:
    """Of each in processes of their own, which write to the same file system."""
    save, _, load = cases_of(run.shape)
    saves: _Figures = {}
    loads: _Figures = {}

    @contextlib.contextmanager
    def on_files() -> Iterator[str]:
        yield "/peak"
        files.files.rmtree("/peak")

    saves["ours"], loads["ours"] = peaks_of(ours, run.shape, options.rounds, on_files)
    for name in _PEERS:
        shown = _shown(name)
        if run.mount is None:
            saves[shown] = loads[shown] = f"not mounted: {run.no_mount}"
            continue
        temporary = functools.partial(tempfile.TemporaryDirectory, prefix="peak-", dir=run.mount.path)
        saves[shown], loads[shown] = peaks_of(CONTENDERS[name], run.shape, options.rounds, temporary)
    return [_result(save, "peak_bytes", saves), _without(_result(load, "peak_bytes", loads), _shown("DCP async"))]


class _Raw:
    """As many bytes as chunks of one file number, by the chunk client alone."""

    def __init__(self, ring: Ring, chains: list[int], size_bytes: int) -> None:
        self._ring, self._file = ring, _FIRST_FILE
        image = aligned(size_bytes)
        image.copy_(torch.randint(0, 256, (len(image),), dtype=torch.uint8))
        data = image.numpy().data
        self._parts = [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
        self._chains = [chains[index % len(chains)] for index in range(len(self._parts))]

    def next_file(self) -> None:
        """The one before is removed: each write is of new chunks."""
        if self._file > _FIRST_FILE:
            self.remove()
        self._file += 1

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


def _judged(shape: Shape, case: str, metric: str, figures: _Figures) -> Result:
    chunks, ours = figures[_CHUNKS], figures["ours"]
    assert isinstance(chunks, Figure)
    assert isinstance(ours, Figure)
    bound = Bound(chunks.median, "the same bytes from ready memory, or into it, by the chunk client alone")
    if not shape.judged:
        return _result(case, metric, figures, bound)
    target, met = f"at least {_SHARE:.0%} of the chunk client's speed", ours.median * _SHARE <= chunks.median
    return _result(case, metric, figures, bound, target=target, met=met, verdicts={target: met})


def _result(case: str, metric: str, figures: _Figures, bound: Bound | None = None, **judged: Any) -> Result:
    ours = figures["ours"]
    assert isinstance(ours, Figure), ours
    peers = {name: one for name, one in figures.items() if name != "ours"}
    verdict = {"target": "", **judged}
    return Result(
        suite="checkpoint", case=case, metric=metric, better="lower", ours=ours, peers=peers, bound=bound, **verdict
    )
