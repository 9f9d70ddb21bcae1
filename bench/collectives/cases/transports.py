"""What carries data between nodes: ours over TCP beside ours over UCX, with UCX's own tcp and its shared memory.

The same allreduce between two nodes of one rank each, in turn. There is no RDMA device here: what is shown is what the
way through UCX costs, not what it gains.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from bench.collectives.contenders import python_ranks, tcp_ring
from bench.collectives.crew import Crew
from bench.collectives.turns import Contender, prepare_all, take_turns
from bench.report import Bound, Figure, Options, Result
from fireflyer.base.units import KIB, MIB
from fireflyer.native import ucx_module

__all__ = ["run"]

_LAYOUT: Final = "2x1"
_SIZES: Final = {
    "tiny": (MIB,),
    "brief": (186 * MIB,),
    "full": (186 * MIB, 25 * MIB, MIB, 64 * KIB),
}
_LOOPED_BYTES: Final = 4 * MIB
_LOOPS: Final = 50
_WARM_UPS: Final = 2
_UCX: Final = {"ucx tcp": "tcp", "ucx shm": "shm"}
_WAYS: Final = ("threads", "poll")


def run(options: Options) -> Iterator[Result]:
    sizes = [size for size in _SIZES[options.scale] if options.selects(_name(size))]
    if sizes:
        with ExitStack() as stack:
            yield from _measure(sizes, options, stack)


def _measure(sizes: list[int], options: Options, stack: ExitStack) -> Iterator[Result]:
    missing = "" if os.path.exists(ucx_module()) else "this build has no UCX (Debian: libucx-dev)"
    crews = {"ours": stack.enter_context(python_ranks(_LAYOUT))}
    for name, tls in {} if missing else _UCX.items():
        crews[name] = stack.enter_context(python_ranks(_LAYOUT, transport="ucx", ucx_tls=tls))
    for crew in crews.values():
        crew.tell("join", "ours")
    ring = tcp_ring(2, stack)
    plain = [Contender(f"plain {way}", ring, way, verified=False) for way in _WAYS] if isinstance(ring, Crew) else []
    contenders = [Contender(name, crew, "ours") for name, crew in crews.items()]
    for size in sizes:
        prepare_all([*contenders, *plain], "fp32", size)
        loops = _LOOPS if size < _LOOPED_BYTES else 1
        taken = take_turns([*contenders, *plain], rounds=options.rounds, warm_ups=_WARM_UPS, loops=loops)
        prepare_all([*contenders, *plain], "fp32", 0)
        ours = taken["ours"].figure
        assert isinstance(ours, Figure)
        loopback = [found.median for one in plain if isinstance(found := taken[one.name].figure, Figure)]
        yield Result(
            suite="collectives",
            case=_name(size),
            metric="time_s",
            better="lower",
            ours=ours,
            peers={name: missing or taken[name].figure for name in _UCX},
            bound=Bound(min(loopback), f"2 plain programs each send {size} bytes by loopback TCP")
            if loopback
            else None,
            target="",
        )


def _name(size: int) -> str:
    return f"transports/{_LAYOUT}/{f'{size // MIB}MiB' if size >= MIB else f'{size // KIB}KiB'}"
