"""Paths of GPUs, by torch: from and to pinned memory of each NUMA node, to each other GPU, by itself and through the
host. The memory of the node to which a network card belongs is one of those."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from fireflyer.base.units import MIB
from fireflyer.runtime.disk import RealDisk
from fireflyer.topology import Machine, read_machine
from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.validation.paths import MAX_GPUS, numa_sets, path_name
from fireflyer.validators.core.validation.records import Found
from fireflyer.validators.stress.cuda import gpu_fault
from fireflyer.validators.stress.paths import on_processors, path_words

__all__ = ["gpu_paths"]

_BLOCK_BYTES: Final = 256 * MIB
_MIX: Final = 0x1E3779B97F4A7C15


class _Place(NamedTuple):
    """A GPU, or host memory of a set of processors, with two blocks of it."""

    name: str
    expected: Any
    """Has the same words in each place."""
    scratch: Any


class _Path(NamedTuple):
    name: str
    written: tuple[_Place, ...]
    """In their scratch; the last one is the end of the path."""
    copy: Callable[[], None]
    gpus: tuple[int, ...]


def gpu_paths(torch: Any, limit_s: float, *, machine: Machine | None = None, block_bytes: int = _BLOCK_BYTES) -> Found:
    """One block after the other over each path, which nothing else uses meanwhile. What arrives is compared. `machine`:
    this one if None. Raises `RuntimeError` for what CUDA says."""
    count = min(torch.cuda.device_count(), MAX_GPUS)
    gpus = [_place(torch, f"gpu{number}", block_bytes, device=f"cuda:{number}") for number in range(count)]
    hosts = _host_places(torch, machine if machine is not None else read_machine(RealDisk()), block_bytes)
    paths = [*_to_hosts(gpus, hosts), *_between(torch, gpus, hosts[0])]
    figures: dict[str, float] = {}
    faults: list[Finding] = []
    for path in paths:
        for place in path.written:
            place.scratch.zero_()
        figures[path.name] = block_bytes / _seconds(torch, path, limit_s / len(paths))
        if not bool(torch.equal(path.written[-1].scratch, path.written[-1].expected)):
            said = f"{path.name.removesuffix('_bytes_per_s')}: a block changed on the way"
            faults.append(_fault(torch, path, said))
    return Found(validator="gpu_paths", figures=figures, faults=tuple(faults), words=path_words(figures))


def _place(torch: Any, name: str, block_bytes: int, **where: Any) -> _Place:
    words = block_bytes // 8
    expected = torch.empty(words, dtype=torch.int64, **where)
    device = where.get("device", "cpu")
    expected.copy_(torch.arange(words, dtype=torch.int64, device=device) * _MIX)  # wraps in the same way everywhere
    return _Place(name, expected, torch.empty(words, dtype=torch.int64, **where))


def _host_places(torch: Any, machine: Machine, block_bytes: int) -> list[_Place]:
    """Pinned, and held until the end: torch would give freed memory to the next set. CUDA takes it where the thread
    runs that asks for it."""
    places: list[_Place] = []
    for one in numa_sets(machine):

        def take(_number: int, name: str = one.name) -> None:
            places.append(_place(torch, name, block_bytes, pin_memory=True))

        on_processors(one.cpus[:1], take)
    return places


def _to_hosts(gpus: list[_Place], hosts: list[_Place]) -> Iterator[_Path]:
    for number, gpu in enumerate(gpus):
        for host in hosts:
            yield _Path(path_name(host.name, gpu.name), (gpu,), _copying(host, gpu), (number,))
            yield _Path(path_name(gpu.name, host.name), (host,), _copying(gpu, host), (number,))


def _between(torch: Any, gpus: list[_Place], host: _Place) -> Iterator[_Path]:
    """Where the driver lets one GPU reach the other, by itself; always through the host."""
    for first, source in enumerate(gpus):
        for second, target in enumerate(gpus):
            if first == second:
                continue
            both = (first, second)
            if torch.cuda.can_device_access_peer(first, second):
                yield _Path(path_name(source.name, target.name), (target,), _copying(source, target), both)
            name = path_name(source.name, target.name, by_host=True)
            yield _Path(name, (host, target), _copying_by(source, host, target), both)


def _copying(source: _Place, target: _Place) -> Callable[[], None]:
    return lambda: target.scratch.copy_(source.expected, non_blocking=True)


def _copying_by(source: _Place, host: _Place, target: _Place) -> Callable[[], None]:
    def copy() -> None:
        host.scratch.copy_(source.expected)  # returns when it is there
        target.scratch.copy_(host.scratch, non_blocking=True)

    return copy


def _seconds(torch: Any, path: _Path, limit_s: float) -> float:
    """Of one block. The first one, which may map memory of a peer, is not counted."""
    _copy_once(torch, path)
    copies = 0
    began_s = time.monotonic()
    while not copies or time.monotonic() < began_s + limit_s:
        _copy_once(torch, path)
        copies += 1
    return (time.monotonic() - began_s) / copies


def _copy_once(torch: Any, path: _Path) -> None:
    path.copy()
    for gpu in path.gpus:
        torch.cuda.synchronize(gpu)


def _fault(torch: Any, path: _Path, words: str) -> Finding:
    if len(path.gpus) == 1:
        return gpu_fault(torch, path.gpus[0], "wrong_block", words)
    return Finding(severity="high", cause="wrong_block", words=words, at_once=True)
