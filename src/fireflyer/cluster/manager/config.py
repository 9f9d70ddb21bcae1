"""Configuration of a manager process, as its TOML file says it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.runtime.address import is_loopback, parse_listen

__all__ = ["PlatformConfig"]

_Ms = Annotated[int, msgspec.Meta(ge=20, le=86_400_000)]


class PlatformConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises `UsageError` where settings contradict each other."""

    name: str
    """Of this manager."""
    cluster: str
    """32 or more hexadecimal digits, drawn at random, the same for all managers of the cluster."""
    store: str
    """`embedded:DIRECTORY`, or the URL of a PostgreSQL database for several managers."""
    directory: str
    """Private to the manager: certificate, and join tokens of machines."""
    listen: str = "127.0.0.1:9440"
    """HTTP."""
    listen_agents: str = "127.0.0.1:9441"
    advertise: str = ""
    """URL at which users reach this manager; empty: as it listens."""
    advertise_agents: str = ""
    """`host:port` at which agents reach it; empty: as it listens."""
    managers: tuple[str, ...] = ()
    """`host:port` of all managers, for agents; empty: this one."""
    secret_file: str
    """Shared by the managers of the cluster (mode 0600): signs sessions."""
    tokens_file: str = ""
    """Users and their tokens in a file, as those of a file system; empty: in the store, for all managers."""
    operators: tuple[str, ...] = ()
    """Users who are administrators of the platform, beside those with the role."""
    tls_certificate: str = ""
    tls_key: str = ""
    lease_ms: _Ms = 4000
    lost_ms: _Ms = 20_000
    stop_after_ms: _Ms = 300_000
    stop_slack_ms: _Ms = 60_000
    settle_ms: _Ms = 10_000
    objects: str = ""
    """Where blobs of snapshots and logs are kept: an absolute directory, or a URL of fsspec; empty: `objects` in
    `directory`. The same for all managers."""
    logs_directory: str = ""
    """Of the logs' indices and newest bytes, which all managers share; empty: `logs` in `directory`."""
    logs_of_run_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1024
    """The logs of a run are cut there."""
    logs_keep_days: Annotated[int, msgspec.Meta(ge=1, le=36_500)] = 30
    """After the end of their task."""
    metrics_listen: str = ""
    user_requests_per_s: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 50
    """Of one user; eight times as many at once."""
    failed_logins_per_minute: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 60
    """From one address: requests that do not prove who asks."""

    def __post_init__(self) -> None:
        for name in ("listen", "listen_agents"):
            parse_listen(getattr(self, name))
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise UsageError("tls_certificate and tls_key belong together; give both or none")

    @property
    def secure(self) -> bool:
        """Off loopback HTTP is never plain."""
        return bool(self.tls_certificate) or not is_loopback(parse_listen(self.listen)[0])
