"""Several hosts with real links between them: network namespaces on this machine; ours by each algorithm beside gloo.

Two families. *Bandwidth*: every host sends and receives at a fixed rate (token buckets). *Latency*: every frame arrives
a fixed time after it was sent (a switch of ours in user space, the same for all), and arrays are small, so that what
counts is how many messages come one after the other. See `tests.support.network.namespaces`.

Ours means the plan that `collectives.planning.routing` makes of the declared speeds; the others are what it was chosen
from.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Final, NamedTuple

import msgspec
from tests.support.network import namespaces
from tests.support.network.namespaces import Network, delayed_network_of, network_of

from bench.collectives.contenders import python_ranks, tcp_ring
from bench.collectives.crew import Crew
from bench.collectives.targets import Target, all_met, judged
from bench.collectives.turns import Contender, Taken, prepare_all, take_turns
from bench.report import Bound, Figure, Options, Result
from fireflyer.base.units import KIB, MIB, format_bytes
from fireflyer.collectives import Plan
from fireflyer.collectives.planning.cost import Layout, Speeds, predict_ns
from fireflyer.collectives.planning.plan import HALVING_DOUBLING, RING, TREE
from fireflyer.collectives.planning.routing import plan_for

__all__ = ["missing", "run"]

_MODULE: Final = "bench.collectives.ranks.network"
_ALGORITHMS: Final = {"tree": TREE, "ring": RING, "halving": HALVING_DOUBLING}
_WARM_UPS: Final = 1
_PAYLOAD: Final = 1448 / 1514
"""Of the bytes on a link; what a person would declare."""
_WAKING_NS: Final = 60_000.0
"""Of a process of another host, where the hosts share the processors."""
_DELAY_US: Final = 1000.0
_LOOPS: Final = 20
_WAYS: Final = ("threads", "poll")


class Link(NamedTuple):
    """What is between the hosts, and the arrays that are summed over it."""

    name: str
    sizes: tuple[int, ...]
    bits_per_s: float = 0.0
    """0: not limited, but delayed."""

    @property
    def speeds(self) -> Speeds:
        if not self.bits_per_s:
            return Speeds(latency_ns=_DELAY_US * 1000 + _WAKING_NS)
        return Speeds(latency_ns=_WAKING_NS, bytes_per_s=self.bits_per_s / 8 * _PAYLOAD)


_GIGABIT: Final = Link("1Gbit", (64 * MIB,), 1e9)
_TENTH: Final = Link("100Mbit", (6 * MIB,), 1e8)
_DELAYED: Final = Link("1ms", (8, 4 * KIB, 64 * KIB))
_LINKS: Final = {
    "tiny": (_GIGABIT._replace(sizes=(MIB,)), _DELAYED._replace(sizes=(8,))),
    "brief": (_GIGABIT, _DELAYED),
    "full": (_GIGABIT, _TENTH, _DELAYED),
}
_HOSTS: Final = {"tiny": (2,), "brief": (4,), "full": (2, 4, 8)}


def missing() -> str:
    return namespaces.missing()


def run(options: Options) -> Iterator[Result]:
    for link in _LINKS[options.scale] if not missing() else ():
        for hosts in _HOSTS[options.scale]:
            sizes = [size for size in link.sizes if options.selects(_name(link, hosts, size))]
            if sizes:
                with ExitStack() as stack:
                    yield from _measure(link, hosts, sizes, options, stack)


def _measure(link: Link, hosts: int, sizes: list[int], options: Options, stack: ExitStack) -> Iterator[Result]:
    network = stack.enter_context(
        network_of(hosts, rate_bits_per_s=link.bits_per_s)
        if link.bits_per_s
        else delayed_network_of(hosts, delay_us=_DELAY_US)
    )
    plans = _plans(link.speeds, hosts)
    crew = stack.enter_context(python_ranks(f"{hosts}x1", _MODULE, network=network))
    _join(crew, plans, stack)
    gloo_missing = str(crew.tell("join", "gloo")[0].get("missing", ""))
    contenders = [Contender(f"ours {name}", crew, name) for name in plans]
    contenders += [] if gloo_missing else [Contender("gloo", crew, "gloo")]
    plain = _plain_programs(link, hosts, network, stack)
    for size in sizes:
        prepare_all(contenders, "fp32", size)
        if isinstance(plain, Crew):
            plain.tell("prepare", "fp32", _least_sent(size, hosts))
        more = [Contender(f"tcp {way}", plain, way) for way in _WAYS] if isinstance(plain, Crew) else []
        loops = 1 if link.bits_per_s else _LOOPS
        taken = take_turns([*contenders, *more], rounds=options.rounds, warm_ups=_WARM_UPS, loops=loops)
        yield _result(link, hosts, size, plans, taken, gloo_missing)


def _plans(speeds: Speeds, hosts: int) -> dict[str, Plan]:
    nodes = list(range(hosts))
    plans = {"chosen": plan_for(nodes, speeds)}
    return plans | {name: plan_for(nodes, speeds, only=[algorithm]) for name, algorithm in _ALGORITHMS.items()}


def _join(crew: Crew, plans: Mapping[str, Plan], stack: ExitStack) -> None:
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    crew.tell("join", "ours")  # for the barriers
    for name, plan in plans.items():
        path = os.path.join(directory, name)
        with open(path, "wb") as file:
            file.write(msgspec.json.encode(plan))
        crew.tell("join_plan", name, path)


def _plain_programs(link: Link, hosts: int, network: Network, stack: ExitStack) -> Crew | str:
    return tcp_ring(hosts, stack, network) if link.bits_per_s else ""


def _least_sent(size: int, hosts: int) -> int:
    """By every host, whatever the algorithm; whole elements."""
    return size * 2 * (hosts - 1) // hosts // 4 * 4


def _result(
    link: Link, hosts: int, size: int, plans: Mapping[str, Plan], taken: Mapping[str, Taken], gloo_missing: str
) -> Result:
    ours = taken["ours chosen"].figure
    assert isinstance(ours, Figure)
    route = plans["chosen"].route("allreduce", size)
    peers: dict[str, Figure | str] = {"gloo": gloo_missing or taken["gloo"].figure}
    peers |= {f"ours as {name}": taken[f"ours {name}"].figure for name in _ALGORITHMS}
    bound = _bound(link, hosts, size, taken)
    verdicts = judged((Target.times_faster("gloo", 1),), ours, peers, bound)
    bus = {"bus_bytes_per_s": size / ours.median * 2 * (hosts - 1) / hosts} if link.bits_per_s else {}
    return Result(
        suite="collectives",
        case=_name(link, hosts, size),
        note=f"{route.algorithm}, {format_bytes(route.chunk_bytes)}",
        metric="time_s",
        better="lower",
        ours=ours,
        peers=peers,
        bound=bound,
        target="; ".join(verdicts),
        met=all_met(verdicts),
        verdicts=verdicts,
        more=bus | {f"{name}_predicted_s": _predicted_s(link, hosts, size, plans[name]) for name in _ALGORITHMS},
    )


def _predicted_s(link: Link, hosts: int, size: int, plan: Plan) -> float:
    route = plan.route("allreduce", size)
    layout = Layout(nodes=hosts, window=plan.window)
    return predict_ns(link.speeds, layout, "allreduce", route.algorithm, size, route.chunk_bytes) / 1e9


def _bound(link: Link, hosts: int, size: int, taken: Mapping[str, Taken]) -> Bound | None:
    if not link.bits_per_s:
        levels = math.ceil(math.log2(hosts))
        return Bound(levels * _DELAY_US / 1e6, f"{levels} messages one after the other (log2 of the hosts)")
    figures = {way: taken[f"tcp {way}"].figure for way in _WAYS if f"tcp {way}" in taken}
    found = {way: figure.median for way, figure in figures.items() if isinstance(figure, Figure)}
    if not found:
        return None
    way = min(found, key=lambda name: found[name])
    return Bound(found[way], f"{hosts} plain programs (by {way}) each send {_least_sent(size, hosts)} bytes over TCP")


def _name(link: Link, hosts: int, size: int) -> str:
    text = f"{size // MIB}MiB" if size >= MIB else f"{size // KIB}KiB" if size >= KIB else f"{size}B"
    return f"netns/{link.name}/{hosts}x1/fp32/{text}"
