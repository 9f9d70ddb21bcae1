"""What it costs that ranks agree on a checkpoint, by itself: `agreement/RANKS/TENSORS`.

The tensors have one element and the disk keeps nothing (`agreeing`), so what is left of a save is who writes what, that
each rank is done, and that the checkpoint is committed. Until the last rank has heard of that; the first save, in which
everybody forms the plan that later ones use again, is a warm-up. Beside it DCP's planning with a writer that writes
nothing, with and without its cache of plans, and as many bytes as our ranks tell each other by `all_gather_object`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.collectives.contenders import python_ranks
from bench.report import Options, Result, figure

__all__ = ["run"]

_RANKS: Final = (2, 4)
_TENSORS: Final = {"tiny": (50,), "brief": (64, 1_000), "full": (64, 10_000)}
_PEERS: Final = {"DCP": "dcp", "DCP, plans cached": "dcp_cached", "all_gather_object": "gloo"}


def run(options: Options) -> Iterator[Result]:
    for ranks in _RANKS:
        chosen = [count for count in _TENSORS[options.scale] if options.selects(_case(ranks, count))]
        if chosen:
            with python_ranks(f"1x{ranks}", "bench.checkpoint.agreeing") as crew:
                for count in chosen:
                    crew.tell("prepare", count)
                    samples: dict[str, list[float]] = {name: [] for name in ("ours", *_PEERS)}
                    for number in range(options.rounds + 1):
                        for name, times in samples.items():
                            answers = crew.tell(_PEERS.get(name, name))
                            if number:
                                times.append(max(one["seconds"] for one in answers))
                    yield _result(_case(ranks, count), samples)


def _case(ranks: int, tensors: int) -> str:
    return f"agreement/{ranks}-ranks/{tensors}-tensors"


def _result(case: str, samples: dict[str, list[float]]) -> Result:
    peers = {name: figure(times) for name, times in samples.items() if name != "ours"}
    return Result(
        suite="checkpoint", case=case, metric="agreed_s", better="lower", ours=figure(samples["ours"]),
        peers=dict(peers), bound=None, target="",
    )  # fmt: skip
