"""A cluster of which all processes run on this machine: what lies where below its directory.

    DIR/cluster.json             what was made, and where the managers listen
    DIR/node-secret              of the services (0600)
    DIR/tokens.json              users that an earlier release kept (0600); the manager renames it to
                                 tokens.json.imported when it has them in its store
    DIR/admin-token              the token of user `admin` (0600)
    DIR/up.lock                  held by who runs it
    DIR/manager-1/               manager.toml, log; store, if it is embedded
    DIR/node-1/                  storage.toml, log; target-1001, ...

`cluster.json` is written before anything is asked of a manager, so that whoever is killed in the middle goes on with
the same ids when the command is given again.
"""

from __future__ import annotations

import os
import secrets
from shlex import quote
from typing import Annotated, Final

import msgspec

from fireflyer.accounts.importing import IMPORTED_SUFFIX
from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.toml_text import to_toml
from fireflyer.base.units import GIB
from fireflyer.fs.schema.ids import NodeId, TargetId
from fireflyer.fs.schema.manager import NewChain
from fireflyer.fs.service.manager.config import ManagerConfig
from fireflyer.fs.service.meta.config import MetaSettings
from fireflyer.fs.service.storage.config import StorageConfig, StorageTarget
from fireflyer.identity import new_secret, save_secret
from fireflyer.identity.private_files import read_private_file, write_private_file

__all__ = ["ADMIN", "TABLE", "Layout", "LocalCluster", "LocalNode", "new_cluster", "with_new_node"]
__all__ += ["without_node"]

ADMIN: Final = "admin"
_LATER: Final = ("limits", "unread_s", "accounts", "root_disk")
"""Settings that older releases refuse: they are written only where they are not the defaults."""
TABLE: Final = 1
"""The chain table that `up` makes."""
MAX_FILE_BYTES: Final = 64 << 20
TARGETS_PER_NODE_ID: Final = 1000
"""Target 2003 is the third one of node 2."""
_VERSION: Final = 1
_RESERVE_BYTES: Final = GIB
"""Of one's own machine, whose disk is not for chunks alone and may be nearly full."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class LocalNode(msgspec.Struct, frozen=True):
    id: NodeId
    targets: tuple[TargetId, ...]


class LocalCluster(msgspec.Struct, frozen=True, kw_only=True):
    version: int = _VERSION
    cluster: str
    replicas: _Count
    store: str
    """Empty: embedded, beside the one manager."""
    durable: bool
    failure_timeout_ms: int
    nodes: tuple[LocalNode, ...]
    chains: tuple[NewChain, ...]
    """As they are made at first; later the manager knows better."""
    managers: tuple[str, ...]
    """Where each of them listened last; port 0 before it was started."""
    next_node: NodeId = 1
    """Ids of nodes that were retired are not given again: their directories may still be there."""
    accounts: str = ""
    """Where the manager of a platform says whose token it is: its users are those of this cluster. Empty: its managers
    keep them."""


def new_cluster(
    *,
    nodes: int,
    replicas: int,
    targets_per_node: int,
    managers: int,
    store: str,
    durable: bool,
    failure_timeout_ms: int,
) -> LocalCluster:
    """Raises `UsageError` where no chains can be made of it."""
    # Here, since every command of a local cluster imports this module: the search imports numpy.
    from fireflyer.fs.core.placement import place, uniform_cluster

    if targets_per_node >= TARGETS_PER_NODE_ID:
        raise UsageError(f"{targets_per_node} targets per node; give at most {TARGETS_PER_NODE_ID - 1}")
    if managers > 1 and not store:
        raise UsageError(f"{managers} managers need a shared store; add --store postgresql://user@host/database")
    if store and not store.startswith(("postgresql://", "postgres://")):
        raise UsageError(
            "--store is not the URL of a PostgreSQL database; write it like postgresql://user@host/database"
        )
    table = place(uniform_cluster(nodes, targets_per_node), replicas).table
    given: dict[NodeId, int] = {}
    chains = []
    for number, chain in enumerate(table.chains, 1):
        targets = []
        for where in chain:
            given[where.node] = given.get(where.node, 0) + 1
            targets.append(where.node * TARGETS_PER_NODE_ID + given[where.node])
        chains.append(NewChain(number, tuple(targets)))
    return LocalCluster(
        cluster=f"fs-{secrets.token_hex(8)}",
        replicas=replicas,
        store=store,
        durable=durable,
        failure_timeout_ms=failure_timeout_ms,
        nodes=tuple(
            LocalNode(node, tuple(node * TARGETS_PER_NODE_ID + 1 + at for at in range(targets_per_node)))
            for node in range(1, nodes + 1)
        ),
        chains=tuple(chains),
        managers=("127.0.0.1:0",) * managers,
        next_node=nodes + 1,
    )


def with_new_node(cluster: LocalCluster, targets: int | None) -> tuple[LocalCluster, LocalNode]:
    """The cluster with one more node of so many targets, by default as many as the first one has."""
    number = max([cluster.next_node, *(node.id + 1 for node in cluster.nodes)])
    count = targets if targets is not None else len(cluster.nodes[0].targets) if cluster.nodes else 1
    node = LocalNode(number, tuple(number * TARGETS_PER_NODE_ID + 1 + at for at in range(count)))
    return msgspec.structs.replace(cluster, nodes=(*cluster.nodes, node), next_node=number + 1), node


def without_node(cluster: LocalCluster, node: NodeId) -> LocalCluster:
    return msgspec.structs.replace(cluster, nodes=tuple(one for one in cluster.nodes if one.id != node))


class Layout:
    """Paths below `directory`, and what is written there."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.secret_file = self._path("node-secret")
        self.tokens_file = self._path("tokens.json")
        self.admin_token_file = self._path("admin-token")
        self.lock_file = self._path("up.lock")
        self._cluster_file = self._path("cluster.json")

    def _path(self, *names: str) -> str:
        return os.path.join(self.directory, *names)

    # --- the cluster ---

    def exists(self) -> bool:
        return os.path.exists(self._cluster_file)

    def load(self) -> LocalCluster:
        """Raises `NotFound` where none was made, `DataCorruption`."""
        try:
            data = read_private_file(self._cluster_file, MAX_FILE_BYTES)
        except NotFound:
            raise NotFound(
                f"{self.directory} holds no cluster; make one: ff fs up --dir {quote(self.directory)}"
            ) from None
        try:
            found = decode_json(data, LocalCluster)
        except DECODE_ERRORS as error:
            raise DataCorruption(f"{self._cluster_file} is damaged: {error}; restore it from a backup") from None
        if found.version != _VERSION:
            raise DataCorruption(
                f"{self._cluster_file} has format version {found.version}, this release reads {_VERSION}; install the "
                "release that wrote it"
            )
        return found

    def save(self, cluster: LocalCluster) -> None:
        write_private_file(
            self._cluster_file, msgspec.json.format(msgspec.json.encode(_shown(cluster)), indent=1) + b"\n"
        )

    def make_directory(self) -> None:
        """Raises `UsageError` for one that has something else in it."""
        if os.path.lexists(self.directory) and not os.path.isdir(self.directory):
            raise UsageError(f"{self.directory} is not a directory; give a new one with --dir")
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            others = [] if self.exists() else [name for name in os.listdir(self.directory) if name != "up.lock"]
        except OSError as error:
            raise translate_os_error(error, f"make {self.directory}") from error
        # What a killed `up` has left before it wrote cluster.json is ours.
        strangers = sorted(set(others) - {"up.log", "node-secret", "tokens.json", "tokens.json.lock", "admin-token"})
        if strangers:
            raise UsageError(
                f"{self.directory} is not empty and holds no cluster (it has {strangers[0]!r}); give a new or empty "
                "directory"
            )

    def make_secret(self) -> None:
        """The node secret, if it is not there."""
        if not os.path.exists(self.secret_file):
            save_secret(new_secret(), self.secret_file)

    @property
    def has_admin_token(self) -> bool:
        return os.path.exists(self.admin_token_file)

    def _had_file_of_users(self) -> bool:
        return os.path.exists(self.tokens_file) or os.path.exists(self.tokens_file + IMPORTED_SUFFIX)

    def write_admin_token(self, token: str) -> None:
        """With which commands on this directory prove themselves."""
        write_private_file(self.admin_token_file, token.encode() + b"\n")

    def admin_token(self) -> str:
        return read_private_file(self.admin_token_file, 4096).decode().strip()

    # --- processes ---

    def target_directory(self, node: NodeId, target: TargetId) -> str:
        return self._path(f"node-{node}", f"target-{target}")

    def log_file(self, name: str) -> str:
        return self._path(name, "log")

    def store_url(self, cluster: LocalCluster, number: int = 1) -> str:
        """Of a manager."""
        return cluster.store or f"embedded:{self._path(f'manager-{number}', 'store')}"

    def write_manager(self, cluster: LocalCluster, number: int, listen: str) -> str:
        """Its configuration; the file's path."""
        name = f"manager-{number}"
        os.makedirs(self._path(name), mode=0o700, exist_ok=True)
        config = ManagerConfig(
            name=name,
            cluster=cluster.cluster,
            store=self.store_url(cluster, number),
            listen=listen,
            secret_file=self.secret_file,
            tokens_file=self.tokens_file if self._had_file_of_users() else "",
            accounts=(cluster.accounts,) if cluster.accounts else (),
            administrators=(ADMIN,),
            failure_timeout_ms=cluster.failure_timeout_ms,
            lease_ms=max(20, cluster.failure_timeout_ms // 4),
            files=MetaSettings(table=TABLE, trusted_root=True, root_uid=os.getuid(), root_gid=os.getgid()),
        )
        return self._write_config(self._path(name, "manager.toml"), config)

    def write_storage(self, cluster: LocalCluster, node: LocalNode) -> str:
        os.makedirs(self._path(f"node-{node.id}"), mode=0o700, exist_ok=True)
        config = StorageConfig(
            cluster=cluster.cluster,
            node=node.id,
            managers=cluster.managers,
            targets=tuple(StorageTarget(one, self.target_directory(node.id, one)) for one in node.targets),
            secret_file=self.secret_file,
            reserve_at_most_bytes=_RESERVE_BYTES,
            durable=cluster.durable,
            io_threads=2,
            job_threads=1,
        )
        return self._write_config(self._path(f"node-{node.id}", "storage.toml"), config)

    def _write_config(self, path: str, config: msgspec.Struct) -> str:
        defaults = {one.name: one.default for one in msgspec.structs.fields(config)}
        later = [name for name in _LATER if name in defaults and getattr(config, name) == defaults[name]]
        table = {name: value for name, value in msgspec.to_builtins(config).items() if name not in later}
        write_private_file(path, to_toml(table).encode())
        return path


def _shown(cluster: LocalCluster) -> dict[str, object]:
    """As the file says it: `accounts` only where there are some."""
    table: dict[str, object] = msgspec.to_builtins(cluster)
    if not cluster.accounts:
        del table["accounts"]
    return table
