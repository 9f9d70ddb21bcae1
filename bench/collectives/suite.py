"""All of it, in the order of the tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from bench.collectives.cases import allreduce, codecs, ddp, gpu, kernels, latency, memory, network, transports, waiting
from bench.natives import Missing, open_mpi_version
from bench.report import Measuring, Options, Result
from fireflyer.base.units import MIB

__all__ = ["machine", "run", "versions"]

_FAMILIES: tuple[Callable[[Options], Iterator[Result]], ...] = (
    allreduce.run,
    transports.run,
    latency.run,
    kernels.run,
    codecs.run,
    ddp.run,
    waiting.run,
    memory.run,
    gpu.run,
    network.run,
)


def run(options: Options) -> Measuring:
    for family in _FAMILIES:
        yield from family(options)
    return (machine(), versions(), *filter(None, [network.missing()]))


def machine() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "processor")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB
    load, _, _ = os.getloadavg()
    return (
        f"{os.cpu_count()} processors ({model}), {memory} MiB, Linux {platform.release()}; load at the end {load:.1f}"
    )


def versions() -> str:
    try:
        gloo = f"gloo of torch {version('torch')}"
    except PackageNotFoundError:
        gloo = "torch is not installed"
    try:
        open_mpi = f"Open MPI {open_mpi_version()}"
    except Missing as error:
        open_mpi = str(error)
    return f"{gloo}; {open_mpi}; one thread for each rank and library"
