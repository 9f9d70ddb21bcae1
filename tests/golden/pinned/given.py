"""Samples of classes that refuse what does not make sense, so that none can be derived from their annotations."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from tests.golden.pinned.samples import Given, samples

from fireflyer.base.port_range import PortRange
from fireflyer.cli.hosts.config import AgentSettings, ClusterFile, HostConfig, Ports
from fireflyer.cluster.core.platform.commands import SetPolicy
from fireflyer.cluster.core.platform.store.retention import HistoryKeep
from fireflyer.cluster.core.scheduler.model import Policy
from fireflyer.cluster.local.config import HealthWish, NodesConfig, TimeSharing, UpConfig
from fireflyer.cluster.manager.config import GroupHealth, HealthConfig, PlatformConfig, SlurmConfig
from fireflyer.cluster.schema.addresses import AddressChoice
from fireflyer.cluster.schema.execs import ExecProgram, ExecRequest, Port
from fireflyer.collectives.flight.dump import Dump, Fault, LinkEnd, PeerProgress, Record, Snapshot
from fireflyer.collectives.planning.cost import Speeds
from fireflyer.collectives.planning.declaration import Declaration, RouteRow
from fireflyer.collectives.planning.plan import CANONICAL, Plan, Route, make_plan
from fireflyer.planning import (
    CheckpointPart,
    ClusterPlan,
    LengthClass,
    NetworkFile,
    NodePrice,
    Price,
    PriceList,
    SourcedValue,
    StoragePart,
    TrainingPart,
)
from fireflyer.topology.fabrics import NodeGroup
from fireflyer.validators.core.checks.nagios import ProgramSettings
from fireflyer.validators.core.checks.policy import HealthPolicy, Inventory
from fireflyer.validators.core.checks.services import ServiceSettings

__all__ = ["GIVEN"]

_ROUTES: Final = (
    Route("allreduce", 65536, "halving_doubling", 4096, "small"),
    Route("allreduce", None, "ring", 262144),
)


def _plans() -> list[Plan]:
    trees = make_plan((0, 1, 1)).trees
    routed = make_plan((0, 1, 1), chunk_bytes=8192, window=6, routes=_ROUTES, node_order=(1, 0), sockets=2)
    return [Plan(node_of_rank=(0, 1, 1), trees=trees), routed, make_plan((0, 1, 2, 0), sums=CANONICAL)]


def _declarations() -> list[Declaration]:
    speeds = samples(Speeds)[-1]
    rows = tuple(RouteRow(kind=one.kind, algorithm=one.algorithm, chunk_bytes=one.chunk_bytes) for one in _ROUTES[1:])
    bounded = RouteRow(kind="allreduce", algorithm="halving_doubling", chunk_bytes=4096, up_to_bytes=65536)
    return [
        Declaration(),
        Declaration(zone_of_host={"a": 0, "b": 1}, algorithms=("ring",), window=6, sockets=2),
        Declaration(zones=(0, 1), speeds=speeds, slot_bytes=1 << 24, flight_bytes=1 << 20, routes=(bounded, *rows)),
    ]


def _address_choices() -> list[AddressChoice]:
    return [AddressChoice(), AddressChoice(interface="eth1", subnet="10.0.0.0/16")]


def _port_ranges() -> list[PortRange]:
    return [PortRange(29500, 29599)]


def _manager_configs() -> list[PlatformConfig]:
    """They check addresses."""
    least = PlatformConfig(name="s1", cluster="s2", store="s3", directory="s4", secret_file="s5", tokens_file="s6")
    names = PlatformConfig.__struct_fields__
    whole: dict[str, Any] = {
        name: f"s{at}" if isinstance(getattr(least, name), str) else 1000 + at for at, name in enumerate(names)
    }
    whole |= {
        "listen": "127.0.0.1:1",
        "listen_agents": "127.0.0.1:2",
        "managers": ("s1",),
        "operators": ("s2",),
    }
    whole |= {"listen_accounts": "127.0.0.1:3"}
    whole |= {"manager_urls": ("https://s3#4",), "webhook_networks": ("10.0.0.0/16",)}
    site = SlurmConfig(python=("s1",), options=("s2",), output="s3", own_user=True, accounts={"s4": "s5"}, path="s6")
    whole |= {"history_keep": HistoryKeep(tasks_days=3, rows=4000)}
    whole |= {"engine": "slurm", "slurm": site, "node_check": ("/s1", "s2")}
    gpu = GroupHealth(program=("/s8",), validation=(), follow=(), required=("s9",), period_ms=1000, timeout_ms=200)
    health = HealthConfig(
        program=("/s1", "s2"),
        validation=("/s3",),
        follow=("/s6", "s7"),
        version=4,
        required=("s5",),
        by_group={"s10": gpu, "s11": GroupHealth(validation_timeout_ms=3000)},
    )
    whole |= {"health": HealthConfig(version=6)}
    return [least, PlatformConfig(**whole), msgspec.structs.replace(least, health=health)]


def _up_files() -> list[UpConfig]:
    """They check names, durations and addresses."""
    nodes = NodesConfig(names=("agent-1", "agent-2"), group="s1", zone="s2", leaf="s3", labels=("s4",))
    sharing = TimeSharing(
        guarantee="1m",
        age_step="2m",
        gang_age="5m",
        usage_margin=2.5,
        usage_half_life="3m",
        cross_zone_nodes=4,
        cross_zone_tasks=5,
    )
    whole = UpConfig(
        directory="s5",
        agents=6,
        zones=7,
        listen="127.0.0.1:8",
        listen_agents="127.0.0.1:9",
        metrics_listen="127.0.0.1:10",
        objects="s11",
        history="s12",
        logs_of_run_mib=13,
        logs_keep_days=14,
        run_logs_mib=15,
        stop_after="16s",
        nodes=(nodes,),
        time_sharing=sharing,
        health=HealthWish(
            enabled=True,
            policy="s17",
            period="18s",
            groups=("s19",),
            group_policies={"s20": "s21"},
            validation=("/s22",),
            required=("s23",),
            breaker_share=0.5,
        ),
        history_keep=HistoryKeep(
            parts_days=1, tasks_days=2, node_states_days=3, totals_days=4, audit_days=5, usage_days=6, rows=7000
        ),
    )
    return [UpConfig(agents=1), whole]


def _cluster_files() -> list[ClusterFile]:
    """They check names, addresses, paths, and what hosts are for."""
    manager = HostConfig(name="s1", address="s2", manager=True, agent=False, node=3, targets={"4": "/s4"})
    whole = ClusterFile(
        cluster="5" * 32,
        store="postgresql://s6/s7",
        directory="/s8",
        secret_file="/s9",
        node_secret_file="/s10",
        objects="s11",
        ports=Ports(platform=12, agents=13, accounts=14, files=15, meta=16, storage=17),
        hosts=(manager, HostConfig(name="s18", meta=True)),
        platform={"s19": 20},
        manager={"s21": True},
        storage={"s22": "s23"},
        agent=AgentSettings(accounts="s24", own_user=True, run_logs_mib=25),
    )
    return [
        ClusterFile(cluster="5" * 32, store="postgresql://s6/s7", hosts=(HostConfig(name="s1", manager=True),)),
        whole,
    ]


def _policies() -> list[SetPolicy]:
    """Their steps are a second at least."""
    return [SetPolicy(Policy()), SetPolicy(Policy(usage_margin=2.5), 7)]


def _dumps() -> list[Dump]:
    """The ranks that they name are below `world_size`."""
    small = Snapshot(records=(), monotonic_ns=1, realtime_ns=2, submitted=3, finished=4)
    whole = Snapshot(
        records=tuple(samples(Record)),
        peer_progress=tuple(samples(PeerProgress)),
        links=tuple(samples(LinkEnd)),
        monotonic_ns=5,
        realtime_ns=6,
        submitted=7,
        finished=8,
        dropped=9,
    )
    least = Dump(group="g", plan="p", rank=0, world_size=1, node=0, labels={}, timeout_ns=1, reason="r", snapshot=small)
    full = Dump(
        format=1,
        group="group",
        plan="0123456789abcdef",
        rank=3,
        world_size=65536,
        node=2,
        labels={3: "rank 3 (node 2, host n2)"},
        timeout_ns=10,
        transport="ucx",
        reason="asked",
        fault=Fault("peer_failed", 4, 11, "gone"),
        snapshot=whole,
    )
    return [least, full]


def _exec_requests() -> list[ExecRequest]:
    """A rank or a node, a program or a port."""
    program = ExecProgram(argv=("sh", "-c", "true"), terminal=True, rows=30, columns=100, term="xterm")
    whole = ExecRequest(node="gpu-1", program=program, idle_s=60, ends_task=True)
    return [ExecRequest(rank=3, port=Port(8888)), ExecRequest(program=ExecProgram()), whole]


def _clusters() -> list[ClusterPlan]:
    common: dict[str, Any] = {
        "name": "s1",
        "network": "s2",
        "node": "s3",
        "training": TrainingPart(plan="s4", tokens=1.5),
    }
    saves = CheckpointPart(stall_s=1.5, restart_s=2.5)
    whole = CheckpointPart(stall_s=1.5, restart_s=2.5, period_s=3.5, bytes_per_parameter=4.5)
    return [
        ClusterPlan(checkpoint=saves, failures_per_1000_node_days=1.5, **common),
        ClusterPlan(
            checkpoint=whole,
            gpu_kind="s5",
            failures_per_1000_node_days=(1.5, 2.5),
            storage=StoragePart(kind="s6", write_bytes_per_s=1.5, replicas=3),
            prices="s7",
            rent_per_gpu_hour=_sourced_values()[1],
            **common,
        ),
    ]


def _networks() -> list[NetworkFile]:
    """Keys of one family refuse those of another."""
    groups = tuple(samples(NodeGroup))
    common: dict[str, Any] = {"name": "s1", "gbit_per_s": 200.0, "nodes": groups}
    return [
        NetworkFile(family="two-layer", radix=8, **common),
        NetworkFile(family="two-layer", radix=8, uplinks=2, spread=False, frame_switch=True, **common),
        NetworkFile(family="three-layer", radix=8, uplinks=2, spine_uplinks=3, cores=16, **common),
        NetworkFile(family="zones", radix=8, between=4, shared=groups, zones=3, zone_switches=2, **common),
        NetworkFile(family="multi-plane", radix=8, planes=2, **common),
        NetworkFile(family="rail-optimised", radix=8, rails=2, **common),
        NetworkFile(
            name="s1",
            family="dragonfly",
            gbit_per_s=1.5,
            nodes_per_switch=2,
            group_switches=4,
            global_links=2,
            groups=9,
        ),
        NetworkFile(name="s1", family="slim-fly", gbit_per_s=1.5, order=5, metres={"s2": 1.5, "s3": (0.5, 2.5)}),
    ]


def _prices() -> list[Price]:
    return [Price(price=1.5, source="s1", date="s2"), Price(price=(1.5, 2.5), watts=(3.5, 4.5), source="s1", date="s2")]


def _node_prices() -> list[NodePrice]:
    return [
        NodePrice(price=1.5, source="s1", date="s2"),
        NodePrice(price=1.5, watts=2.5, source="s1", date="s2", gpus=8, gpu_flops=3.5),
    ]


def _sourced_values() -> list[SourcedValue]:
    return [SourcedValue(value=value, source="s1", date="s2") for value in (0.5, (0.5, 1.5))]


def _length_classes() -> list[LengthClass]:
    return [
        LengthClass(price=1.5, source="s1", date="s2", most_metres=2.5),
        LengthClass(price=(1.5, 2.5), watts=3.5, source="s1", date="s2", most_metres=4.5),
    ]


def _price_lists() -> list[PriceList]:
    pieces = {f"s{at}": price for at, price in enumerate(_prices())}
    nodes = {f"s{at}": price for at, price in enumerate(_node_prices())}
    number, range_ = _sourced_values()
    return [
        PriceList(currency="s1"),
        PriceList(
            currency="s1",
            switches=pieces,
            cables=pieces,
            lengths={f"s{at}": one for at, one in enumerate(_length_classes())},
            nodes=nodes,
            electricity_per_kwh=range_,
            pue=SourcedValue(value=1.5, source="s1", date="s2"),
            upkeep_per_year=number,
            rent_per_gpu_hour=range_,
            years=2.5,
            utilisation=0.5,
        ),
    ]


def _health_policies() -> list[HealthPolicy]:
    program = ProgramSettings(name="s1", argv=("/s2", "s3"), limit_s=1.5, critical="high")
    inventory = Inventory(gpus=1, memory_gib=1.5, disks=("s1",), ethernet={"s1": 1.5}, management_controller=True)
    services = ServiceSettings(enabled=False, required=True, severity={"s1": "low"}, units=("s2",))
    return [
        HealthPolicy(),
        HealthPolicy(group="s1", inventory=inventory, services=services, programs=(program,)),
    ]


def _programs() -> list[ProgramSettings]:
    return [ProgramSettings(name="s1", argv=("/s2",))]


GIVEN: Final[Given] = {
    HealthPolicy: _health_policies,
    ProgramSettings: _programs,
    ClusterPlan: _clusters,
    NetworkFile: _networks,
    Price: _prices,
    NodePrice: _node_prices,
    LengthClass: _length_classes,
    PriceList: _price_lists,
    SourcedValue: _sourced_values,
    ExecRequest: _exec_requests,
    Plan: _plans,
    Declaration: _declarations,
    Dump: _dumps,
    AddressChoice: _address_choices,
    PortRange: _port_ranges,
    PlatformConfig: _manager_configs,
    ClusterFile: _cluster_files,
    SetPolicy: _policies,
    UpConfig: _up_files,
}
