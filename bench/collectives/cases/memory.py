"""Memory that a library takes for itself: by ranks, and by bytes of the array.

A library is alone in its processes. What counts is the proportional set size of all its processes together (a page that
n of them share counts once), less what it was before the library was joined and less the arrays themselves: after
joining, and the most that was seen while arrays of a size were summed, over and over, for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from bench.collectives.contenders import node_list, open_mpi, python_ranks
from bench.collectives.crew import Crew
from bench.report import Figure, Options, Result
from fireflyer.base.units import KIB, MIB

__all__ = ["run"]

_LAYOUTS: Final = {"tiny": (), "brief": (), "full": ("1x2", "1x4", "1x8", "2x1")}
_SIZES: Final = (MIB, 25 * MIB, 186 * MIB)
_LOOPS: Final = 10
_SAMPLE_EVERY_S: Final = 0.02


def run(options: Options) -> Iterator[Result]:
    for layout in _LAYOUTS[options.scale]:
        names = {size: f"memory/{layout}/{size // MIB}MiB" for size in _SIZES}
        wanted = [size for size, name in names.items() if options.selects(name)]
        if not wanted:
            continue
        found = {library: _library(layout, library, wanted) for library in ("ours", "registered", "gloo", "openmpi")}
        for size in wanted:
            figures = {library: sizes if isinstance(sizes, str) else sizes[size] for library, sizes in found.items()}
            ours = figures.pop("ours")
            assert not isinstance(ours, str)
            registered = figures.pop("registered")
            yield Result(
                suite="collectives",
                case=names[size],
                metric="all_ranks_together_bytes",
                better="lower",
                ours=_single(ours),
                peers={name: value if isinstance(value, str) else _single(value) for name, value in figures.items()},
                bound=None,
                target="stated",
                more={"ours_registered_bytes": registered} if isinstance(registered, float) else {},
            )


def _single(value: float) -> Figure:
    return Figure(value, value, value, 1)


def _library(layout: str, library: str, sizes: list[int]) -> dict[int, float] | str:
    """The most bytes beside the arrays while each size was summed; or why it is not known."""
    ranks = len(node_list(layout))
    with ExitStack() as stack:
        if library == "openmpi":
            mpi = open_mpi("openmpi" if layout.startswith("1x") else "openmpi tcp", ranks, stack)
            if isinstance(mpi, str):
                return mpi
            return _sizes(mpi, "openmpi", 0, sizes)  # what MPI_Init takes cannot be told from what it was before
        crew = stack.enter_context(python_ranks(layout))
        if library == "gloo":
            missing = str(crew.tell("import_torch")[0].get("missing", ""))
            if missing:
                return missing
        crew.tell("prepare", "fp32", 4 * KIB, "private")  # what the benchmark itself needs
        before = _proportional_bytes(crew)
        crew.tell("join", "gloo" if library == "gloo" else "ours")
        if library == "registered" and not crew.tell("prepare", "fp32", 4 * KIB)[0]["registered"]:
            return "there are no registered arrays"
        return _sizes(crew, library, before, sizes)


def _sizes(crew: Crew, what: str, before: int, sizes: list[int]) -> dict[int, float]:
    found = {}
    if before == 0:
        crew.tell("prepare", "fp32", 4 * KIB)
        before = _proportional_bytes(crew)
    for size in sizes:
        arrays = crew.tell("prepare", "fp32", size, *([what] if what in ("ours", "registered", "gloo") else []))
        held = sum(answer.get("array_bytes", size) for answer in arrays)
        crew.order("time", what, _LOOPS)
        ended = threading.Event()
        most = [0]

        def sample(ended: threading.Event = ended, most: list[int] = most) -> None:
            while not ended.wait(_SAMPLE_EVERY_S):
                most[0] = max(most[0], _proportional_bytes(crew))

        thread = threading.Thread(target=sample)
        thread.start()
        crew.answers()
        ended.set()
        thread.join()
        found[size] = float(max(most[0], _proportional_bytes(crew)) - before - held)
    return found


def _proportional_bytes(crew: Crew) -> int:
    return sum(_of_process(member.pid) for member in crew.members)


def _of_process(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * KIB for line in file if line.startswith("Pss:"))
