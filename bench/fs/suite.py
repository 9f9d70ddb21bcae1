"""The chunk store and its files over loopback, each figure beside its bound or its peer in the same run."""

from __future__ import annotations

import os
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
from bench.report import Measuring, Options, Result

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


def run(options: Options) -> Measuring:
    for family in _FAMILIES:
        yield from family(options)
    remarks = (f"{os.cpu_count()} processors, load at the end {os.getloadavg()[0]:.1f}", incast.missing())
    return tuple(remark for remark in remarks if remark)
