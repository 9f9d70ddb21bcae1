"""A training step as transfers over a network, alone and while a checkpoint is written. Pure.

Each data-parallel rank is a pipeline of its own (`codesign.schedule.pipeline_transfers`), the gradients of a stage are
an allreduce of its nodes (`collectives.traffic`) that begins with the last pass but one, as in the closed form, and a
checkpoint is written by all nodes at once (`fs.client.transfers`). What stays inside a node is time, not transfers:
communication of tensors and experts in the passes, sums in host memory, the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from fireflyer.base.units import MIB
from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel import NodeModel, ParallelPlan
from fireflyer.codesign.parallel.layout import pass_costs
from fireflyer.codesign.parallel.step import optimizer_seconds
from fireflyer.codesign.parallel.traffic import Link, Traffic, link_rate, stage_message_bytes, stage_traffic
from fireflyer.codesign.schedule import Costs, MessageBytes, Program, build_schedule, compile_schedule
from fireflyer.collectives import make_plan, traffic
from fireflyer.collectives.planning.plan import DEFAULT_CHUNK_BYTES
from fireflyer.netsim import Links, Settings, simulate
from fireflyer.planning.traffic import StorageLoad, replica_traffic, storage_traffic
from fireflyer.topology.fabrics import Fabric
from fireflyer.topology.traffic import Transfer

__all__ = [
    "MOST_TRANSFERS",
    "SimulatedStep",
    "StepTraffic",
    "checkpoint_load",
    "simulate_step",
    "step_traffic",
    "transfers_of",
]

MOST_TRANSFERS: Final = 100_000
"""That are simulated by default: some seconds of a processor."""
SUM_CHUNKS: Final = 64
"""Of an allreduce: so many follow one another through its trees, whatever their size."""
FILE_CHUNKS: Final = 64
"""Of the checkpoint of a node."""
LEAST_CHUNK: Final = MIB
ELEMENT_BYTES: Final = 4
TRAINING_LANE, STORAGE_LANE = 0, 1


class SimulatedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one step on the simulated network, seconds."""

    transfers: int
    """Number of transfers of training and storage, passes of the pipelines among them."""
    step_s: float
    """Time of the step alone on the network."""
    beside_checkpoint_s: float | None
    """Time of the step while a checkpoint is written, from the first sum of gradients on; None without storage."""
    checkpoint_s: float | None
    """Time from the begin of that checkpoint until the network has carried all its replicas; None without storage."""


class StepTraffic(NamedTuple):
    transfers: list[Transfer]
    gates: tuple[int, ...]
    """Numbers of the transfers with which sums of gradients begin, one for each node of a stage."""


class _Job(NamedTuple):
    plan: ParallelPlan
    shape: ModelShape
    node: NodeModel
    nodes: Sequence[int]
    """Of the fabric, in the order of ranks."""

    def node_of(self, stage: int, rank: int) -> int:
        return self.nodes[(stage * self.plan.stage_ranks + rank) // self.node.gpus]


def transfers_of(plan: ParallelPlan, node: NodeModel) -> int:
    """Passes and messages of the pipelines of a step, and its sums: about as many as `step_traffic` gives."""
    sums = 2 * SUM_CHUNKS * (plan.stage_ranks // node.gpus - 1) if plan.stage_ranks > node.gpus else 0
    pipelines = plan.stage_ranks * plan.micro_batches * (2 * plan.pieces + 2 * (plan.pieces - 1))
    return pipelines + plan.pipeline * sums


def simulate_step(
    fabric: Fabric,
    nodes: Sequence[int],
    node: NodeModel,
    plan: ParallelPlan,
    shape: ModelShape,
    settings: Settings,
    checkpoint: StorageLoad | None = None,
    *,
    storage_kind: str = "storage",
) -> SimulatedStep:
    """Of `plan` on these nodes of the fabric, in the order of ranks. `checkpoint`: what each of them writes meanwhile.
    Nodes send no faster than their NICs. Raises `UsageError` as the exports do."""
    training, gates = step_traffic(nodes, node, plan, shape)
    links = Links(fabric)
    slower = min(1.0, node.nics * node.nic_bytes_per_s / (len(links.hops[nodes[0]]) * fabric.link_bytes_per_s))
    own = set(nodes)
    ends = np.array([low in own or high in own for low, high in links.ends])
    capacities = np.where(ends, slower, 1.0) * links.capacities
    alone = simulate(fabric, training, settings, capacities=capacities)
    if checkpoint is None:
        return SimulatedStep(
            transfers=len(training), step_s=alone.makespan_s, beside_checkpoint_s=None, checkpoint_s=None
        )
    written = storage_traffic(
        fabric, nodes, checkpoint, seed=settings.seed, lane=STORAGE_LANE, first_id=len(training), kind=storage_kind
    )
    begin_s = float(alone.finish_s[list(gates)].min())
    written = [one if one.after else msgspec.structs.replace(one, delay_ns=round(begin_s * 1e9)) for one in written]
    shared = msgspec.structs.replace(settings, lane_weights=(1.0, 1.0))
    finish_s = simulate(fabric, training + written, shared, capacities=capacities).finish_s
    return SimulatedStep(
        transfers=len(training) + len(written),
        step_s=alone.makespan_s,
        beside_checkpoint_s=float(finish_s[: len(training)].max()),
        checkpoint_s=float(finish_s[len(training) :].max(initial=begin_s)) - begin_s,
    )


def checkpoint_load(nbytes: float, nodes: int, replicas: int) -> StorageLoad:
    """A checkpoint of `nbytes` in equal parts, in chunks so large that there are not too many of them."""
    each = max(1, round(nbytes / nodes))
    chunk = LEAST_CHUNK
    while chunk * FILE_CHUNKS < each:
        chunk *= 2
    return StorageLoad(access="write", nbytes=each, replicas=replicas, chunk_bytes=chunk)


def step_traffic(nodes: Sequence[int], node: NodeModel, plan: ParallelPlan, shape: ModelShape) -> StepTraffic:
    """Transfers of a step in lane 0, numbered from 0. Raises `UsageError` for more passes than a schedule may have."""
    job = _Job(plan, shape, node, nodes)
    program = compile_schedule(build_schedule(plan.schedule, plan.pipeline, plan.micro_batches, plan.chunks))
    found: list[Transfer] = []
    last: dict[tuple[int, int], list[int]] = {}
    before_last: dict[tuple[int, int], list[int]] = {}
    for places, replicas in _pipelines(job):
        first = len(found)
        found += replica_traffic(program, *_costs(job, program), places, replicas, lane=TRAINING_LANE, first_id=first)
        each = (len(found) - first) // replicas
        for replica in range(replicas):
            for stage, (row, place) in enumerate(zip(program.rows, places, strict=True)):
                base = first + replica * each
                last.setdefault((stage, place), []).append(base + row[-1])
                before_last.setdefault((stage, place), []).append(base + row[-2])
    connection = plan.stage_ranks * plan.pipeline**2
    gates: list[int] = []
    for stage in range(plan.pipeline):
        ready = {place: ids for (of, place), ids in before_last.items() if of == stage}
        ended = {place: ids for (of, place), ids in last.items() if of == stage}
        gates += range(len(found), len(found) + len(ready))
        found += _ending(job, stage, ready, ended, len(found), connection + 2 * stage)
    return StepTraffic(found, tuple(gates))


def _pipelines(job: _Job) -> list[tuple[tuple[int, ...], int]]:
    """Nodes of the stages, and how many pipelines have them."""
    counts: dict[tuple[int, ...], int] = {}
    for rank in range(job.plan.stage_ranks):
        places = tuple(job.node_of(stage, rank) for stage in range(job.plan.pipeline))
        counts[places] = counts.get(places, 0) + 1
    return list(counts.items())


def _costs(job: _Job, program: Program) -> tuple[Costs, MessageBytes]:
    plan = job.plan
    costs = pass_costs(plan, job.shape, job.node)
    sent = round(stage_message_bytes(plan, job.shape))
    sizes = (sent,) * (program.schedule.placement.stages - 1)
    return costs, MessageBytes(sizes, sizes)


def _ending(
    job: _Job,
    stage: int,
    ready: dict[int, list[int]],
    ended: dict[int, list[int]],
    first: int,
    first_connection: int,
) -> list[Transfer]:
    """Sums of a stage's gradients and its optimizer, the gates of its nodes first. `ready`, `ended`: by node, passes
    after which its sums begin, and its last passes."""
    sent = stage_traffic(job.plan, job.shape, job.node, stage)
    places = sorted(ready)
    found = [_work(first + at, place, ready[place], 0.0) for at, place in enumerate(places)]
    gate = dict(zip(places, found, strict=True))
    inside = _inside_seconds(job.node, sent)
    found += [_work(first + len(places) + at, place, [gate[place].id], inside) for at, place in enumerate(places)]
    arrived = {place: [*ended[place], found[len(places) + at].id] for at, place in enumerate(places)}
    nic = sum(sent.by_purpose[part].get("nic", 0.0) for part in ("gradients", "parameters"))
    if len(places) > 1 and nic:
        # Each node sends the array twice, less a part of its own.
        array_bytes = nic / job.node.allreduce_efficiency * len(places) / (2 * (len(places) - 1))
        larger = array_bytes / (SUM_CHUNKS * DEFAULT_CHUNK_BYTES)
        base = first + len(found)
        for one in traffic(
            make_plan(range(len(places))), "allreduce", SUM_CHUNKS * DEFAULT_CHUNK_BYTES // ELEMENT_BYTES
        ):
            source, target = places[one.source], places[one.target]
            after = (*(base + other for other in one.after), gate[source].id)
            connection = first_connection + (one.connection or 0)
            found.append(
                msgspec.structs.replace(
                    one,
                    id=base + one.id,
                    source=source,
                    target=target,
                    nbytes=round(one.nbytes * larger),
                    after=after,
                    connection=connection,
                )
            )
            arrived[target].append(base + one.id)
    optimizer = optimizer_seconds(job.plan, job.shape, job.node, stage)
    return found + [_work(first + len(found) + at, place, arrived[place], optimizer) for at, place in enumerate(places)]


def _inside_seconds(node: NodeModel, sent: Traffic) -> float:
    """Of sums and copies over the busiest link inside a node."""
    links: list[Link] = ["nvlink", "pcie", "host_bridge", "host_memory"]
    return sum(
        max(sent.by_purpose[part].get(link, 0.0) / link_rate(node, link) for link in links if link_rate(node, link))
        / node.allreduce_efficiency
        for part in ("gradients", "parameters")
    )


def _work(number: int, place: int, after: Sequence[int], seconds: float) -> Transfer:
    return Transfer(
        id=number, source=place, target=place, nbytes=0, after=tuple(after), delay_ns=round(seconds * 1e9),
        lane=TRAINING_LANE,
    )  # fmt: skip
