"""Codecs of token rows on one core, beside a copy: the cases of the collectives' suite, with the tables of training."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from bench.collectives.cases import codecs
from bench.report import Options, Result

__all__ = ["run"]


def run(options: Options) -> Iterator[Result]:
    for result in codecs.run(options):
        verdicts = {} if result.met is None else {result.target: result.met}
        yield msgspec.structs.replace(result, suite="training", verdicts=verdicts)
