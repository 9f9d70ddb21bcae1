"""From the file of `ff up` and names of hosts to a cluster file. No IO.

    carried    what means the same on many hosts: history, logs, health, stop_after, durable, a database
    decided    what one machine need not say, or says of itself alone: a line marked DECIDE, valid as it is
    typed      what is kept in the stores of a running cluster, not in a file: commands at the end of the file
    left out   what only means something on one machine: a note for each

Each key of the file of `ff up` belongs to one of them. What the file leaves at its default is left at the default of
the cluster, too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from shlex import quote
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from fireflyer.base.decoding import decode_toml
from fireflyer.base.errors import UsageError
from fireflyer.base.toml_text import to_toml, toml_value
from fireflyer.base.units import MS
from fireflyer.cli.hosts.config import ClusterFile
from fireflyer.cli.hosts.processes import processes_of
from fireflyer.cluster.local.config import NodesConfig, UpConfig
from fireflyer.cluster.manager.config import NO_HISTORY
from fireflyer.runtime.address import is_loopback, parse_listen

__all__ = ["NewFile", "NewHost", "cluster_file", "parse_host"]

STORE: Final = "postgresql://fireflyer@{host}/fireflyer"
OBJECTS: Final = "/shared/fireflyer"
REPLICAS: Final = 2
TARGETS: Final = 2
_AGENT: Final = "agent-"
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class NewHost(NamedTuple):
    name: str
    address: str = ""
    """Empty: the name."""


class NewFile(NamedTuple):
    text: str
    left_out: tuple[str, ...]
    """One line for each setting of the file of `ff up` that the cluster file does not have."""
    to_decide: int
    """Lines that are marked DECIDE."""


def parse_host(text: str) -> NewHost:
    """`NAME` or `NAME=ADDRESS`. Raises `UsageError`."""
    name, given, address = text.partition("=")
    bare = address.removeprefix("[").removesuffix("]")
    if given and _HOST.fullmatch(bare) is None:
        try:
            ipaddress.IPv6Address(bare)
        except ValueError:
            raise UsageError(
                f"{text!r}: {address!r} is neither a host name nor an IP address; write NAME=ADDRESS, without a port"
            ) from None
    return NewHost(name, bare)


def cluster_file(up: UpConfig, hosts: Sequence[NewHost], *, managers: int, cluster: str, source: str = "") -> NewFile:
    """`managers`: the first so many hosts have one. `cluster`: its new id. `source`: name of the file of `ff up`, for
    comments; empty: there was none. Raises `UsageError` for hosts of which there can be no cluster."""
    if not 1 <= managers <= len(hosts):
        raise UsageError(f"{managers} managers on {len(hosts)} hosts; 1 to {len(hosts)} are possible")
    addresses = [host.address for host in hosts if host.address]
    twice = next((address for address in addresses if addresses.count(address) > 1), None)
    if twice is not None:
        raise UsageError(f"two hosts have the address {twice}; give each its own, as in alpha=10.0.0.1")
    draft = _Draft(up, hosts, managers)
    lines = [
        f"# A cluster of {len(hosts)} host{'s' * (len(hosts) > 1)}{f', from {source}' if source else ''}: the same "
        "file on each. All keys: docs/how-to/cluster.md",
        "",
        f'cluster = "{cluster}"',
        *draft.common(),
        "",
        *draft.of_hosts(),
        *draft.settings(),
        *draft.commands(),
    ]
    text = "\n".join(lines).rstrip("\n") + "\n"
    try:
        read = decode_toml(text, ClusterFile)
    except msgspec.ValidationError as error:
        raise UsageError(str(error).partition(" - at ")[0]) from None
    for host in read.hosts:
        processes_of(read, host)
    return NewFile(text, tuple(draft.left_out), text.count("# DECIDE"))


class _Draft:
    def __init__(self, up: UpConfig, hosts: Sequence[NewHost], managers: int) -> None:
        self._up, self._hosts, self._managers = up, hosts, managers
        self.left_out: list[str] = []
        wanted = up.storage.nodes
        self._storing = len(hosts) if wanted is None else min(wanted, len(hosts))
        """Hosts with storage."""
        self._note_what_is_of_one_machine()

    def _note_what_is_of_one_machine(self) -> None:
        up, hosts, default = self._up, len(self._hosts), UpConfig()
        if PurePath(up.directory).name != default.directory:
            self._leave(f"directory = {up.directory!r}", "each host keeps its state in directory of the cluster file")
        if up.agents is not None:
            self._leave(f"agents = {up.agents}", "each host has one agent, and is one node")
        if up.zones is not None:
            self._leave(f"zones = {up.zones}", "where a host stands is not shared out: ff node move HOST --zone ZONE")
        if up.storage.nodes is not None and up.storage.nodes > hosts:
            self._leave(f"storage.nodes = {up.storage.nodes}", f"each of the {hosts} hosts has one storage process")
        if up.health != default.health and not up.health.enabled:
            self._leave("[health]", "it is not enabled, so no host is checked")
        for key in ("listen", "listen_agents"):
            if getattr(up, key) != getattr(default, key):
                self._leave(f"{key} = {getattr(up, key)!r}", "managers listen at all addresses; the port is in [ports]")

    def _leave(self, setting: str, why: str) -> None:
        self.left_out.append(f"{setting}: {why}")

    # --- what all hosts have in common ---

    def common(self) -> list[str]:
        return [self._store(), self._objects()]

    def _store(self) -> str:
        given = self._up.storage.store or ""
        if given.startswith(("postgresql://", "postgres://")):
            if "table" not in parse_qs(urlsplit(given).query):
                return f"store = {toml_value(given)}"
            self._leave("storage.store", "it names a table; in a cluster each kind of manager has a table of its own")
        elif given:
            self._leave("storage.store", "a cluster keeps all its state in PostgreSQL")
        first = self._hosts[0]
        store = toml_value(STORE.format(host=_in_url(first.address or first.name)))
        return f"store = {store}  # DECIDE: an empty PostgreSQL database for all managers"

    def _objects(self) -> str:
        given = self._up.objects
        if "://" in given:
            return f"objects = {toml_value(given)}"
        return (
            f"objects = {toml_value(given or OBJECTS)}  # DECIDE: a directory that all managers share, or a URL as "
            "s3://bucket/fireflyer"
        )

    # --- hosts ---

    def of_hosts(self) -> list[str]:
        targets = self._up.storage.targets_per_node or TARGETS
        lines = []
        for number, host in enumerate(self._hosts, 1):
            lines += ["[[hosts]]", f"name = {toml_value(host.name)}"]
            if host.address:
                lines.append(f"address = {toml_value(host.address)}")
            if number <= self._managers:
                lines.append("manager = true")
            if number <= self._storing:
                disks = (f'{number}{one:03} = "/disk{one}/fireflyer"' for one in range(1, targets + 1))
                lines += [f"node = {number}", f"targets = {{ {', '.join(disks)} }}  # DECIDE: a directory on each disk"]
            lines.append("")
        return lines

    # --- tables of settings ---

    def settings(self) -> list[str]:
        tables = {
            "ports": self._ports(),
            "platform": self._platform(),
            "storage": {"durable": False} if self._up.storage.durable is False else {},
            "agent": self._changed("run_logs_mib"),
        }
        text = to_toml({name: table for name, table in tables.items() if table}).strip("\n")
        return [text, ""] if text else []

    def _changed(self, *keys: str) -> dict[str, Any]:
        """Settings of the file that are not what is the default here as there."""
        default = UpConfig()
        found = {key: getattr(self._up, key) for key in keys}
        return {key: value for key, value in found.items() if value != getattr(default, key)}

    def _ports(self) -> dict[str, Any]:
        ports = {"platform": parse_listen(self._up.listen)[1], "agents": parse_listen(self._up.listen_agents)[1]}
        return {name: port for name, port in ports.items() if port}

    def _platform(self) -> dict[str, Any]:
        up = self._up
        found = self._changed("logs_of_run_mib", "logs_keep_days")
        if "stop_after" in self._changed("stop_after"):
            found["stop_after_ms"] = up.stop_after_ns // MS
        if up.history == NO_HISTORY or up.history.startswith("postgres"):
            found["history"] = up.history
        elif up.history:
            self._leave(f"history = {up.history!r}", "managers on several hosts cannot share it")
        if up.metrics_listen:
            host = parse_listen(up.metrics_listen)[0]
            if is_loopback(host) or host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared, not listened at
                found["metrics_listen"] = up.metrics_listen
            else:
                self._leave(f"metrics_listen = {up.metrics_listen!r}", "an address of one machine; give 0.0.0.0:PORT")
        if up.health.enabled:
            found["health"] = _given(up.health.of_managers())
        if keep := msgspec.to_builtins(up.history_keep):
            found["history_keep"] = keep
        return found

    # --- what is typed once ---

    def commands(self) -> list[str]:
        commands = []
        if self._storing:
            replicas = min(self._up.storage.replicas or REPLICAS, self._storing)
            commands.append(f"ff fs admin add-chains --replicas {replicas}")
        sharing = msgspec.to_builtins(self._up.time_sharing)
        if sharing:
            options = (f"--{key.replace('_', '-')} {value}" for key, value in sharing.items())
            commands.append(f"ff time-sharing {' '.join(options)}")
        for place in self._up.nodes:
            commands += self._placed(place)
        lines = [f"#   {command}" for command in commands]
        if lines:
            lines.insert(0, "# Settings that the stores of a running cluster keep; type them once when it runs:")
        return lines + [f"# Checks read their thresholds on each host: copy {one} to it." for one in self._policies()]

    def _policies(self) -> list[str]:
        health = self._up.health
        return [one for one in (health.policy, *health.group_policies.values()) if health.enabled and one]

    def _placed(self, place: NodesConfig) -> list[str]:
        commands = []
        options = [
            f"--{key} {quote(value)}"
            for key, value in (("zone", place.zone), ("leaf", place.leaf), ("group", place.group))
            if value != getattr(NodesConfig(names=place.names), key)
        ]
        for name in place.names:
            number = int(name.removeprefix(_AGENT))
            if number > len(self._hosts):
                self._leave(f"nodes.names has {name}", f"there are {len(self._hosts)} hosts")
                continue
            host = self._hosts[number - 1].name
            if options:
                commands.append(f"ff node move {host} {' '.join(options)}")
            if place.labels:
                commands.append(f"ff node label {host} {' '.join(map(quote, place.labels))}")
        return commands


def _given(config: msgspec.Struct) -> dict[str, Any]:
    """Settings that are not the default."""
    default = msgspec.to_builtins(type(config)())
    found: Mapping[str, Any] = msgspec.to_builtins(config)
    return {key: value for key, value in found.items() if value != default[key]}


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
