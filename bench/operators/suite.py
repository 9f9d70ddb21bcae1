"""All cases of operators' commands."""

from __future__ import annotations

from bench.operators import fleet, health, reliability
from bench.report import Options, Suite

__all__ = ["run"]


def run(options: Options) -> Suite:
    parts = [health.run(options), reliability.run(options), fleet.run(options)]
    return Suite(
        results=tuple(result for part in parts for result in part.results),
        remarks=tuple(remark for part in parts for remark in part.remarks),
    )
