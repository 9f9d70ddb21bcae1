"""All of it, in the order of the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from bench.collectives.suite import machine, versions
from bench.report import Measuring, Options, Result
from bench.training.cases import codecs, dispatch, fsdp, pipeline

__all__ = ["run"]

_FAMILIES: Final[tuple[Callable[[Options], Iterator[Result]], ...]] = (
    dispatch.run,
    pipeline.run,
    codecs.run,
    fsdp.run,
)


def run(options: Options) -> Measuring:
    for family in _FAMILIES:
        yield from family(options)
    return (machine(), versions())
