"""The chunk store and its files over loopback, each figure beside its bound or its peer in the same run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Final

from bench.fs.cases import (
    basics,
    growth,
    incast,
    loading,
    many_chunks,
    many_names,
    mounted,
    names,
    record_sets,
    recovery,
    streams,
)
from bench.report import Options, Result, Suite, results_path, write_results

__all__ = ["run"]

_FAMILIES: Final[tuple[Callable[[Options], Iterator[Result]], ...]] = (
    basics.run,
    incast.run,
    recovery.run,
    growth.run,
    many_chunks.run,
    names.run,
    many_names.run,
    streams.run,
    loading.run,
    record_sets.run,
    mounted.run,
)


def run(options: Options) -> Suite:
    """Each result is in the file as soon as it is there: who ends a long run keeps what was measured."""
    path, results = results_path("fs"), list[Result]()
    for family in _FAMILIES:
        for result in family(options):
            print(f"{result.case}: {result.note}", file=sys.stderr, flush=True)
            results.append(result)
            write_results(path, results, keep=bool(options.only))
    load = os.getloadavg()[0]
    remarks = (f"{os.cpu_count()} processors, load at the end {load:.1f}", incast.missing())
    return Suite(results=tuple(results), remarks=tuple(remark for remark in remarks if remark))
