"""Allreduce of large arrays: ours from private and from registered memory, gloo, Open MPI, and what the machine allows.

The bounds, measured in the same rounds: on one node the *floor*, in which every rank reads and writes a private array
of the size once in place, all at once (for fp8 at least the arithmetic of the kernel on all processors), and beside it
*process_vm*, plain programs with the system calls that private arrays take and no arithmetic; between nodes
*loopback*, plain TCP programs in a ring that send as many bytes as every node must at the least, and for arrays up to
4 MiB *tcp steps*, the same programs sending these bytes in the steps of a ring, each when the one before has arrived.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Final, NamedTuple

import msgspec

from bench.collectives.cases.kernels import kernel_rate
from bench.collectives.contenders import OPEN_MPI, node_list, open_mpi, python_ranks, tcp_ring, vm_exchange
from bench.collectives.crew import Crew
from bench.collectives.data import ELEMENT_BYTES
from bench.collectives.targets import Target, all_met, judged
from bench.collectives.turns import Contender, Taken, prepare_all, take_turns
from bench.report import Bound, Figure, Options, Result
from fireflyer.base.units import KIB, MIB

__all__ = ["run"]

PAPER_BYTES: Final = 186 * MIB
_ONE_NODE: Final = ("1x2", "1x4", "1x8")
_WARM_UPS: Final = 2
_MIDDLE_BYTES: Final = (4 * MIB, MIB, 256 * KIB, 64 * KIB)
"""Where a mailbox, slots, and whole arrays each are the fastest way somewhere."""
_LOOPED_BYTES: Final = 4 * MIB
_LOOPS: Final = 20
_MEMORIES: Final = {"private": "ours", "registered": "registered"}
_WAYS: Final = ("threads", "poll")
_STEPS: Final = "tcp steps"


class Case(NamedTuple):
    layout: str
    dtype: str
    size_bytes: int

    def name(self, memory: str) -> str:
        size, unit = (self.size_bytes // MIB, "MiB") if self.size_bytes >= MIB else (self.size_bytes // KIB, "KiB")
        return f"allreduce/{self.layout}/{memory}/{self.dtype}/{size}{unit}"


def run(options: Options) -> Iterator[Result]:
    chosen = [case for case in _cases(options.scale) if any(options.selects(case.name(memory)) for memory in _MEMORIES)]
    for layout, cases in groupby(chosen, key=lambda case: case.layout):
        with ExitStack() as stack:
            crews = _Crews(layout, stack)
            results = [result for case in cases for result in _measure(case, crews, options)]
            yield from _compare_halves(results)


def _cases(scale: str) -> list[Case]:
    if scale == "tiny":
        return [Case("1x2", "fp32", MIB), Case("2x1", "fp32", MIB)]
    if scale == "brief":
        return [Case(layout, "fp32", PAPER_BYTES) for layout in ("1x4", "2x1", "2x4")]
    small = [("fp32", size) for size in (25 * MIB, *_MIDDLE_BYTES)]
    cases = [
        Case(layout, *case)
        for layout in _ONE_NODE
        for case in [*((dtype, PAPER_BYTES) for dtype in ELEMENT_BYTES), *small]
    ]
    for layout in ("2x1", "2x4", "4x1"):
        cases += [Case(layout, *case) for case in [("fp32", PAPER_BYTES), ("bf16", PAPER_BYTES), *small]]
    return cases


class _Crews:
    """Everybody who takes part in a layout; they live for all of its cases."""

    def __init__(self, layout: str, stack: ExitStack) -> None:
        nodes = node_list(layout)
        self.world_size = len(nodes)
        self.nodes = max(nodes) + 1
        self.python = stack.enter_context(python_ranks(layout))
        self.python.tell("join", "ours")
        self.gloo_missing: str = self.python.tell("join", "gloo")[0].get("missing", "")
        one_rank_each = self.nodes == self.world_size
        settings = [name for name in OPEN_MPI if (name == "openmpi tcp") == one_rank_each]
        self.open_mpi: dict[str, Crew | str] = (
            {name: open_mpi(name, self.world_size, stack) for name in settings}
            if self.nodes == 1 or one_rank_each
            else {}
        )
        self.ring = tcp_ring(self.nodes, stack) if self.nodes > 1 else ""
        self.vm = vm_exchange(self.world_size, stack) if self.nodes == 1 else ""


def _measure(case: Case, crews: _Crews, options: Options) -> list[Result]:
    """Both kinds of memory in the same rounds, one result for each that was asked for."""
    registered = crews.python.tell("prepare", case.dtype, case.size_bytes)[0]["registered"]
    memories = [m for m in _MEMORIES if options.selects(case.name(m)) and (registered or m != "registered")]
    contenders = [Contender("ours" if m == "private" else f"ours {m}", crews.python, _MEMORIES[m]) for m in memories]
    missing: dict[str, str] = {}
    if case.dtype == "fp8":
        missing = {"gloo": "has no fp8"} | dict.fromkeys(crews.open_mpi, "has no fp8")
    else:
        missing = {"gloo": crews.gloo_missing} if crews.gloo_missing else {}
        missing |= {name: crew for name, crew in crews.open_mpi.items() if isinstance(crew, str)}
        if not crews.gloo_missing:
            contenders.append(Contender("gloo", crews.python, "gloo"))
        contenders += [
            Contender(name, crew, "openmpi") for name, crew in crews.open_mpi.items() if isinstance(crew, Crew)
        ]
    if isinstance(crews.vm, Crew):
        contenders.append(Contender("process_vm", crews.vm, "exchange", verified=False))
    elif crews.vm:
        missing["process_vm"] = crews.vm
    peers = ["gloo", *crews.open_mpi, *(["process_vm"] if crews.vm else [])]
    for contender in contenders:
        if contender.crew is not crews.python:
            contender.crew.tell("prepare", case.dtype, case.size_bytes)
    if crews.ring and case.size_bytes in _MIDDLE_BYTES:
        peers.append(_STEPS)
        if isinstance(crews.ring, Crew):
            contenders.append(Contender(_STEPS, crews.ring, "steps"))
        else:
            missing[_STEPS] = crews.ring
    contenders.append(Contender("floor", crews.python, "floor", verified=False))
    if isinstance(crews.ring, Crew):
        crews.ring.tell("prepare", "fp32", _sent_by_a_node(case, crews))
        contenders += [Contender(f"tcp {way}", crews.ring, way) for way in _WAYS]
    looped = case.size_bytes <= _LOOPED_BYTES
    taken = take_turns(contenders, rounds=options.rounds, warm_ups=_WARM_UPS, loops=_LOOPS if looped else 1)
    prepare_all(contenders, "fp32", 0)
    figures: dict[str, Figure | str] = {name: missing.get(name) or taken[name].figure for name in peers}
    return [_result(case, memory, figures, taken, crews) for memory in memories]


def _sent_by_a_node(case: Case, crews: _Crews) -> int:
    """The least that a node must send, and receive: 2 (nodes - 1) / nodes of the array; whole elements."""
    return case.size_bytes * 2 * (crews.nodes - 1) // crews.nodes // 4 * 4


def _result(case: Case, memory: str, peers: dict[str, Figure | str], taken: dict[str, Taken], crews: _Crews) -> Result:
    ours = taken["ours" if memory == "private" else f"ours {memory}"].figure
    assert isinstance(ours, Figure)
    bound = _bound(case, taken, crews)
    verdicts = judged(_targets(case, memory, crews), ours, peers, bound)
    n = crews.world_size
    return Result(
        suite="collectives",
        case=case.name(memory),
        metric="time_s",
        better="lower",
        ours=ours,
        peers=peers,
        bound=bound,
        target="; ".join(verdicts),
        met=all_met(verdicts),
        verdicts=verdicts,
        more={
            "algorithm_bytes_per_s": case.size_bytes / ours.median,
            "bus_bytes_per_s": case.size_bytes / ours.median * 2 * (n - 1) / n,
            "memory_bytes_per_s": 2 * n * case.size_bytes / _median(taken["floor"]),
        },
    )


def _bound(case: Case, taken: dict[str, Taken], crews: _Crews) -> Bound | None:
    n = crews.world_size
    floor = _median(taken["floor"])
    floor_words = f"{n} ranks read and write {case.size_bytes} bytes in place at once"
    if crews.nodes == 1:
        rate = kernel_rate("f8e4m3", n) if case.dtype == "fp8" else None
        if rate is None:
            return Bound(floor, floor_words)
        processors = min(n, os.cpu_count() or 1)
        arithmetic = n * case.size_bytes / (rate * processors)
        return Bound(max(floor, arithmetic), f"the larger of: {floor_words}; arithmetic on {processors} processors")
    ways = [way for way in _WAYS if f"tcp {way}" in taken and not taken[f"tcp {way}"].failure]
    if not ways:
        return None
    fastest = min(ways, key=lambda way: _median(taken[f"tcp {way}"]))
    loopback = _median(taken[f"tcp {fastest}"])
    others = "".join(f", by {way} {_median(taken[f'tcp {way}']):.6f} s" for way in ways if way != fastest)
    sent = _sent_by_a_node(case, crews)
    loopback_words = f"{crews.nodes} plain programs (by {fastest}{others}) each send {sent} bytes by loopback TCP"
    if crews.nodes == n:
        return Bound(loopback, loopback_words)
    return Bound(floor + loopback, f"{floor_words}, and then {loopback_words}")


def _targets(case: Case, memory: str, crews: _Crews) -> tuple[Target, ...]:
    faster = Target.times_faster
    middle = (faster("best openmpi", 1),) if case.size_bytes in _MIDDLE_BYTES and memory == "private" else ()
    if crews.nodes > 1 and crews.nodes == crews.world_size:
        if case.size_bytes != PAPER_BYTES:
            return (faster("gloo", 1), *middle)
        if case.dtype == "bf16":
            return (Target.within(1.5, "loopback"), faster("gloo", 1))
        reaches = (Target("bound", 1.25, "at least 80 % of loopback's speed"),) if crews.nodes == 2 else ()
        return (*reaches, faster("gloo", 1))
    if crews.nodes > 1:
        return (Target.within(1.25, "floor + loopback"),) if memory == "registered" else ()
    if case.size_bytes != PAPER_BYTES:
        return (faster("gloo", 1), *middle)
    if memory == "registered":
        within = Target.within(1.3, "the floor or the arithmetic" if case.dtype == "fp8" else "the floor")
        return (within,) if case.dtype == "fp8" else (faster("gloo", 10), within)
    if case.dtype == "fp8":
        return (Target("process_vm", 1.5, "at most 1.5 x process_vm"),)
    return (faster("gloo", 5),) if case.dtype == "fp16" else (faster("gloo", 5), faster("best openmpi", 3.5))


def _compare_halves(results: Sequence[Result]) -> Iterator[Result]:
    """Adds to fp16 what it is to reach beside bf16."""
    medians = {result.case: result.ours.median for result in results}
    for result in results:
        other = medians.get(result.case.replace("/fp16/", "/bf16/"))
        if "/fp16/" not in result.case or other is None:
            yield result
            continue
        verdicts = result.verdicts | {"within 1.5 x bf16": result.ours.median <= 1.5 * other}
        yield _with_verdicts(result, verdicts)


def _with_verdicts(result: Result, verdicts: dict[str, bool | None]) -> Result:
    return msgspec.structs.replace(result, verdicts=verdicts, target="; ".join(verdicts), met=all_met(verdicts))


def _median(taken: Taken) -> float:
    found = taken.figure
    return found.median if isinstance(found, Figure) else float("nan")
