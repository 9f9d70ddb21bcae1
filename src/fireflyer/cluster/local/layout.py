"""What lies where below the directory of `ff up`.

    DIR/platform.json            what was made, and where its processes listen
    DIR/connection.json          URL, fingerprint and token of user `admin` (0600), for commands
    DIR/secret                   of the manager (0600)
    DIR/.ffignore                keeps DIR out of the snapshots of the directory in which it lies
    DIR/up.lock                  held by who runs it
    DIR/manager/                 manager.toml, log, store
    DIR/agent-1/                 state of the agent, log
    DIR/storage/                 the file system, as `ff fs up` makes it; absent where there is none

`platform.json` is written before anything is started, so that whoever is killed in the middle goes on with the same
identity when the command is given again.
"""

from __future__ import annotations

import os
import secrets
from shlex import quote
from typing import Annotated, Final, NamedTuple

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.toml_text import to_toml
from fireflyer.base.units import MS
from fireflyer.cluster.client import Connection
from fireflyer.cluster.local.config import UpConfig
from fireflyer.cluster.manager.config import PlatformConfig
from fireflyer.cluster.objects.ignore import IGNORE_FILE
from fireflyer.identity import new_secret, save_secret
from fireflyer.identity.private_files import read_private_file, write_private_file

__all__ = [
    "ADMIN",
    "CONNECTION_NAME",
    "AccountsAt",
    "LocalPlatform",
    "PlatformLayout",
    "new_platform",
]

ADMIN: Final = "admin"
CONNECTION_NAME: Final = "connection.json"
_MAX_BYTES: Final = 1 << 20
_VERSION: Final = 1
_OURS: Final = {IGNORE_FILE, "up.lock", "up.log", "secret", "tokens.json", "tokens.json.lock", "manager", "storage"}


class LocalPlatform(msgspec.Struct, frozen=True, kw_only=True):
    version: int = _VERSION
    cluster: str
    nodes: Annotated[int, msgspec.Meta(ge=1, le=256)]
    zones: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    guaranteed_ns: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    """How long a run is not interrupted."""
    listen: str = "127.0.0.1:0"
    """Where the manager listened last; port 0 before it was started."""
    listen_agents: str = "127.0.0.1:0"


class AccountsAt(NamedTuple):
    """Where the manager says whose token it is, `host:port`, and the node secret of the file system that may ask."""

    listen: str
    secret_file: str


def new_platform(nodes: int, zones: int, guaranteed_ns: int) -> LocalPlatform:
    return LocalPlatform(cluster=secrets.token_hex(16), nodes=nodes, zones=zones, guaranteed_ns=guaranteed_ns)


class PlatformLayout:
    """Paths below `directory`, and what is written there."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.secret_file = self._path("secret")
        self._tokens_file = self._path("tokens.json")
        """Users of a directory that an earlier release made."""
        self.lock_file = self._path("up.lock")
        self.connection_file = self._path(CONNECTION_NAME)
        self.storage_directory = self._path("storage")
        self._platform_file = self._path("platform.json")

    def _path(self, *names: str) -> str:
        return os.path.join(self.directory, *names)

    def exists(self) -> bool:
        return os.path.exists(self._platform_file)

    def load(self) -> LocalPlatform:
        """Raises `NotFound` where none was made, `DataCorruption`."""
        try:
            data = read_private_file(self._platform_file, _MAX_BYTES)
        except NotFound:
            raise NotFound(
                f"{self.directory} holds no platform; make one: ff up --dir {quote(self.directory)}"
            ) from None
        try:
            found = decode_json(data, LocalPlatform)
        except DECODE_ERRORS as error:
            raise DataCorruption(f"{self._platform_file} is damaged: {error}; restore it from a backup") from None
        if found.version != _VERSION:
            raise DataCorruption(
                f"{self._platform_file} has format version {found.version}, this release reads {_VERSION}; install the "
                "release that wrote it"
            )
        return found

    def save(self, platform: LocalPlatform) -> None:
        write_private_file(self._platform_file, msgspec.json.format(msgspec.json.encode(platform), indent=1) + b"\n")

    def make_directory(self) -> None:
        """Raises `UsageError` for one that has something else in it."""
        if os.path.lexists(self.directory) and not os.path.isdir(self.directory):
            raise UsageError(f"{self.directory} is not a directory; give a new one with --dir")
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            others = [] if self.exists() else sorted(set(os.listdir(self.directory)) - _OURS)
        except OSError as error:
            raise translate_os_error(error, f"make {self.directory}") from error
        if others:
            raise UsageError(
                f"{self.directory} is not empty and holds no platform (it has {others[0]!r}); give a new or empty "
                "directory"
            )
        write_private_file(self._path(IGNORE_FILE), b"*\n")

    def make_secret(self) -> None:
        if not os.path.exists(self.secret_file):
            save_secret(new_secret(), self.secret_file)

    @property
    def has_connection(self) -> bool:
        return os.path.exists(self.connection_file)

    def write_connection(self, url: str, fingerprint: str, token: str) -> None:
        """For commands on this machine."""
        connection = Connection(url=url, token=token, fingerprint=fingerprint)
        write_private_file(self.connection_file, msgspec.json.encode(connection) + b"\n")

    # --- processes ---

    def log_file(self, name: str) -> str:
        os.makedirs(self._path(name), mode=0o700, exist_ok=True)
        return self._path(name, "log")

    def agent_directory(self, name: str) -> str:
        return self._path(name, "state")

    def has_agent(self, name: str) -> bool:
        return os.path.isdir(self.agent_directory(name))

    def write_manager(
        self,
        platform: LocalPlatform,
        wanted: UpConfig,
        listen: str,
        listen_agents: str,
        accounts: AccountsAt | None = None,
    ) -> tuple[PlatformConfig, str]:
        """Its configuration, and the file that has it."""
        os.makedirs(self._path("manager"), mode=0o700, exist_ok=True)
        config = PlatformConfig(
            name="manager",
            cluster=platform.cluster,
            store=f"embedded:{self._path('manager', 'store')}",
            directory=self._path("manager"),
            listen=listen,
            listen_agents=listen_agents,
            secret_file=self.secret_file,
            tokens_file=self._tokens_file if os.path.exists(self._tokens_file) else "",
            listen_accounts="" if accounts is None else accounts.listen,
            accounts_secret_file="" if accounts is None else accounts.secret_file,
            operators=(ADMIN,),
            settle_ms=1000,
            metrics_listen=wanted.metrics_listen,
            objects=wanted.objects,
            history=wanted.history,
            history_keep=wanted.history_keep,
            logs_of_run_mib=wanted.logs_of_run_mib,
            logs_keep_days=wanted.logs_keep_days,
            stop_after_ms=wanted.stop_after_ns // MS,
            health=wanted.health.of_managers(),
        )
        path = self._path("manager", "manager.toml")
        write_private_file(path, to_toml(msgspec.to_builtins(config)).encode())
        return config, path
