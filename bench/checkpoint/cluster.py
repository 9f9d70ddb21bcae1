"""Checkpoints on 3FS, each chunk on two disks of this machine: in turns with what the chunk client alone does there,
and with peers that write files of the same file system through a mount (FUSE).

`save/3FS/SHAPE`: from the call until the checkpoint is durable; `stall/3FS/SHAPE`: how long the caller is held up.
`load/3FS/SHAPE/existing` and `load/3FS/SHAPE/new`: the newest one, into tensors that are there or into new memory,
from the disk: neither a mount nor a storage process has it in its page cache. The chunk client writes the same number
of bytes from ready memory, and reads them into ready memory (`chunks`); the raw disk has them once, with O_DIRECT,
where 3FS has them twice. Storage processes, disks and all clients share the processors. Processor time is that of the
process that saves, and of the mount where it goes through one, without the storage processes behind; memory is that of
the process that saves alone. Where nothing can be mounted, why is said in the place of the figures. A state that has
no room for a third copy is saved by ours and the chunk client alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tests.support.fs.mounts.mounting import Mount, missing, mounted

import fireflyer.fs
from bench.checkpoint.chunks import Chunks
from bench.checkpoint.contenders import CONTENDERS, PROGRAM, Contender, Ours, Program, empty_like, forget_pages
from bench.checkpoint.peak import peaks_of
from bench.checkpoint.program import State, aligned, read_raw, write_raw
from bench.checkpoint.room import missing_room
from bench.checkpoint.states import Shape, free, random_state, same, sums_of
from bench.checkpoint.turns import Turn, timed
from bench.fs.cluster import Cluster, processor_s, running, spread
from bench.held_open import held_open
from bench.report import Bound, Figure, Options, Result, figure, say
from fireflyer.fs.client.files.disk import DISK_OPTIONS, FileSystemDisk
from fireflyer.identity import NodeCredential, load_secret

__all__ = ["cases_of", "measure"]

_NODES: Final = 4
_REPLICAS: Final = 2
_SHARE: Final = 0.85
"""Of the speed of the chunk client, what a checkpoint is to have at least."""
_CHUNKS: Final = "chunk client"
_DISK: Final = "raw disk"
_PEERS: Final = (PROGRAM, "torch.save", "safetensors", "DCP", "DCP async")
_Figures = dict[str, Figure | str]


def cases_of(shape: Shape) -> tuple[str, str, str, str]:
    of = f"3FS/{shape.name}"
    return f"save/{of}", f"stall/{of}", f"load/{of}/existing", f"load/{of}/new"


def measure(options: Options, shape: Shape, directory: str) -> Iterator[Result]:
    # Memory: the state and an image, and what ours, DCP and a load have. Disk: two files of ours and the client's one,
    # on each replica, and the bound's.
    missing_here = missing_room((2 if shape.only_two else 6) * shape.total_bytes, 7 * shape.total_bytes, directory)
    if missing_here:
        say(f"3FS/{shape.name} is not measured: {missing_here}")
        return
    chains = spread(_NODES, _REPLICAS)
    with held_open(running(Path(directory), nodes=_NODES, chains=chains)) as (runner, cluster):
        runner.run(cluster.add_table())
        yield from _on_cluster(options, shape, cluster, [one.id for one in chains])


class _OnFiles(Ours):
    """By the client of 3FS in this process."""

    def __init__(self, address: str, secret_file: str, directory: str, state: State | None) -> None:
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
    ours: Callable[[str, State | None], _OnFiles]
    contenders: dict[str, Contender]
    chunks: Chunks
    image: torch.Tensor
    directory: str
    """Of the storage nodes, all on one disk."""
    mount: Mount | None
    no_mount: str
    """Why there is none."""

    @property
    def peers(self) -> tuple[str, ...]:
        return () if self.shape.only_two else _PEERS

    @property
    def raw(self) -> str:
        return os.path.join(self.directory, "raw")

    def mount_s(self, name: str) -> float:
        """Processor time of the mount, for who goes through it."""
        return 0.0 if self.mount is None or name == "ours" else processor_s(self.mount.process.pid)

    def close(self) -> None:
        """The memory of all is free then, and what they wrote removed."""
        self.chunks.remove()
        self._close_ours()
        self.contenders.clear()
        if os.path.exists(self.raw):
            os.remove(self.raw)

    def let_go(self) -> None:
        """Of the state: what is loaded into new tensors takes its memory."""
        self._close_ours()
        self.contenders["ours"] = self.ours("/checkpoints", None)
        free(self.state)

    def _close_ours(self) -> None:
        ours = self.contenders["ours"]
        assert isinstance(ours, _OnFiles)
        ours.close()


def _on_cluster(options: Options, shape: Shape, cluster: Cluster, chains: list[int]) -> Iterator[Result]:
    ours = functools.partial(_OnFiles, f"ff://{cluster.manager.address}", str(cluster.directory / "secret"))
    with contextlib.ExitStack() as cleanup:
        mount, no_mount = None, missing() or _no_room_for_peers(shape, cluster)
        if not no_mount and not shape.only_two:
            mount = cleanup.enter_context(_mounted(cluster))
        yield from _times(options, shape, cluster, chains, ours, mount, no_mount)  # whose memory is free again
        yield from _peaks(options, shape, ours, mount, no_mount)


def _times(
    options: Options, shape: Shape, cluster: Cluster, chains: list[int],
    ours: Callable[[str, State | None], _OnFiles], mount: Mount | None, no_mount: str,
) -> Iterator[Result]:  # fmt: skip
    state = random_state(shape.tensors, shape.size_bytes)
    contenders: dict[str, Contender] = {"ours": ours("/checkpoints", state)}
    image = _image_of(contenders["ours"], shape)
    if mount is not None:
        contenders[PROGRAM] = Program(_made(mount, PROGRAM), state, image)
        contenders |= {name: CONTENDERS[name](_made(mount, name), state) for name in _PEERS if name != PROGRAM}
    with cluster.ring() as ring:
        chunks, directory = Chunks(ring, chains, image), str(cluster.directory)
        run = _Run(shape, state, ours, contenders, chunks, image, directory, mount, no_mount)
        with contextlib.closing(run):
            yield from _saves(run, _save_in_turns(options, run))
            expected = sums_of(state) if shape.only_two else []
            yield from _loads(run, "existing", _load_in_turns(options, run, "existing", expected))
            if shape.only_two:
                run.let_go()
            yield from _loads(run, "new", _load_in_turns(options, run, "new", expected))


def _image_of(files: Contender, shape: Shape) -> torch.Tensor:
    """Ready memory for who has no tensors."""
    assert isinstance(files, Ours)
    return files.image(shape.total_bytes) if shape.only_two else aligned(shape.total_bytes)


def _no_room_for_peers(shape: Shape, cluster: Cluster) -> str:
    """Of each two files, on each replica."""
    return missing_room(0, _REPLICAS * (2 * len(_PEERS) + 3) * shape.total_bytes, str(cluster.directory)) or ""


@contextlib.contextmanager
def _mounted(cluster: Cluster) -> Iterator[Mount]:
    place = cluster.directory / "place"
    place.mkdir()
    where = ["--manager", cluster.manager.address, "--secret-file", str(cluster.directory / "secret")]
    with mounted([sys.executable, "-P", "-m", "fireflyer", "fs", "mount", str(place), *where], str(place)) as mount:
        yield mount


def _made(mount: Mount, name: str) -> str:
    path = os.path.join(mount.path, name.replace(" ", "-"))
    os.mkdir(path)
    return path


_Turns = dict[str, list[Turn]]


def _save_in_turns(options: Options, run: _Run) -> _Turns:
    saves: _Turns = {name: [] for name in (*run.contenders, _CHUNKS, _DISK)}
    bounds = ((_CHUNKS, run.chunks.write), (_DISK, lambda: write_raw(run.raw, run.image)))
    for number in range(options.rounds + 1):
        for name, contender in run.contenders.items():
            turn = _with_mount(run, name, lambda contender=contender: contender.save(run.state))  # type: ignore[misc]
            contender.tidy()
            if number:  # the first round touches memory, and connects
                saves[name].append(turn)
        run.chunks.next_file()
        for name, work in bounds:
            turn = timed(work)
            if number:
                saves[name].append(turn)
    return saves


def _load_in_turns(options: Options, run: _Run, kind: str, expected: list[int]) -> _Turns:
    """Of what was saved last. `expected`: the sums of the state, where it has no copy."""
    target = run.state if expected else empty_like(run.state)
    names = [name for name in run.contenders if name != "DCP async"]  # its files are those of DCP
    loads: _Turns = {name: [] for name in (*names, _CHUNKS, _DISK)}
    into = target if kind == "existing" else None
    for number in range(options.rounds + 1):
        for name in names:
            contender = run.contenders[name]
            contender.tidy()
            for tensor in target.values():
                tensor.zero_()
            forget_pages(run.directory)  # storage processes read from the disk
            loaded: list[State] = []
            turn = _with_mount(run, name, functools.partial(_load, contender, into, loaded))
            right = sums_of(loaded[0]) == expected if expected else same(loaded[0], run.state)
            assert right, f"{name} has not loaded what was saved"
            loaded.clear()
            if number:
                loads[name].append(turn)
        for name, work in ((_CHUNKS, run.chunks.read), (_DISK, lambda: read_raw(run.raw, run.image))):
            forget_pages(run.directory)
            turn = timed(work)
            if number:
                loads[name].append(turn)
    return loads


def _load(contender: Contender, into: State | None, loaded: list[State]) -> None:
    loaded.append(contender.load(into))


def _with_mount(run: _Run, name: str, work: Callable[[], object]) -> Turn:
    before_s = run.mount_s(name)
    turn = timed(work)
    return turn._replace(processor_s=turn.processor_s + run.mount_s(name) - before_s)


def _shown(name: str) -> str:
    return name if name in ("ours", _CHUNKS, _DISK) else f"{name}, FUSE"


def _figures(run: _Run, turns: _Turns, take: Callable[[Turn], float]) -> _Figures:
    """Of all that took turns, and why those did not that need a mount."""
    found: _Figures = {_shown(name): figure([take(turn) for turn in some]) for name, some in turns.items()}
    if run.mount is None:
        found |= {_shown(name): f"not mounted: {run.no_mount}" for name in run.peers}
    return found


def _saves(run: _Run, turns: _Turns) -> list[Result]:
    save, stall, *_ = cases_of(run.shape)
    stalls = {name: some for name, some in turns.items() if name in ("ours", "DCP async")}
    stall_of = _figures(run, stalls, lambda turn: turn.stall_s)
    kept = ("ours", _shown("DCP async"))
    return [
        _judged(run.shape, save, "committed_s", _figures(run, turns, lambda turn: turn.elapsed_s)),
        _result(save, "processor_s", _figures(run, turns, lambda turn: turn.processor_s)),
        _result(stall, "stall_s", {name: one for name, one in stall_of.items() if name in kept}),
    ]


def _loads(run: _Run, kind: str, turns: _Turns) -> list[Result]:
    case = f"load/3FS/{run.shape.name}/{kind}"
    both = (
        _judged(run.shape, case, "loaded_s", _figures(run, turns, lambda turn: turn.elapsed_s), kind),
        _result(case, "processor_s", _figures(run, turns, lambda turn: turn.processor_s)),
    )
    return [_without(one, _shown("DCP async")) for one in both]


def _without(result: Result, peer: str) -> Result:
    result.peers.pop(peer, None)
    return result


def _peaks(
    options: Options, shape: Shape, ours: Callable[[str, State | None], Contender], mount: Mount | None, no_mount: str
) -> list[Result]:
    """Of each in processes of their own, which write to the same file system."""
    save, _, load, _ = cases_of(shape)
    saves: _Figures = {}
    loads: _Figures = {}

    @contextlib.contextmanager
    def on_files() -> Iterator[str]:
        yield "/peak"
        remover = ours("/peak", None)
        assert isinstance(remover, _OnFiles)
        remover.files.rmtree("/peak")
        remover.close()

    saves["ours"], loads["ours"] = peaks_of(ours, shape, options.rounds, on_files)
    for name in () if shape.only_two else _PEERS:
        shown = _shown(name)
        if mount is None:
            saves[shown] = loads[shown] = f"not mounted: {no_mount}"
            continue
        temporary = functools.partial(tempfile.TemporaryDirectory, prefix="peak-", dir=mount.path)
        saves[shown], loads[shown] = peaks_of(CONTENDERS[name], shape, options.rounds, temporary)
    return [_result(save, "peak_bytes", saves), _without(_result(load, "peak_bytes", loads), _shown("DCP async"))]


def _judged(shape: Shape, case: str, metric: str, figures: _Figures, kind: str = "existing") -> Result:
    """Loads into new tensors are not: the chunk client reads into memory that is there."""
    chunks, ours = figures[_CHUNKS], figures["ours"]
    assert isinstance(chunks, Figure)
    assert isinstance(ours, Figure)
    bound = Bound(chunks.median, "the same bytes from ready memory, or into it, by the chunk client alone")
    if not shape.judged or kind == "new":
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
