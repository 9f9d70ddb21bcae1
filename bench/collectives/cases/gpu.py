"""Allreduce of tensors on GPUs: piece by piece beside sums (ours), one step after the other (plain), and by NCCL.

Of ours there are two: the caller waits (ours), or starts the operation and waits then (started). They differ for short
tensors, which go from the calling thread if it waits, and have no spans.

The bound: every rank copies the size of its tensor down and up at once, from and to pinned memory, all ranks together.
Besides: how fast copies were while they were under way, and which part of that time sums were under way as well. Ranks
share GPUs where there are fewer. There are no cases without a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bench.collectives.contenders import python_ranks
from bench.collectives.crew import Crew
from bench.collectives.targets import Target, all_met, judged
from bench.collectives.turns import Contender, take_turns
from bench.report import Bound, Figure, Options, Result, figure, say
from fireflyer.base.units import KIB, MIB
from fireflyer.collectives.devices.pieces import AT_ONCE_BYTES

__all__ = ["run"]

_LAYOUTS: Final = {"tiny": ("1x2",), "brief": ("1x2",), "full": ("1x2", "1x4", "2x4", "1x8")}
_SIZES: Final = {"tiny": (MIB,), "brief": (186 * MIB,), "full": (186 * MIB, 25 * MIB, 4 * MIB, MIB, 4 * KIB)}
_DTYPES: Final = {"tiny": ("fp32",), "brief": ("fp32",), "full": ("fp32", "bf16")}
_WARM_UPS: Final = 2
_OF_SPANS: Final = (("down", "down_bytes_per_s"), ("up", "up_bytes_per_s"), ("share", "overlap_share"))


def run(options: Options) -> Iterator[Result]:
    for layout in _LAYOUTS[options.scale]:
        cases = [
            (dtype, size)
            for dtype in _DTYPES[options.scale]
            for size in _SIZES[options.scale]
            if options.selects(_name(layout, dtype, size))
        ]
        missing = _no_gpu() if cases else ""
        if missing:
            say(f"gpu/{layout}: {missing}")
        elif cases:
            with python_ranks(layout, "bench.collectives.ranks.gpu") as crew:
                nccl = str(crew.tell("join", "nccl")[0].get("missing", ""))
                for dtype, size in cases:
                    yield from _measure(_name(layout, dtype, size), crew, dtype, size, nccl, options)


def _no_gpu() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "there is no CUDA device"


def _measure(case: str, crew: Crew, dtype: str, size: int, nccl: str, options: Options) -> Iterator[Result]:
    crew.tell("prepare", dtype, size)
    names = ["started", "plain", *([] if nccl else ["nccl"])]
    contenders = [Contender(name, crew, name) for name in ("ours", *names)]
    contenders.append(Contender("copies", crew, "copies", verified=False))
    taken = take_turns(contenders, rounds=options.rounds, warm_ups=_WARM_UPS, loops=1)
    spans = []
    for _ in range(options.rounds if size > AT_ONCE_BYTES else 0):
        crew.tell("time", "ours", 1)
        spans.append(crew.tell("spans"))
    crew.tell("prepare", dtype, 0)
    ours, copies = taken["ours"].figure, taken["copies"].figure
    assert isinstance(ours, Figure)
    peers: dict[str, Figure | str] = {name: taken[name].figure for name in names} | ({"nccl": nccl} if nccl else {})
    words = f"every rank copies {size} bytes down and {size} up at once"
    bound = Bound(copies.median, words) if isinstance(copies, Figure) else None
    yield _result(case, "time_s", "lower", ours, peers, bound, (Target("plain", 1, "faster than plain"),))
    for key, metric in _OF_SPANS if spans else ():
        yield _result(case, metric, "higher", _of_all(spans, key), {}, None, ())


def _of_all(rounds: list[list[dict[str, Any]]], key: str) -> Figure:
    """The mean over ranks, by round."""
    return figure([sum(answer[key] for answer in answers) / len(answers) for answers in rounds])


def _result(
    case: str,
    metric: str,
    better: str,
    ours: Figure,
    peers: dict[str, Figure | str],
    bound: Bound | None,
    targets: tuple[Target, ...],
) -> Result:
    verdicts = judged(targets, ours, peers, bound)
    return Result(
        suite="collectives",
        case=case,
        metric=metric,
        better=better,
        ours=ours,
        peers=peers,
        bound=bound,
        target="; ".join(verdicts),
        met=all_met(verdicts),
        verdicts=verdicts,
    )


def _name(layout: str, dtype: str, size: int) -> str:
    amount = f"{size // MIB}MiB" if size >= MIB else f"{size // KIB}KiB"
    return f"gpu/{layout}/{dtype}/{amount}"
