"""Codecs of tokens on one core, from bf16 and back, beside a copy of the same values, which moves more bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from bench.report import Options, Result, figure
from fireflyer import native
from fireflyer.base.units import MIB
from fireflyer.collectives.tokens import token_codec

__all__ = ["run"]

_WIDTH: Final = 7168
_BYTES: Final = {"tiny": MIB, "brief": 32 * MIB, "full": 256 * MIB}
_GOALS: Final = {
    "fp8": (2.0, 2.0),
    "fp8_ue8m0": (2.0, 2.0),
    "e5m6": (None, None),
    "logfmt8": (1 / 0.35, 2.0),
    "logfmt10": (1 / 0.35, 2.0),
}
"""Times of a copy in which AVX-512 should encode and decode."""


def run(options: Options) -> Iterator[Result]:
    for isa in native.isa_names():
        for codec, goals in _GOALS.items():
            case = f"codec/{codec}/{_BYTES[options.scale] // MIB}MiB/{isa}"
            if options.selects(case):
                yield from _measured(options, case, codec, goals, isa)


def _measured(
    options: Options, case: str, codec: str, goals: tuple[float | None, float | None], isa: str
) -> Iterator[Result]:
    rows = _BYTES[options.scale] // (2 * _WIDTH)
    chosen = token_codec(codec)
    drawn = np.random.default_rng(7).standard_normal(64 * _WIDTH, np.float32).view(np.uint32) >> 16
    values = np.resize(drawn.astype(np.uint16), (rows, _WIDTH))
    copied, decoded = np.zeros_like(values), np.zeros_like(values)  # touched
    payload = np.zeros((rows, chosen.row_bytes(_WIDTH)), np.uint8)
    what: dict[str, Callable[[], None]] = {
        "copy": lambda: np.copyto(copied, values),
        "encode": lambda: chosen.encode_rows(values, payload),
        "decode": lambda: chosen.decode_rows(payload, decoded),
    }
    before = native.active_isa()
    native.set_isa(isa)
    try:
        times: dict[str, list[float]] = {name: [] for name in what}
        for number in range(options.rounds + 1):
            for name, call in what.items():
                begun = time.perf_counter()
                call()
                if number:  # the first is a warm-up
                    times[name].append(time.perf_counter() - begun)
    finally:
        native.set_isa(before)
    copy = figure(times["copy"])
    for name, goal in zip(("encode", "decode"), goals, strict=True):
        ours = figure(times[name])
        applies = goal is not None and isa.startswith("avx512")
        yield Result(
            suite="collectives",
            case=f"{case}/{name}",
            metric="time_s",
            better="lower",
            ours=ours,
            peers={"copy": copy},
            bound=None,
            target="stated" if goal is None else f"AVX-512: at least {1 / goal:.0%} of the speed of a copy",
            note=f"{copy.median / ours.median:.0%} of a copy's speed",
            met=ours.median <= goal * copy.median if goal is not None and applies else None,
        )
