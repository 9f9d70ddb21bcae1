"""What one user, and all of them, may take of a manager or meta service: a table `limits` in its configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fireflyer.base.units import MIB, SECOND
from fireflyer.runtime.rpc import ServerLimits

__all__ = ["PeerLimits"]

_Connections = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Mib = Annotated[int, msgspec.Meta(ge=16, le=1 << 20)]
"""At least one message of the largest size."""
_Seconds = Annotated[int, msgspec.Meta(ge=1, le=3600)]


class PeerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What users share, a user gets more of while they have less than is free."""

    connections: _Connections = 16384
    """Of services (one of each storage process and trusted mount), and as many of users."""
    connections_of_user: _Connections = 4096
    waiting_mib: _Mib = 1024
    """Requests that are worked at and answers that are not read, of all users."""
    waiting_of_user_mib: _Mib = 256
    frame_s: _Seconds = 60
    """For the rest of a message that has begun to come."""
    unread_s: _Seconds = 60
    """For an answer: who does not read it is cut off."""

    def of_server(self) -> ServerLimits:
        return ServerLimits(
            connections=self.connections,
            connections_per_peer=self.connections_of_user,
            bytes_per_peer=self.waiting_of_user_mib * MIB,
            bytes_of_users=self.waiting_mib * MIB,
            frame_ns=self.frame_s * SECOND,
            unread_ns=self.unread_s * SECOND,
        )
