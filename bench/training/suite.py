"""All of it, in the order of the tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Final

from bench.collectives.suite import machine, versions
from bench.report import Options, Result, Suite
from bench.training.cases import codecs, dispatch, fsdp, pipeline

__all__ = ["run"]

_FAMILIES: Final[tuple[Callable[[Options], Iterator[Result]], ...]] = (
    dispatch.run,
    pipeline.run,
    codecs.run,
    fsdp.run,
)


def run(options: Options) -> Suite:
    results = []
    for result in (result for family in _FAMILIES for result in family(options)):
        print(f"{result.case}: {result.metric} {result.ours.median:.6g}", file=sys.stderr, flush=True)
        results.append(result)
    return Suite(results=tuple(results), remarks=(machine(), versions()))
