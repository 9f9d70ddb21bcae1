"""From the cluster file to the processes of one host: their commands and their configurations. No IO."""

from __future__ import annotations

import os
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec

from fireflyer.base.decoding import convert
from fireflyer.base.errors import UsageError
from fireflyer.base.toml_text import to_toml
from fireflyer.cli.hosts.config import ClusterFile, HostConfig
from fireflyer.cluster.manager.config import PlatformConfig
from fireflyer.fs.service.manager.config import ManagerConfig
from fireflyer.fs.service.meta.config import MetaConfig
from fireflyer.fs.service.storage.config import StorageConfig

__all__ = ["AGENT", "STORAGE", "HostProcess", "platform_config", "processes_of"]

AGENT: Final = "agent"
STORAGE: Final = "storage"
FILES_TABLE: Final = "fireflyer_files"
PLATFORM_TABLE: Final = "fireflyer_platform"
_C = TypeVar("_C", bound=msgspec.Struct)


class HostProcess(NamedTuple):
    """One process of a host: `ff ARGUMENTS`."""

    name: str
    """Of its directory below that of the host, too: there is its log."""
    arguments: tuple[str, ...]
    config_file: str = ""
    """Where `config` is to be written; empty: it has none."""
    config: str = ""
    environment: tuple[tuple[str, str], ...] = ()


def processes_of(cluster: ClusterFile, host: HostConfig) -> tuple[HostProcess, ...]:
    """In the order in which they are started. Raises `UsageError` for settings that a process would refuse."""
    found = []
    if host.manager:
        config = _platform(cluster, host)
        found.append(_configured(cluster, "platform-manager", ("manager", "run"), config))
        found.append(_configured(cluster, "files-manager", ("fs", "manager"), _manager(cluster, host)))
    if host.meta:
        found.append(_configured(cluster, "meta", ("fs", "meta"), _meta(cluster, host)))
    if host.node:
        found.append(_configured(cluster, STORAGE, ("fs", "storage"), _storage(cluster, host)))
    if host.agent:
        found.append(_agent(cluster))
    return tuple(found)


def platform_config(cluster: ClusterFile, host: HostConfig) -> PlatformConfig:
    """Of the manager of the platform on `host`. Raises `UsageError` where it has none."""
    if not host.manager:
        names = ", ".join(one.name for one in cluster.managers)
        raise UsageError(f"host {host.name} has no manager of the platform; do it on one that has ({names})")
    return _platform(cluster, host)


def _platform(cluster: ClusterFile, host: HostConfig) -> PlatformConfig:
    ports = cluster.ports
    return _merged(
        "platform",
        cluster.platform,
        PlatformConfig,
        name=host.name,
        cluster=cluster.cluster,
        store=_with_table(cluster.store, PLATFORM_TABLE),
        directory=os.path.join(cluster.directory, "platform-manager"),
        listen=f"{host.everywhere}:{ports.platform}",
        listen_agents=f"{host.everywhere}:{ports.agents}",
        advertise=f"https://{host.at(ports.platform)}",
        advertise_agents=host.at(ports.agents),
        managers=tuple(one.at(ports.agents) for one in cluster.managers),
        secret_file=cluster.secret_file,
        listen_accounts=f"{host.everywhere}:{ports.accounts}",
        accounts_secret_file=cluster.node_secret_file,
        objects=cluster.objects,
    )


def _manager(cluster: ClusterFile, host: HostConfig) -> ManagerConfig:
    return _merged(
        "manager",
        _with_trusted_root(cluster.manager),
        ManagerConfig,
        name=host.name,
        cluster=cluster.cluster,
        store=_with_table(cluster.store, FILES_TABLE),
        listen=f"{host.everywhere}:{cluster.ports.files}",
        advertise=host.at(cluster.ports.files),
        secret_file=cluster.node_secret_file,
        accounts=tuple(one.at(cluster.ports.accounts) for one in cluster.managers),
    )


def _with_trusted_root(given: dict[str, Any]) -> dict[str, Any]:
    """Root of a host with the node secret is root of the files, unless the file says otherwise."""
    files = given.get("files", {})
    return given | {"files": {"trusted_root": True} | files} if isinstance(files, dict) else given


def _meta(cluster: ClusterFile, host: HostConfig) -> MetaConfig:
    """With the settings that managers have for their meta services."""
    given = _with_trusted_root(cluster.manager)
    return _merged(
        "manager",
        {key: given[key] for key in ("administrators", "files", "limits") if key in given},
        MetaConfig,
        name=host.name,
        cluster=cluster.cluster,
        store=_with_table(cluster.store, FILES_TABLE),
        listen=f"{host.everywhere}:{cluster.ports.meta}",
        advertise=host.at(cluster.ports.meta),
        managers=cluster.file_managers,
        secret_file=cluster.node_secret_file,
    )


def _storage(cluster: ClusterFile, host: HostConfig) -> StorageConfig:
    targets = [{"id": one, "directory": directory} for one, directory in host.target_directories.items()]
    return _merged(
        "storage",
        cluster.storage,
        StorageConfig,
        cluster=cluster.cluster,
        node=host.node,
        managers=cluster.file_managers,
        targets=targets,
        secret_file=cluster.node_secret_file,
        host=host.everywhere.strip("[]"),
        port=cluster.ports.storage,
        advertise=host.address.strip("[]") or host.name,
    )


def _agent(cluster: ClusterFile) -> HostProcess:
    settings = cluster.agent
    options = [f"--run-logs-mib={settings.run_logs_mib}", f"--accounts-dir={os.path.join(cluster.directory, 'runs')}"]
    if settings.accounts:
        options.append(f"--accounts={settings.accounts}")
    if settings.own_user:
        options.append("--own-user")
    return HostProcess(AGENT, ("agent", "run", *options), environment=(("FIREFLYER_FS", cluster.target),))


def _configured(cluster: ClusterFile, name: str, words: tuple[str, ...], config: msgspec.Struct) -> HostProcess:
    path = os.path.join(cluster.directory, name, "config.toml")
    return HostProcess(name, (*words, path), path, to_toml(msgspec.to_builtins(config)))


def _merged(table: str, given: dict[str, Any], config_type: type[_C], **ours: Any) -> _C:
    """What the cluster file says in [table] beside what follows from the rest of it. Raises `UsageError`."""
    twice = sorted(set(given) & set(ours))
    if twice:
        raise UsageError(f"[{table}] has {twice[0]}, which follows from the rest of the cluster file; leave it out")
    try:
        return convert(ours | given, config_type)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"[{table}] of the cluster file: {error}") from error


def _with_table(store: str, table: str) -> str:
    parts = urlsplit(store)
    query = f"{parts.query}&" if parts.query else ""
    return urlunsplit(parts._replace(query=f"{query}{urlencode({'table': table})}"))
