"""All of it, in the order of the tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from bench.collectives import allreduce, ddp, kernels, latency, memory, waiting
from bench.collectives.natives import Missing, open_mpi_version
from bench.report import Options, Result, Suite

__all__ = ["run"]

_FAMILIES: tuple[Callable[[Options], Iterator[Result]], ...] = (
    allreduce.run,
    latency.run,
    kernels.run,
    ddp.run,
    waiting.run,
    memory.run,
)


def run(options: Options) -> Suite:
    results = []
    for result in (result for family in _FAMILIES for result in family(options)):
        print(f"{result.case}: {result.metric} {result.ours.median:.6g}", file=sys.stderr, flush=True)
        results.append(result)
    return Suite(results=tuple(results), remarks=(_versions(),))


def _versions() -> str:
    try:
        gloo = f"gloo of torch {version('torch')}"
    except PackageNotFoundError:
        gloo = "torch is not installed"
    try:
        open_mpi = f"Open MPI {open_mpi_version()}"
    except Missing as error:
        open_mpi = str(error)
    return f"{gloo}; {open_mpi}; {os.cpu_count()} processors; one thread for each rank and library"
