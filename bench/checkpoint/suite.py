"""Checkpoints of one rank on the local disk, ours and those of peers in turns; and on 3FS (`cluster`).

`save/disk/SHAPE`: from the call until the checkpoint is durable; processor time of it, with the kernel's in our
threads; memory beside the state, at the most. `stall/disk/SHAPE`: how long the caller is held up.
`load/disk/SHAPE/existing` and `load/disk/SHAPE/new`: the newest checkpoint, from the disk, into tensors that are there
or into new memory. The second word of a case is where it is: `disk`, or `3FS`.
`agreement/RANKS/TENSORS`: what ranks tell each other (`bench.checkpoint.agreement`). `gpu/SHAPE` and `gpu/SHAPE/load`:
tensors on a GPU (`bench.checkpoint.gpu`).

Bounds: the disk (the same bytes with O_DIRECT from memory that is ready), and for stalls one copy of the tensors into
memory that is touched. Only ours and the DCP peers can be loaded without trusting what is in the file, and only ours
verifies it.
"""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch

from bench.checkpoint import agreement, cluster, gpu
from bench.checkpoint.contenders import CONTENDERS, PROGRAM, Contender, Ours, Program, empty_like
from bench.checkpoint.peak import peaks_of
from bench.checkpoint.program import copy_all, read_raw, write_raw
from bench.checkpoint.room import missing_room
from bench.checkpoint.states import SHAPES, Shape, free, random_state, same, sums_of
from bench.checkpoint.turns import Turn, timed
from bench.report import Bound, Figure, Measuring, Options, Result, figure, say

__all__ = ["run"]

_Samples = dict[str, list[float]]


class _Place(NamedTuple):
    """Of one shape: what is saved, who saves it, and what the bounds need."""

    shape: Shape
    state: dict[str, torch.Tensor]
    contenders: dict[str, Contender]
    directory: str
    image: torch.Tensor

    @property
    def raw(self) -> str:
        return os.path.join(self.directory, "raw")


def run(options: Options) -> Measuring:
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # it is meant
    for one in _all(options):
        if options.selects(one.case):
            yield one
    return (
        f"{os.cpu_count()} processors; torch {torch.__version__}, safetensors {safetensors.__version__}; DCP writes "
        "with two threads, its stager is reused; peers have no checksums and no commit",
        "processor time leaves out kernel threads that write pages back, which peers have and O_DIRECT has not",
    )


def _all(options: Options) -> Iterator[Result]:
    where = Path("build/bench")
    where.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES[options.scale]:
        for wanted, measure in ((_cases_of(shape), _measure), (cluster.cases_of(shape), cluster.measure)):
            if any(map(options.selects, wanted)):
                with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=where) as directory:
                    yield from measure(options, shape, os.path.abspath(directory))
    yield from agreement.run(options)
    yield from gpu.run(options)


def _cases_of(shape: Shape) -> tuple[str, ...]:
    of = f"disk/{shape.name}"
    return f"save/{of}", f"stall/{of}", f"load/{of}/existing", f"load/{of}/new"


def _measure(options: Options, shape: Shape, directory: str) -> Iterator[Result]:
    # Memory: the state, images of ours, of the program and of DCP, and what is loaded, which torch.load has twice; or
    # one image and what is loaded. Disk: for each two files, and the bound's.
    images, files = (2, 5) if shape.only_two else (6, 11)
    missing = missing_room(images * shape.total_bytes, files * shape.total_bytes, directory)
    if missing:
        say(f"disk/{shape.name} is not measured: {missing}")
        return
    yield from _times(options, shape, directory)  # whose memory is free again
    save, _, existing, _ = map(options.selects, _cases_of(shape))
    if save or existing:
        yield from _peaks(options, shape, directory)


def _times(options: Options, shape: Shape, directory: str) -> Iterator[Result]:
    state = random_state(shape.tensors, shape.size_bytes)
    contenders = _two(directory, state) if shape.only_two else _contenders(directory, state)
    program = contenders[PROGRAM]
    assert isinstance(program, Program)
    place = _Place(shape, state, contenders, directory, program.image)
    save, stall, existing, new = map(options.selects, _cases_of(shape))
    if save or stall:
        yield from _saves(options, place)
    else:
        _save_once(place)
    expected = sums_of(state) if shape.only_two else []
    if existing:
        yield from _loads(options, place, "existing", expected)
    if new and shape.only_two:
        _let_go(place)
    if new:
        yield from _loads(options, place, "new", expected)


def _let_go(place: _Place) -> None:
    """Of the state: what is loaded into new tensors takes its memory."""
    ours = place.contenders["ours"]
    assert isinstance(ours, Ours)
    ours.close()
    place.contenders["ours"] = Ours(os.path.join(place.directory, "ours"), None)
    del ours
    free(place.state)


def _contenders(directory: str, state: dict[str, torch.Tensor]) -> dict[str, Contender]:
    return {name: make(_subdirectory(directory, name), state) for name, make in CONTENDERS.items()}


def _two(directory: str, state: dict[str, torch.Tensor]) -> dict[str, Contender]:
    """Ours, and the program in the same memory."""
    ours = Ours(_subdirectory(directory, "ours"), state)
    image = ours.image(sum(tensor.nbytes for tensor in state.values()))
    return {"ours": ours, PROGRAM: Program(_subdirectory(directory, PROGRAM), state, image)}


def _subdirectory(directory: str, name: str) -> str:
    path = os.path.join(directory, name.replace(" ", "-"))
    os.mkdir(path)
    return path


def _saves(options: Options, place: _Place) -> list[Result]:
    turns: dict[str, list[Turn]] = {name: [] for name in (*place.contenders, "disk", "copy")}
    for number in range(options.rounds + 1):
        for name, contender in place.contenders.items():
            turn = timed(lambda contender=contender: contender.save(place.state))  # type: ignore[misc]
            contender.tidy()
            if number:  # the first round touches memory
                turns[name].append(turn)
        for name, work in (("disk", lambda: write_raw(place.raw, place.image)), ("copy", lambda: _copy(place))):
            turn = timed(work)
            if number:
                turns[name].append(turn)
    return [
        _committed(place.shape, turns),
        _processor(f"save/disk/{place.shape.name}", turns, place.shape),
        _stalls(place.shape, turns),
    ]


def _save_once(place: _Place) -> None:
    """What loads read."""
    for contender in place.contenders.values():
        contender.save(place.state)
        contender.tidy()
    write_raw(place.raw, place.image)


def _copy(place: _Place) -> None:
    copy_all(place.state, place.image)


def _elapsed(turns: dict[str, list[Turn]]) -> _Samples:
    return {name: [turn.elapsed_s for turn in some] for name, some in turns.items()}


def _committed(shape: Shape, turns: dict[str, list[Turn]]) -> Result:
    samples = _elapsed({name: some for name, some in turns.items() if name != "copy"})
    bound = Bound(figure(samples.pop("disk")).median, "the same bytes from ready memory with O_DIRECT, fsync")
    return _result(f"save/disk/{shape.name}", "committed_s", samples, bound, _limit(shape, PROGRAM, 1.3))


def _stalls(shape: Shape, turns: dict[str, list[Turn]]) -> Result:
    names = [name for name in ("ours", "DCP async") if name in turns]
    samples: _Samples = {name: [turn.stall_s for turn in turns[name]] for name in names}
    copy = figure([turn.elapsed_s for turn in turns["copy"]]).median
    bound = Bound(copy, "one copy of the tensors into touched memory")
    return _result(f"stall/disk/{shape.name}", "stall_s", samples, bound, _limit(shape, None, 1.2))


def _processor(case: str, turns: dict[str, list[Turn]], shape: Shape) -> Result:
    samples = {name: [turn.processor_s for turn in some] for name, some in turns.items() if name in CONTENDERS}
    gib = shape.total_bytes / (1 << 30)
    result = _result(case, "processor_s", samples, None)
    if case.startswith("load") or not shape.large:
        return result
    target = "at most 0.5 s for each GiB"
    return _judge(result, target, result.ours.median <= 0.5 * gib)


def _loads(options: Options, place: _Place, kind: str, expected: list[int]) -> list[Result]:
    """`expected`: the sums of the state, where it has no copy."""
    turns: dict[str, list[Turn]] = {name: [] for name in (*place.contenders, "disk")}
    target = place.state if expected else empty_like(place.state)
    for number in range(options.rounds + 1):
        for name, contender in place.contenders.items():
            if name == "DCP async":
                continue  # its files are those of DCP
            contender.tidy()  # the page cache has nothing of it
            for tensor in target.values():
                tensor.zero_()
            loaded: list[dict[str, torch.Tensor]] = []
            into = target if kind == "existing" else None
            turn = timed(lambda contender=contender, into=into, loaded=loaded: loaded.append(contender.load(into)))  # type: ignore[misc]
            right = sums_of(loaded[0]) == expected if expected else same(loaded[0], place.state)
            assert right, f"{name} has not loaded what was saved"
            loaded.clear()
            if number:
                turns[name].append(turn)
        turn = timed(lambda: read_raw(place.raw, place.image))
        if number:
            turns["disk"].append(turn)
    turns.pop("DCP async", None)
    case = f"load/disk/{place.shape.name}/{kind}"
    samples = _elapsed(turns)
    bound = Bound(figure(samples.pop("disk")).median, "the same bytes into ready memory with O_DIRECT")
    return [
        _result(case, "loaded_s", samples, bound, _limit(place.shape, PROGRAM, 1.3)),
        _processor(case, turns, place.shape),
    ]


def _peaks(options: Options, shape: Shape, directory: str) -> list[Result]:
    """Of each contender in processes of their own."""
    saves: dict[str, Figure | str] = {}
    loads: dict[str, Figure | str] = {}
    temporary = functools.partial(tempfile.TemporaryDirectory, prefix="peak-", dir=directory)
    for name in ("ours", PROGRAM) if shape.only_two else CONTENDERS:
        saves[name], loads[name] = peaks_of(CONTENDERS[name], shape, options.rounds, temporary)
    return [_peak(f"save/disk/{shape.name}", saves), _peak(f"load/disk/{shape.name}/existing", loads)]


def _peak(case: str, peers: dict[str, Figure | str]) -> Result:
    ours = peers.pop("ours")
    assert isinstance(ours, Figure), ours
    return Result(
        suite="checkpoint",
        case=case,
        metric="peak_bytes",
        better="lower",
        ours=ours,
        peers=peers,
        bound=None,
        target="",
    )


def _limit(shape: Shape, name: str | None, factor: float) -> tuple[str | None, float] | None:
    return (name, factor) if shape.judged else None


def _result(
    case: str, metric: str, samples: _Samples, bound: Bound | None, limit: tuple[str | None, float] | None = None
) -> Result:
    """`limit`: how many times the peer of that name, or the bound, ours may take."""
    figures = {name: figure(some) for name, some in samples.items()}
    ours = figures.pop("ours")
    result = Result(
        suite="checkpoint",
        case=case,
        metric=metric,
        better="lower",
        ours=ours,
        peers=dict(figures),
        bound=bound,
        target="",
    )
    if limit is None:
        return result
    name, factor = limit
    beside = figures[name].median if name else bound.value if bound else 0.0
    return _judge(result, f"at most {factor} x {name or 'the bound'}", ours.median <= factor * beside)


def _judge(result: Result, target: str, met: bool) -> Result:
    return Result(
        suite=result.suite, case=result.case, metric=result.metric, better=result.better, ours=result.ours,
        peers=result.peers, bound=result.bound, target=target, met=met, verdicts={target: met},
    )  # fmt: skip
