"""Paths between processors and memory of a node: copies from the memory of one NUMA node to that of another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.units import MIB, counted
from fireflyer.runtime.disk import RealDisk
from fireflyer.runtime.node_counters import read_meminfo
from fireflyer.topology import Machine, read_machine
from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.validation.paths import CpuSet, cpu_sets, path_name
from fireflyer.validators.core.validation.records import Found
from fireflyer.validators.stress.numa_memory import KERNEL, Kernel, memory_on, misplaced

__all__ = ["host_paths", "on_processors", "path_words"]

Words = NDArray[np.uint64]
_BYTES_OF_A_THREAD: Final = 64 * MIB
"""Beyond the share that a processor has of most caches."""
_SHARE_OF_MEMORY: Final = 0.25
_MIX: Final = 0x9E3779B97F4A7C15


class _Memory(NamedTuple):
    """Of one set of processors: where its threads have touched it first, and bound there."""

    source: Words
    target: Words
    problem: str
    """Why it may lie elsewhere."""


def host_paths(
    limit_s: float, *, machine: Machine | None = None, thread_bytes: int = _BYTES_OF_A_THREAD,
    disturb: Callable[[Words], None] | None = None, kernel: Kernel = KERNEL,
) -> Found:  # fmt: skip
    """The processors of each set copy memory of each set (their own too) into their own, one core a thread. A figure
    counts the bytes of what was copied once; what was copied is compared. `machine`: this one if None. `disturb` is
    called with what was copied, before it is compared: for tests. Could not run where memory does not stay on the NUMA
    node of its set: the figure would be of another path."""
    sets = cpu_sets(machine if machine is not None else read_machine(RealDisk()))
    available = read_meminfo().get("MemAvailable", 0) << 10
    threads = sum(len(one.cpus) for one in sets)
    words = max(512, min(thread_bytes, int(available * _SHARE_OF_MEMORY) // (2 * threads)) // 8)
    memories = {one.name: _memory_of(one, words * len(one.cpus), kernel) for one in sets}
    if problem := next((memory.problem for memory in memories.values() if memory.problem), ""):
        return Found(validator="paths", could_not_run=problem)
    share_s = limit_s / len(sets) ** 2
    figures: dict[str, float] = {}
    faults: list[Finding] = []
    for reader in sets:
        for owner in sets:
            name = path_name(owner.name, reader.name)
            source, target = memories[owner.name].source, memories[reader.name].target
            figures[name] = _copied(reader, source, target, share_s)
            if disturb is not None:
                disturb(target)
            if wrong := _wrong_words(source, target):
                said = f"{name.removesuffix('_bytes_per_s')}: {counted(wrong, 'word')} changed on the way"
                faults.append(Finding(severity="high", cause="wrong_word", words=said, at_once=True))
    if problem := next(filter(None, (_misplaced(one, memories[one.name], kernel) for one in sets)), ""):
        return Found(validator="paths", faults=tuple(faults), could_not_run=problem)
    return Found(validator="paths", figures=figures, faults=tuple(faults), words=path_words(figures))


def path_words(figures: dict[str, float]) -> str:
    """How many, and which is the slowest: `4 paths, the slowest numa1_to_numa0 with 31.2 GB/s`."""
    slowest = min(figures, key=lambda name: figures[name])
    place = slowest.removesuffix("_bytes_per_s")
    return f"{counted(len(figures), 'path')}, the slowest {place} with {figures[slowest] / 1e9:.1f} GB/s"


def on_processors(cpus: Sequence[int], work: Callable[[int], None]) -> None:
    """A thread on each of these processors; each is given its number. Raises what the first of them that failed has
    raised."""
    failed: list[BaseException] = []

    def pinned(number: int) -> None:
        try:
            os.sched_setaffinity(0, {cpus[number]})  # of this thread alone
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=pinned, args=(number,), daemon=True) for number in range(len(cpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _memory_of(owner: CpuSet, words: int, kernel: Kernel) -> _Memory:
    source, refused = memory_on(owner.node, words, kernel)
    target, _ = memory_on(owner.node, words, kernel)
    parts = len(owner.cpus)

    def touch(number: int) -> None:
        mine = _part(words, number, parts)
        source[mine] = np.arange(mine.start, mine.stop, dtype=np.uint64) * np.uint64(_MIX)
        target[mine] = 0

    on_processors(owner.cpus, touch)
    memory = _Memory(source, target, refused)
    return memory._replace(problem=refused or _misplaced(owner, memory, kernel))


def _misplaced(owner: CpuSet, memory: _Memory, kernel: Kernel) -> str:
    return misplaced(owner.node, memory.source, kernel) or misplaced(owner.node, memory.target, kernel)


def _copied(reader: CpuSet, source: Words, target: Words, limit_s: float) -> float:
    """Bytes a second. Memory of another set may have another size: as much is copied as fits."""
    words, parts = min(len(source), len(target)), len(reader.cpus)
    moved = [0] * parts
    target[:words] = 0  # of the path before
    began_s = time.monotonic()

    def work(number: int) -> None:
        mine = _part(words, number, parts)
        while not moved[number] or time.monotonic() < began_s + limit_s:
            np.copyto(target[mine], source[mine])
            moved[number] += (mine.stop - mine.start) * 8

    on_processors(reader.cpus, work)
    return sum(moved) / (time.monotonic() - began_s)


def _wrong_words(source: Words, target: Words) -> int:
    words = min(len(source), len(target))
    return int(np.count_nonzero(source[:words] != target[:words]))


def _part(words: int, number: int, parts: int) -> slice:
    return slice(words * number // parts, words * (number + 1) // parts)
