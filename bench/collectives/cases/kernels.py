"""Rate of the summing kernels on one core, data in its cache, from C++; by processor time: others do not count."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
from collections.abc import Iterator
from typing import Any

from bench.natives import Missing, program
from bench.report import Options, Result, figure

__all__ = ["kernel_rate", "run"]


def run(options: Options) -> Iterator[Result]:
    if not options.selects("kernel/") or (options.scale != "full" and not options.only):
        return
    for found in _rates():
        yield Result(
            suite="collectives",
            case=f"kernel/sum/{found['dtype']}/{found['inputs']} inputs/{found['isa']}",
            metric="read_bytes_per_s",
            better="higher",
            ours=figure(found["bytes_per_s"]),
            peers={},
            bound=None,
            target="stated; fp8 is limited by it",
        )


def kernel_rate(dtype: str, inputs: int) -> float | None:
    """Bytes read per second by one core; None where the program cannot be built or the count was not measured."""
    for found in _rates():
        if found["dtype"] == dtype and found["inputs"] == inputs:
            return float(statistics.median(found["bytes_per_s"]))
    return None


@functools.cache
def _rates() -> tuple[dict[str, Any], ...]:
    try:
        said = subprocess.run(
            [program("collectives", "kernel_rate")], capture_output=True, text=True, check=True
        ).stdout
    except Missing as error:
        raise SystemExit(f"the kernels cannot be measured: {error}") from error
    return tuple(json.loads(line) for line in said.splitlines())
