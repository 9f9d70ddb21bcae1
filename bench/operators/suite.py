"""All cases of operators' commands."""

from __future__ import annotations

from bench.operators import reliability
from bench.report import Options, Suite

__all__ = ["run"]


def run(options: Options) -> Suite:
    return reliability.run(options)
