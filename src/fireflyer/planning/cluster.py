"""One answer for a cluster: a network, its nodes, a training run, its failures, its checkpoints and its cost. Pure.

The parts are those of other modules; what is here is how they meet: the network gives a node its rate, the rate gives
the step, failures and checkpoints stretch the run, and what runs so long has a price.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from fireflyer.analytics.ettr import DAY_S, daly_young_interval_s, failure_rate_per_s, renewal_ettr
from fireflyer.analytics.reliability.planning import Requirements, best_ettr, optimal_period_s, requirements
from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import ModelShape, count_parameters
from fireflyer.codesign.parallel import NodeModel, ParallelPlan, StepEstimate, estimate_step, refusals
from fireflyer.netsim import Settings, first_rates, pattern_transfers
from fireflyer.planning.amounts import Amount, amount_of
from fireflyer.planning.costs import CableBill, Ownership
from fireflyer.planning.network_file import NetworkFile
from fireflyer.planning.networks import network_costs
from fireflyer.planning.prices import PriceList, SourcedValue
from fireflyer.planning.step_traffic import SimulatedStep, checkpoint_load, simulate_step, transfers_of
from fireflyer.planning.traffic import MAX_STORAGE_NODES, nodes_of_kind
from fireflyer.topology.fabrics import Fabric, NodeGroup

__all__ = ["CheckpointPart", "ClusterAnswer", "ClusterPlan", "CostAnswer", "FailureAnswer", "StoragePart"]
__all__ += ["TrainingPart", "plan_cluster", "ring_of", "with_simulation"]

MOST_RING_NODES: Final = 4096
"""In the ring whose slowest flow is simulated."""
HOUR_S: Final = 3600.0
LEAST_ETTR: Final = 0.01
"""Below it a run is not called one."""


class TrainingPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[training]`: the run whose time is asked for."""

    plan: str
    """File of `ff train plan`, from the directory of this file."""
    tokens: float
    """Tokens that the whole run trains on."""


class CheckpointPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[checkpoint]`: times of a save and of a restart, period and size."""

    stall_s: float
    """Time by which a save delays training, seconds."""
    restart_s: float
    """Time from a failure until training steps go on, seconds."""
    period_s: float | None = None
    """Time between saves, seconds; None: the nearly optimal one (Daly and Young)."""
    bytes_per_parameter: float = 14.0
    """bf16 weights, and fp32 master weights and two moments."""


class StoragePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[storage]`: the nodes to which checkpoints are written."""

    kind: str = "storage"
    """Kind of the storage nodes in the network."""
    write_bytes_per_s: float
    """Write bandwidth of all disks of one node."""
    replicas: int = 2


class ClusterPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The TOML file of `ff plan cluster`."""

    name: str
    network: str
    """Shipped network, or file."""
    node: str
    """Shipped node of `ff train plan`, or file."""
    gpu_kind: str = "gpu"
    """Kind of the nodes with GPUs in the network."""
    training: TrainingPart
    checkpoint: CheckpointPart
    failures_per_1000_node_days: float | tuple[float, float]
    """Failures that end a job, for 1000 days of a node; two numbers are a range. Clusters of arXiv:2410.21680 had
    6.5."""
    storage: StoragePart | None = None
    prices: str | None = None
    rent_per_gpu_hour: SourcedValue | None = None
    """None: that of the prices."""

    def __post_init__(self) -> None:
        amount_of(self.failures_per_1000_node_days, "failures_per_1000_node_days")
        _more_than_0("training.tokens", self.training.tokens)
        _more_than_0("checkpoint.bytes_per_parameter", self.checkpoint.bytes_per_parameter)
        for name in ("stall_s", "restart_s"):
            amount_of(getattr(self.checkpoint, name), f"checkpoint.{name}")
        if self.checkpoint.period_s is not None:
            _more_than_0("checkpoint.period_s", self.checkpoint.period_s)
        if self.storage is not None:
            _more_than_0("storage.write_bytes_per_s", self.storage.write_bytes_per_s)
            if self.storage.replicas < 1:
                raise UsageError(f"storage.replicas is {self.storage.replicas}; write 1 or more")


class FailureAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of the run, and the time that is left to it; bounds are those of the failure rate."""

    mttf_s: Amount
    period_s: Amount
    """Time between checkpoints: as given, else by Daly and Young."""
    ettr: Amount
    optimal_period_s: Amount
    """Time between checkpoints that gives the best ratio, computed exactly."""
    best_ettr: Amount
    """ETTR with the optimal period."""
    goal: Requirements | None = None
    """Requirement on each input, alone, for the ETTR that is wanted, at the higher failure rate and the period that is
    given, else the optimal one; None where none is wanted, or nothing ever fails."""


class CheckpointAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a checkpoint, and how fast storage takes it."""

    size_bytes: float
    write_bytes_per_s: float
    """Write bandwidth before replication: of all storage nodes, or of the nodes of the run where that is lower."""
    written_s: float
    """Time to write a checkpoint with all its replicas, seconds."""
    needed_bytes_per_s: float
    """Bandwidth before replication with which a checkpoint is written just when the next one is due."""


class CostAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of the cluster, with its nodes, and of the run on it."""

    currency: str
    network: Amount
    network_watts: Amount
    """Power of switches and cables."""
    cables: CableBill
    """Cables by class of lengths."""
    node_watts: Amount
    """Power of nodes at work."""
    ownership: Ownership
    run: Amount
    """Cost of the GPU hours of the run, failures included."""
    million_tokens: Amount
    rented_run: Amount | None
    owning_is_cheaper_after_hours: Amount | None
    """Hours of use after which owning costs less than renting (`break_even_hours`); None without a rent, or where
    owning never does."""


class ClusterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `plan_cluster`: sizes, step times, failures, days and cost of the run."""

    gpu_nodes: int
    gpus: int
    job_nodes: int
    nic_bytes_per_s: float
    """Network bandwidth of a node in each direction: the lower one of its NICs together and its ports together."""
    ring_share: float
    """Rate of the slowest flow in a ring of the job's nodes in random order (ECMP), over the rate of a node's ports."""
    alone: StepEstimate
    """Training step where each node gets the whole rate of its NICs."""
    contended: StepEstimate
    """Training step where each node gets the rate of the slowest flow (`ring_share`)."""
    failures: FailureAnswer
    days_without_failures: Amount
    days: Amount
    checkpoint: CheckpointAnswer | None
    cost: CostAnswer | None
    simulated: SimulatedStep | None = None
    """Training step simulated transfer by transfer; None: not asked for, or it has too many transfers."""
    notes: tuple[str, ...] = ()
    """Limits and problems of the plan, one sentence each."""

    @property
    def suffices(self) -> bool:
        """Whether the plan fits into memory, storage writes a checkpoint before the next one is due, and the run makes
        progress at the higher failure rate."""
        in_time = self.checkpoint is None or self.checkpoint.written_s <= self.failures.period_s.low
        return self.alone.fits and in_time and self.failures.ettr.low >= LEAST_ETTR


def plan_cluster(
    given: ClusterPlan,
    network: NetworkFile,
    node: NodeModel,
    plan: ParallelPlan,
    shape: ModelShape,
    prices: PriceList | None = None,
    *,
    queue_pairs: int = 1,
    seed: int = 0,
    ettr_goal: float | None = None,
) -> ClusterAnswer:
    """Compute what a run of `plan` takes on the cluster, and what an ETTR of `ettr_goal` needs. Raises `UsageError` for
    what cannot be run there, and for a goal outside ]0, 1[."""
    fabric = network.build()
    group = _group(fabric, given.gpu_kind, "gpu_kind")
    job_nodes = math.ceil(plan.world_size / node.gpus)
    if job_nodes > group.count:
        raise UsageError(f"the plan needs {job_nodes} nodes of {node.gpus} GPUs; {network.name} has {group.count}")
    if refused := refusals(plan, shape, node, job_nodes):
        raise UsageError(f"the plan cannot be run: {'; '.join(refused)}")
    ports = group.ports * fabric.link_bytes_per_s
    rate = min(ports, node.nics * node.nic_bytes_per_s)
    share = _ring_share(fabric, group, job_nodes, queue_pairs, seed)
    alone = estimate_step(plan, shape, _with_rate(node, rate))
    contended = estimate_step(plan, shape, _with_rate(node, min(rate, share * ports)))
    failures = _failures(given, job_nodes, ettr_goal)
    seconds = Amount(*sorted(given.training.tokens / one.tokens_per_s for one in (alone, contended)))
    days = Amount(seconds.low / DAY_S, seconds.high / DAY_S)
    stretched = Amount(
        days.low / failures.ettr.high if failures.ettr.high else math.inf,
        days.high / failures.ettr.low if failures.ettr.low else math.inf,
    )
    checkpoint = _checkpoint(given, fabric, shape, job_nodes * rate, failures.period_s.low)
    answer = ClusterAnswer(
        gpu_nodes=group.count,
        gpus=group.count * node.gpus,
        job_nodes=job_nodes,
        nic_bytes_per_s=rate,
        ring_share=share,
        alone=alone,
        contended=contended,
        failures=failures,
        days_without_failures=days,
        days=stretched,
        checkpoint=checkpoint,
        cost=None if prices is None else _cost(given, network, fabric, prices, plan, stretched),
    )
    return msgspec.structs.replace(answer, notes=tuple(_notes(answer, node, ports)))


def with_simulation(
    answer: ClusterAnswer,
    given: ClusterPlan,
    network: NetworkFile,
    node: NodeModel,
    plan: ParallelPlan,
    shape: ModelShape,
    *,
    most_transfers: int,
    queue_pairs: int = 1,
    seed: int = 0,
) -> ClusterAnswer:
    """The answer of `plan_cluster` with a step that is simulated transfer by transfer, ranks being placed in order
    under ECMP: alone and, with storage, while all nodes write a checkpoint. With more than `most_transfers` flows a
    note says why there is none."""
    fabric = network.build()
    group = _group(fabric, given.gpu_kind, "gpu_kind")
    settings = Settings(routing="ecmp", queue_pairs=max(queue_pairs, group.ports), seed=seed)
    flows = transfers_of(plan, node) * settings.queue_pairs
    if flows > most_transfers:
        words = f"a step has {flows:,} transfers, more than {most_transfers:,}: it is not simulated"
        return msgspec.structs.replace(answer, notes=(*answer.notes, words))
    notes = answer.notes
    load = None
    if answer.checkpoint is not None and given.storage is not None:
        servers = _group(fabric, given.storage.kind, "storage.kind").count
        if given.storage.replicas <= servers <= MAX_STORAGE_NODES:
            load = checkpoint_load(answer.checkpoint.size_bytes, answer.job_nodes, given.storage.replicas)
        else:
            words = f"traffic to storage is simulated for {given.storage.replicas} to {MAX_STORAGE_NODES} storage nodes"
            notes = (*notes, f"{words}; the network has {servers:,}")
    nodes = nodes_of_kind(fabric, given.gpu_kind)[: answer.job_nodes]
    kind = "storage" if given.storage is None else given.storage.kind
    simulated = simulate_step(fabric, nodes, node, plan, shape, settings, load, storage_kind=kind)
    return msgspec.structs.replace(answer, simulated=simulated, notes=notes)


def _more_than_0(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UsageError(f"{name} is {value}; write a number of more than 0")


def _group(fabric: Fabric, kind: str, key: str) -> NodeGroup:
    for group in fabric.groups:
        if group.kind == kind:
            return group
    raise UsageError(f"{key} is {kind!r}; the network has nodes of {', '.join(one.kind for one in fabric.groups)}")


def _with_rate(node: NodeModel, bytes_per_s: float) -> NodeModel:
    return msgspec.structs.replace(node, nic_bytes_per_s=bytes_per_s / node.nics)


def ring_of(fabric: Fabric, kind: str, job_nodes: int, queue_pairs: int, seed: int) -> tuple[range, Settings]:
    """The nodes of the run, the first of their kind, and how their ring is routed: at least one flow for each port."""
    group = _group(fabric, kind, "gpu_kind")
    first = sum(one.count for one in fabric.groups[: fabric.groups.index(group)])
    settings = Settings(routing="ecmp", queue_pairs=max(queue_pairs, group.ports), seed=seed)
    return range(first, first + min(job_nodes, MOST_RING_NODES)), settings


def _ring_share(fabric: Fabric, group: NodeGroup, job_nodes: int, queue_pairs: int, seed: int) -> float:
    """Over the rate of the ports of a node; 1 for a node that is alone."""
    if job_nodes < 2:
        return 1.0
    nodes, settings = ring_of(fabric, group.kind, job_nodes, queue_pairs, seed)
    rates = first_rates(fabric, pattern_transfers("shuffled-ring", nodes, 1, seed=seed), settings)
    return min(1.0, float(rates.min()) / (group.ports * fabric.link_bytes_per_s))


def _failures(given: ClusterPlan, job_nodes: int, ettr_goal: float | None) -> FailureAnswer:
    each = amount_of(given.failures_per_1000_node_days, "failures_per_1000_node_days")
    saves = given.checkpoint
    found = []
    for per_1000 in (each.high, each.low):
        rate = failure_rate_per_s(job_nodes, per_1000 / 1000)
        period = saves.period_s or daly_young_interval_s(stall_s=saves.stall_s, failures_per_s=rate)
        if rate == 0:
            ettr = 1.0 if math.isinf(period) else period / (period + saves.stall_s)
        else:
            period = max(period, 1.0)  # a save without a stall would be made all the time
            ettr = renewal_ettr(failures_per_s=rate, restart_s=saves.restart_s, period_s=period, stall_s=saves.stall_s)
        optimal = optimal_period_s(stall_s=saves.stall_s, failures_per_s=rate)
        best = best_ettr(failures_per_s=rate, restart_s=saves.restart_s, stall_s=saves.stall_s)
        found.append((math.inf if rate == 0 else 1 / rate, period, ettr, optimal, best))
    mttf, periods, ettrs, optima, bests = (Amount(*sorted(pair)) for pair in zip(*found, strict=True))
    return FailureAnswer(
        mttf_s=mttf, period_s=periods, ettr=ettrs, optimal_period_s=optima, best_ettr=bests,
        goal=_goal(given, job_nodes, each.high / 1000, ettr_goal),
    )  # fmt: skip


def _goal(given: ClusterPlan, job_nodes: int, failures_per_node_day: float, goal: float | None) -> Requirements | None:
    if goal is None:
        return None
    if not 0 < goal < 1:
        raise UsageError(f"ettr_goal is {goal}; give a ratio between 0 and 1")
    if failures_per_node_day == 0:
        return None
    saves = given.checkpoint
    return requirements(
        ettr=goal, nodes=job_nodes, failures_per_node_day=failures_per_node_day, restart_s=saves.restart_s,
        stall_s=saves.stall_s, period_s=saves.period_s,
    )  # fmt: skip


def _checkpoint(
    given: ClusterPlan, fabric: Fabric, shape: ModelShape, job_bytes_per_s: float, period_s: float
) -> CheckpointAnswer | None:
    storage = given.storage
    if storage is None:
        return None
    group = _group(fabric, storage.kind, "storage.kind")
    each = min(storage.write_bytes_per_s, group.ports * fabric.link_bytes_per_s)
    rate = min(group.count * each / storage.replicas, job_bytes_per_s)
    size = count_parameters(shape).total * given.checkpoint.bytes_per_parameter
    return CheckpointAnswer(
        size_bytes=size, write_bytes_per_s=rate, written_s=size / rate, needed_bytes_per_s=size / period_s
    )


def _cost(
    given: ClusterPlan, network: NetworkFile, fabric: Fabric, prices: PriceList, plan: ParallelPlan, days: Amount
) -> CostAnswer:
    rented = None if given.rent_per_gpu_hour is None else given.rent_per_gpu_hour.amount
    costs = network_costs(network, fabric, prices, with_nodes=True, rent_per_gpu_hour=rented)
    own, rent = costs.ownership, costs.rent_per_gpu_hour
    if own.per_gpu_hour is None or costs.node_watts is None:
        raise UsageError(f"the prices say of no node how many GPUs it has; add nodes.{given.gpu_kind}.gpus = 8")
    hours = days.times(plan.world_size * DAY_S / HOUR_S)
    run = own.per_gpu_hour.times(hours)
    return CostAnswer(
        currency=costs.currency,
        network=costs.network,
        network_watts=costs.network_watts,
        cables=costs.cables,
        node_watts=costs.node_watts,
        ownership=own,
        run=run,
        million_tokens=run.times(1e6 / given.training.tokens),
        rented_run=None if rent is None else rent.times(hours),
        owning_is_cheaper_after_hours=costs.owning_is_cheaper_after_hours,
    )


def _notes(answer: ClusterAnswer, node: NodeModel, ports: float) -> list[str]:
    found = []
    nics = node.nics * node.nic_bytes_per_s
    if not math.isclose(ports, nics, rel_tol=0.01):
        words = f"the ports of a node carry {ports / 1e9:g} GB/s and its NICs {nics / 1e9:g} GB/s"
        found.append(f"{words}: the smaller one counts")
    if not answer.alone.fits:
        peak, usable = answer.alone.peak_memory.total / 1e9, node.usable_bytes / 1e9
        found.append(f"the fullest rank needs {peak:.1f} GB, and a plan may use {usable:.1f} GB of a GPU")
    slower = answer.contended.step_s / answer.alone.step_s
    if slower > 1.05:
        found.append(f"with the slowest flow of the ring a step takes {slower:.2f} times as long as with a link alone")
    saved = answer.checkpoint
    if saved is not None and saved.written_s > answer.failures.period_s.low:
        words = f"a checkpoint is written in {saved.written_s:.0f} s, and one is due every"
        found.append(f"{words} {answer.failures.period_s.low:.0f} s: add storage nodes, or save less often")
    if answer.failures.ettr.low < LEAST_ETTR:
        words = f"at the higher failure rate less than {LEAST_ETTR:.0%} of the time is productive"
        found.append(f"{words}: save more often, or restart faster")
    return found
