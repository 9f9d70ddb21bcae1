"""What the TOML file of `ff up` says. Each start reads it again; what it does not name stays as DIR has it. Of what
changes while it runs, `[health]` counts at once (`up_file`).

Another service of this machine, such as storage, is one more table.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, SECOND, parse_duration
from fireflyer.cluster.core.health.policy import CheckNames
from fireflyer.cluster.core.platform.store.retention import HistoryKeep
from fireflyer.cluster.core.scheduler.model import Policy
from fireflyer.cluster.manager.config import GroupHealth, HealthConfig
from fireflyer.cluster.schema.job import SHIPPED_NODE_CHECK
from fireflyer.cluster.schema.sync import SHIPPED_HEALTH
from fireflyer.runtime.address import parse_listen

__all__ = ["DEFAULTS", "MAX_AGENTS", "HealthWish", "NodesConfig", "StorageWish", "TimeSharing", "UpConfig", "keys_at"]

MAX_AGENTS: Final = 256
_AGENT: Final = re.compile(r"agent-([1-9][0-9]{0,2})")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")

DEFAULTS: Final = """\
# The platform on this machine: ff up FILE, ff down FILE. Lines that begin with # are the defaults.

# directory = "platform"            # where it keeps everything; relative to this file
# agents = 4                        # each counts as a node: agent-1, agent-2 and so on; may grow later
# zones = 1                         # of the network, among which nodes that [[nodes]] does not name are shared out
# listen = "127.0.0.1:0"            # of the manager, for users; port 0: any free one, the same at each start
# listen_agents = "127.0.0.1:0"     # of the manager, for agents; cannot be changed later
# metrics_listen = ""               # for Prometheus; empty: nowhere
# objects = ""                      # snapshots and logs: a directory or a URL of fsspec; empty: in the directory
# history = ""                      # URL of an SQL database, or none; empty: SQLite in the directory
# logs_of_run_mib = 1024            # that the manager keeps of what the ranks of a run print
# logs_keep_days = 30               # after the end of their task
# run_logs_mib = 1024               # that the node of a run keeps of it
# stop_after = "5m"                 # runs end when their node has heard of no manager for so long

# [[nodes]]                         # as often as there are kinds of nodes
# names = ["agent-1", "agent-2"]
# group = "default"
# zone = ""
# leaf = ""
# labels = []

# [time_sharing]                    # what is left out stays as operators have set it
# guarantee = "0s"                  # how long a run is not interrupted
# age_step = "2h"                   # who has waited for so long counts one priority higher
# usage_margin = 1.5                # a user interrupts one whose usage over share is so many times their own
# usage_half_life = "24h"           # after so long, what was used counts half
# cross_zone_nodes = 16             # tasks of fewer nodes never run in two zones
# cross_zone_tasks = 1              # so many tasks at a time run in two zones
# gang_age = "4h"                   # so much older counts a gang of twice as many nodes

# [storage]                         # the file system beside the platform, in DIR/storage; fixed when it is made
# nodes = 3                         # storage processes; 0: no file system
# replicas = 2                      # of each chunk, on different nodes
# targets_per_node = 4              # directories of each node that hold chunks
# durable = true                    # writes are acknowledged when they are on disk; may be changed at each start
# store = ""                        # of its metadata: postgresql://user@host/database; empty: embedded

# [health]                          # checks of the machine under the nodes: ff health; changes count at once
# enabled = false                   # a node with a fault gets no task, and its run goes elsewhere
# policy = ""                       # thresholds and inventory: a file of ff health --policy; empty: built in
# period = "5m"                     # and before and after each run
# groups = []                       # of nodes that are checked; empty: all
# group_policies = {}               # thresholds of these groups: { gpu = "gpu.toml" }
# validation = ["fireflyer:node-check"]   # of a node before it returns, or ["fireflyer:validate"]; []: none
# required = []                     # checks that must pass before a node returns, beside the one that failed
# breaker_share = 0.05              # of all nodes, that may be out by the platform's own decision; one in any case

# [history_keep]                    # how long the history keeps what
# parts_days = 400                  # where the time of each run went, after the end of its task
# tasks_days = 1100                 # tasks and their runs, after the end of the task
# node_states_days = 400
# totals_days = 400                 # readings of utilisation; then one of each day
# audit_days = 1100
# usage_days = 3700                 # what users had on each day, of tasks that were removed
# rows = 20000000                   # of each table at most; the oldest go
"""


def _check_name(key: str, value: str, table: str = "nodes") -> None:
    if _NAME.fullmatch(value) is None:
        rule = "it begins with a letter or digit, and has letters, digits, '.', '_' and '-', 80 at most"
        raise UsageError(f"{table}.{key} has {value[:40]!r}, which is no name: {rule}")


def _check_listen(key: str, value: str) -> None:
    try:
        parse_listen(value)
    except UsageError as error:
        raise UsageError(f"{key}: {error.message}") from None


def _given(key: str, text: str | None, *, least: str = "0s") -> int | None:
    return None if text is None else _duration(key, text, least=least)


def _duration(key: str, text: str, *, least: str = "0s", most: str = "36500d") -> int:
    try:
        found = parse_duration(text)
    except UsageError as error:
        raise UsageError(f"{key}: {error.message}") from None
    if not parse_duration(least) <= found <= parse_duration(most):
        raise UsageError(f"{key} is {text!r}; {least} to {most} are allowed")
    return found


class NodesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where some nodes stand. Raises `UsageError`."""

    names: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_AGENTS)]
    group: str = "default"
    zone: str = ""
    leaf: str = ""
    labels: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()

    def __post_init__(self) -> None:
        for key, values in (("group", (self.group,)), ("labels", self.labels)):
            for value in values:
                _check_name(key, value)
        for key, value in (("zone", self.zone), ("leaf", self.leaf)):
            if value:
                _check_name(key, value)


class TimeSharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """None: as it is. Raises `UsageError`."""

    guarantee: str | None = None
    age_step: str | None = None
    usage_margin: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    usage_half_life: str | None = None
    cross_zone_nodes: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] | None = None
    cross_zone_tasks: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] | None = None
    gang_age: str | None = None

    def __post_init__(self) -> None:
        self.changed(Policy(), 0)

    def changed(self, policy: Policy, guaranteed_ns: int) -> tuple[Policy, int]:
        """What becomes of what is set now."""
        values: dict[str, object] = {
            "age_step_ns": _given("age_step", self.age_step, least="1s"),
            "gang_age_ns": _given("gang_age", self.gang_age),
            "usage_margin": self.usage_margin,
            "usage_half_life_ns": _given("usage_half_life", self.usage_half_life, least="1s"),
            "cross_zone_nodes": self.cross_zone_nodes,
            "cross_zone_tasks": self.cross_zone_tasks,
        }
        given = {name: value for name, value in values.items() if value is not None}
        guarantee_ns = _given("guarantee", self.guarantee)
        return msgspec.structs.replace(policy, **given), guaranteed_ns if guarantee_ns is None else guarantee_ns


class StorageWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The file system beside the platform. None: as DIR has it, or the default of a new one."""

    nodes: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    """0: none."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=8)] | None = None
    targets_per_node: Annotated[int, msgspec.Meta(ge=1, le=999)] | None = None
    durable: bool | None = None
    store: Annotated[str, msgspec.Meta(max_length=1024)] | None = None


class HealthWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Raises `UsageError`."""

    enabled: bool = False
    policy: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """Path; empty: built in."""
    period: str = "5m"
    groups: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    """Empty: all nodes."""
    group_policies: Annotated[dict[str, str], msgspec.Meta(max_length=64)] = {}
    """Paths, instead of `policy` for nodes of these groups."""
    validation: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = (SHIPPED_NODE_CHECK,)
    """Empty: none."""
    required: CheckNames = ()
    breaker_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05

    def __post_init__(self) -> None:
        _duration("health.period", self.period, least="1s", most="24h")
        for group in (*self.groups, *self.group_policies):
            _check_name("groups", group, "health")
        self.of_managers()

    def of_managers(self) -> HealthConfig:
        if not self.enabled:
            return HealthConfig()
        return HealthConfig(
            program=_checks(self.policy),
            validation=self.validation,
            required=self.required,
            breaker_share=self.breaker_share,
            period_ms=_duration("health.period", self.period) // MS,
            groups=self.groups,
            by_group={group: GroupHealth(program=_checks(policy)) for group, policy in self.group_policies.items()},
        )

    def with_paths_in(self, directory: str) -> HealthWish:
        """Paths that are not absolute are below it."""
        policy = os.path.join(directory, self.policy) if self.policy else ""
        by_group = {group: os.path.join(directory, path) for group, path in self.group_policies.items()}
        return msgspec.structs.replace(self, policy=policy, group_policies=by_group)


def _checks(policy: str) -> tuple[str, ...]:
    return (SHIPPED_HEALTH, *(("--policy", policy) if policy else ()))


class UpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Raises `UsageError`."""

    directory: str = "platform"
    agents: Annotated[int, msgspec.Meta(ge=1, le=MAX_AGENTS)] | None = None
    """None: as many as DIR has, or 4."""
    zones: Annotated[int, msgspec.Meta(ge=1, le=MAX_AGENTS)] | None = None
    """None: as many as DIR has, or 1."""
    listen: str = "127.0.0.1:0"
    listen_agents: str = "127.0.0.1:0"
    metrics_listen: str = ""
    objects: str = ""
    history: str = ""
    logs_of_run_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1024
    logs_keep_days: Annotated[int, msgspec.Meta(ge=1, le=36_500)] = 30
    run_logs_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1024
    stop_after: str = "5m"
    nodes: Annotated[tuple[NodesConfig, ...], msgspec.Meta(max_length=MAX_AGENTS)] = ()
    time_sharing: TimeSharing = TimeSharing()
    storage: StorageWish = StorageWish()
    health: HealthWish = HealthWish()
    history_keep: HistoryKeep = HistoryKeep()

    def __post_init__(self) -> None:
        if not self.directory:
            raise UsageError('directory is empty; name one, as "platform"')
        for key in ("listen", "listen_agents", "metrics_listen"):
            if key != "metrics_listen" or self.metrics_listen:
                _check_listen(key, getattr(self, key))
        _duration("stop_after", self.stop_after, least="1s", most="24h")
        found: dict[str, None] = {}
        for name in (name for one in self.nodes for name in one.names):
            match = _AGENT.fullmatch(name)
            if match is None or (self.agents is not None and int(match[1]) > self.agents):
                allowed = f"agent-1 to agent-{self.agents or MAX_AGENTS}"
                raise UsageError(f"nodes.names has {name!r}; names of nodes are {allowed}")
            if name in found:
                raise UsageError(f"nodes.names has {name} twice; each node stands in one place")
            found[name] = None

    def beside(self, path: str) -> UpConfig:
        """With paths that are relative to the file `path`."""
        here = os.path.dirname(os.path.abspath(path))
        objects = self.objects if not self.objects or "://" in self.objects else os.path.join(here, self.objects)
        health = self.health.with_paths_in(here)
        return msgspec.structs.replace(
            self, directory=os.path.join(here, self.directory), objects=objects, health=health
        )

    def guaranteeing(self, guaranteed_ns: int) -> UpConfig:
        sharing = msgspec.structs.replace(self.time_sharing, guarantee=f"{guaranteed_ns // SECOND}s")
        return msgspec.structs.replace(self, time_sharing=sharing)

    @property
    def stop_after_ns(self) -> int:
        return _duration("stop_after", self.stop_after)

    def place_of(self, node: str) -> NodesConfig | None:
        """None: the file does not name it."""
        return next((one for one in self.nodes if node in one.names), None)


def keys_at(place: str) -> str:
    """The keys that are allowed in a table of the file. `place`: as a decoder names it, `$.nodes[0]`."""
    kind: type[msgspec.Struct] = UpConfig
    if place.startswith("$.nodes"):
        kind = NodesConfig
    elif place.startswith("$.time_sharing"):
        kind = TimeSharing
    elif place.startswith("$.storage"):
        kind = StorageWish
    elif place.startswith("$.health"):
        kind = HealthWish
    elif place.startswith("$.history_keep"):
        kind = HistoryKeep
    return ", ".join(kind.__struct_fields__)
