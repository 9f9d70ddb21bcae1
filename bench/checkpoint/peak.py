"""How much memory saving and loading take: each contender in a process of its own, whose state is there already.

The processes come from one that has imported everything and used nothing (multiprocessing's forkserver).
"""

from __future__ import annotations

import gc
import multiprocessing
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from bench.checkpoint.contenders import Contender
from bench.checkpoint.program import State
from bench.checkpoint.room import kib_of
from bench.checkpoint.states import Shape, touched_state
from bench.report import Figure, figure

__all__ = ["Peak", "peaks_of"]

Make = Callable[[str, State], Contender]


class Peak(NamedTuple):
    """Bytes that are resident beside the state, at the most."""

    save: int
    """During two saves, with what is kept for the next one."""
    load: int
    """During a load into the tensors that are there, beside what was kept."""


def _status(field: str) -> int:
    return kib_of(field, "/proc/self/status") << 10


def _reset_peak() -> int:
    """Returns what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _measure(make: Make, shape: Shape, directory: str) -> Peak:
    state = touched_state(shape.tensors, shape.size_bytes)
    before = _reset_peak()
    contender = make(directory, state)
    for _ in range(2):
        contender.save(state)
        contender.tidy()
    saved = _status("VmHWM") - before
    kept = _reset_peak()
    contender.load(state)
    return Peak(saved, _status("VmHWM") - kept)


def _tell(make: Make, shape: Shape, directory: str, answer: Connection) -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # it is meant
    try:
        answer.send(_measure(make, shape, directory))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def peaks_of(
    make: Make, shape: Shape, rounds: int, place: Callable[[], AbstractContextManager[str]]
) -> tuple[Figure | str, Figure | str]:
    """Saves and loads of the contender that `make`, which can be pickled, gives, each round in a process of its own and
    an empty directory, which `place` makes and removes; why there are none."""
    found: list[Peak] = []
    for _ in range(rounds):
        with place() as directory:
            peak = _peak_of(make, shape, directory)
        if isinstance(peak, str):
            return peak, peak
        found.append(peak)
    return figure([float(peak.save) for peak in found]), figure([float(peak.load) for peak in found])


def _peak_of(make: Make, shape: Shape, directory: str) -> Peak | str:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(make, shape, directory, theirs))
    process.start()
    theirs.close()
    try:
        told: Peak | str = ours.recv()
    except EOFError:
        told = "its process ended"
    process.join()
    return told
