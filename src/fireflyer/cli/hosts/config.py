"""The cluster file: the hosts of a cluster, what each runs, and what all have in common. It is the same on all hosts.

No IO but the reading of the file.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.runtime.address import Address

__all__ = ["AgentSettings", "ClusterFile", "HostConfig", "Ports", "read_cluster_file"]

MAX_HOSTS: Final = 4096
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_CLUSTER: Final = re.compile(r"[0-9a-f]{32,128}")
_Port = Annotated[int, msgspec.Meta(ge=1, lt=65536)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class Ports(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TCP ports at which processes listen; the same on all hosts. Raises `UsageError`."""

    platform: _Port = 9440
    """Managers of the platform, for users."""
    agents: _Port = 9441
    """Managers of the platform, for agents."""
    accounts: _Port = 9442
    """Managers of the platform, for managers of the file system, which ask whose token it is."""
    files: _Port = 7000
    """Managers of the file system."""
    meta: _Port = 7001
    storage: _Port = 7100

    def __post_init__(self) -> None:
        taken: dict[int, str] = {}
        for name in self.__struct_fields__:
            port = getattr(self, name)
            if port in taken:
                raise UsageError(f"ports.{name} and ports.{taken[port]} are both {port}; give each a port of its own")
            taken[port] = name


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `ff agent run`, on all hosts with an agent."""

    accounts: str = ""
    """TOML file with the account of each user, for an agent of root; empty: accounts of the users' own names."""
    own_user: bool = False
    """Ranks run as root, where the agent is root."""
    run_logs_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1024


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one host runs. Raises `UsageError`."""

    name: str
    """Of the node of the platform, and of the managers."""
    address: str = ""
    """Host name or IP address by which the other hosts reach it; empty: `name`."""
    manager: bool = False
    """A manager of the platform, and one of the file system with a meta service."""
    meta: bool = False
    """A meta service of its own."""
    agent: bool = True
    node: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    """Id of the storage node; 0: no storage process."""
    targets: dict[str, _Text] = {}
    """Directory of each target of the storage node, by its id: one or more for each disk. An id is never used again."""

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            rule = "it begins with a letter or digit, and has letters, digits, '.', '_' and '-', 63 at most"
            raise UsageError(f"hosts.name is {self.name[:40]!r}, which is no name: {rule}")
        if bool(self.node) != bool(self.targets):
            raise UsageError(f"host {self.name}: node and targets belong together; give both or none")
        for key, directory in self.targets.items():
            if not (key.isascii() and key.isdigit() and 0 < int(key) < 1 << 63):
                raise UsageError(f"host {self.name}: target {key[:40]!r} is no id; write numbers from 1 on")
            if not directory.startswith("/"):
                raise UsageError(f"host {self.name}: directory {directory!r} of target {key} is not an absolute path")
        if len(set(self.targets.values())) < len(self.targets):
            raise UsageError(f"host {self.name}: two targets have one directory; give each its own")
        if self.manager and self.meta:
            raise UsageError(f"host {self.name}: its manager has a meta service already; leave meta out")
        if not (self.manager or self.meta or self.agent or self.node):
            raise UsageError(f"host {self.name} runs nothing; give manager, meta, agent or node and targets")

    def at(self, port: int) -> str:
        """`host:port` by which others reach a process of this host."""
        return str(Address((self.address or self.name).strip("[]"), port))

    @property
    def everywhere(self) -> str:
        """Where its processes listen: all addresses of the kind by which others reach it."""
        return "[::]" if ":" in self.address else "0.0.0.0"  # noqa: S104 - services of a cluster

    @property
    def target_directories(self) -> dict[int, str]:
        return {int(key): directory for key, directory in self.targets.items()}


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises `UsageError`."""

    cluster: str
    """32 or more hexadecimal digits, drawn at random once."""
    store: _Text
    """URL of the PostgreSQL database in which all managers keep their state, each kind in a table of its own."""
    directory: _Text = "/var/lib/fireflyer"
    """Of each host alone: configurations, logs, certificates."""
    secret_file: _Text = "/etc/fireflyer/secret"  # noqa: S105 - its name
    """Of the managers of the platform."""
    node_secret_file: _Text = "/etc/fireflyer/node-secret"  # noqa: S105
    """Of the services of the file system."""
    objects: str = ""
    """Snapshots and logs of tasks: a directory that all managers share, or a URL of fsspec."""
    ports: Ports = Ports()
    hosts: Annotated[tuple[HostConfig, ...], msgspec.Meta(min_length=1, max_length=MAX_HOSTS)]
    platform: dict[str, Any] = {}
    """More settings of managers of the platform, as their configuration names them."""
    manager: dict[str, Any] = {}
    """More settings of managers of the file system."""
    storage: dict[str, Any] = {}
    """More settings of storage processes; with `root_disk = true` targets may be made in the file system of `/`."""
    agent: AgentSettings = AgentSettings()

    def __post_init__(self) -> None:
        if _CLUSTER.fullmatch(self.cluster) is None:
            raise UsageError(
                f"cluster is {self.cluster[:40]!r}, not 32 or more hexadecimal digits; draw it: openssl rand -hex 16"
            )
        if not self.store.startswith(("postgresql://", "postgres://")):
            raise UsageError("store is not the URL of a PostgreSQL database; write it like postgresql://user@host/name")
        if "table" in parse_qs(urlsplit(self.store).query):
            raise UsageError("store names a table; leave it out: each kind of manager has its own")
        for key in ("directory", "secret_file", "node_secret_file"):
            if not getattr(self, key).startswith("/"):
                raise UsageError(f"{key} is {getattr(self, key)!r}, which is not an absolute path")
        if not self.managers:
            raise UsageError("no host has a manager; give one or more hosts manager = true")
        if len(self.managers) > 1 and not self.objects:
            raise UsageError(
                "objects is missing: several managers need a directory that they share, or a URL such as "
                "s3://bucket/fireflyer"
            )
        self._check_unique()

    def _check_unique(self) -> None:
        found: dict[tuple[str, object], str] = {}
        for host in self.hosts:
            ids = [("name", host.name), *(("target", target) for target in host.target_directories)]
            for one in [*ids, *([("node", host.node)] if host.node else [])]:
                if one in found:
                    raise UsageError(
                        f"hosts {found[one]} and {host.name} both have {one[0]} {one[1]}; give each its own"
                    )
                found[one] = host.name

    @property
    def root_disk(self) -> bool:
        """New targets may be made in the file system of `/`."""
        return self.storage.get("root_disk") is True

    @property
    def managers(self) -> tuple[HostConfig, ...]:
        return tuple(host for host in self.hosts if host.manager)

    @property
    def file_managers(self) -> tuple[str, ...]:
        """`host:port` of each manager of the file system."""
        return tuple(host.at(self.ports.files) for host in self.managers)

    @property
    def target(self) -> str:
        """The file system, as the environment variable FIREFLYER_FS names it."""
        return f"ff://{','.join(self.file_managers)}"

    def host(self, name: str) -> HostConfig:
        """Raises `NotFound`."""
        for one in self.hosts:
            if one.name == name:
                return one
        there = ", ".join(host.name for host in self.hosts[:20])
        raise NotFound(f"the cluster file has no host {name!r} (it has {there}); give one of them with --name")


def read_cluster_file(path: str) -> ClusterFile:
    """Raises `UsageError`: one line that names the file and what is wrong in it."""
    from fireflyer.cli.toml_files import read_toml

    return read_toml(
        path, ClusterFile, name="cluster file", advice="give the TOML file that describes the cluster",
        keys="docs/how-to/cluster.md",
    )  # fmt: skip
