"""All cases of operators' commands."""

from __future__ import annotations

from bench.operators import fleet, health, reliability
from bench.report import Measuring, Options

__all__ = ["run"]


def run(options: Options) -> Measuring:
    remarks: tuple[str, ...] = ()
    for part in (health.run, reliability.run, fleet.run):
        remarks += yield from part(options)
    return remarks
