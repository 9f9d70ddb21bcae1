"""What the meta service is told, wherever it runs, and `ff fs meta`'s file."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fireflyer.base.units import MIB
from fireflyer.fs.schema.ids import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, TableId
from fireflyer.fs.schema.inodes import MAX_STRIPE
from fireflyer.fs.service.limits import PeerLimits

__all__ = ["NOBODY", "MetaConfig", "MetaSettings"]

NOBODY: Final = 65534
"""The user and group as whom uid 0 and gid 0 act where a trusted mount may not speak for root."""

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
_U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


class MetaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The same for all services of a cluster."""

    trusted_root: bool = False
    """Uid 0 of a trusted mount is uid 0 here."""
    table: TableId = 1
    """The chain table of new files."""
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)] = MIB
    stripe: Annotated[int, msgspec.Meta(ge=1, le=MAX_STRIPE)] = 16
    """Chains of a new file, or all of the table where it has less."""
    root_uid: _U32 = 0
    root_gid: _U32 = 0
    """Owner of "/" when it is made; and its mode."""
    root_mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)] = 0o755


class MetaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of a process that serves nothing else. `store`, `cluster`, `secret_file` and what is in `files` must be as
    the managers have it."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    cluster: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    store: _Text
    """"postgresql://...": an embedded store belongs to the manager's process, which serves files itself."""
    listen: _Text
    """host:port; port 0 takes a free one."""
    advertise: str = ""
    managers: Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1)]
    secret_file: _Text
    tokens_file: str = ""
    """Not read: managers are asked for users. Earlier releases had them in this file."""
    administrators: tuple[Annotated[str, msgspec.Meta(max_length=64)], ...] = ("admin",)
    """Not read: managers say who is an administrator. Earlier releases named users in `tokens_file` here."""
    files: MetaSettings = MetaSettings()
    limits: PeerLimits = PeerLimits()
    metrics_listen: str = ""
    """host:port of an HTTP endpoint for Prometheus, open to whoever reaches it; empty: none."""
