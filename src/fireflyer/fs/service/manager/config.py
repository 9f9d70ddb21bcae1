"""What a manager process is told: a file that an administrator writes, or `ff fs up`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fireflyer.fs.service.limits import PeerLimits
from fireflyer.fs.service.meta.config import MetaSettings

__all__ = ["ManagerConfig"]

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
_Ms = Annotated[int, msgspec.Meta(ge=20, le=3_600_000)]


class ManagerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All managers of a cluster have the same, but for `name`, `listen` and `advertise`."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    cluster: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    """Its id: directories and stores of another one are refused."""
    store: _Text
    """The key-value store: "embedded:/absolute/path" for one manager, "postgresql://..." for several."""
    listen: _Text
    """host:port; port 0 takes a free one."""
    advertise: str = ""
    """host:port by which others reach it, if not `listen`."""
    secret_file: _Text
    """The node secret: services prove themselves with it."""
    tokens_file: str = ""
    """A file of users and tokens that an earlier release kept: they are brought into `store` once, and the file is
    renamed to FILE.imported. Later changes: `ff fs admin user`."""
    accounts: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=64)] = ()
    """host:port of the managers of a platform (`listen_accounts` there): its users are users here, too, beside those
    in `store`."""
    administrators: tuple[Annotated[str, msgspec.Meta(max_length=64)], ...] = ("admin",)
    """Users in `store` who may ask for everything, beside those with the role `fs:admin`, wherever they are."""
    failure_timeout_ms: _Ms = 6000
    """T. Kept in the store when the cluster is made, and taken from there ever after."""
    lease_ms: _Ms = 2000
    session_ms: _Ms = 60_000
    serve_files: bool = True
    """The meta service runs in this process."""
    files: MetaSettings = MetaSettings()
    limits: PeerLimits = PeerLimits()
    metrics_listen: str = ""
    """host:port of an HTTP endpoint for Prometheus, open to whoever reaches it; empty: none."""

    @property
    def shared_store(self) -> bool:
        """Other processes may have it open as well."""
        return self.store.startswith(("postgresql:", "postgres:"))
