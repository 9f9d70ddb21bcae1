"""How requests to the meta service are sent: which are numbered, which go alone, to which service."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, cast

from fireflyer.fs.schema.meta import (
    Access,
    Allocate,
    Close,
    GetArea,
    GetLock,
    GetSpace,
    GetValue,
    ListDirectory,
    ListValues,
    Lock,
    Open,
    OpenFlag,
    Place,
    ReadLink,
    RemoveTree,
    Renew,
    Report,
    Request,
    Reserve,
    SetValue,
    Stat,
    StatMany,
    Truncate,
)

__all__ = ["MAX_LISTED_TOGETHER", "MAX_TOGETHER_BYTES", "changes", "cost_of", "lane_of", "of_handle", "service_for"]
__all__ += ["takes_long"]

MAX_TOGETHER_BYTES: Final = 1 << 20
"""Of the requests of one `Calls`, about."""
MAX_LISTED_TOGETHER: Final = 16384
"""Entries and places that one `Calls` may ask for."""
_READING: Final = (
    Stat, StatMany, ListDirectory, ReadLink, Access, GetValue, ListValues, GetSpace, GetLock, GetArea, Renew,
)  # fmt: skip
_WRITES: Final = OpenFlag.CREATE | OpenFlag.TRUNCATE | OpenFlag.WRITE


def changes(request: Request) -> bool:
    """It has a number."""
    if isinstance(request, Open):
        return bool(request.flags & _WRITES)
    return not isinstance(request, _READING)


def takes_long(request: Request) -> bool:
    """It is sent alone: nobody else waits for it."""
    return isinstance(request, Truncate | Allocate | RemoveTree) or (isinstance(request, Lock) and request.wait_ns > 0)


def of_handle(request: Request) -> bool:
    """It means what this client's session holds: in another session there is no such thing."""
    if isinstance(request, Truncate):
        return request.handle != 0
    return isinstance(request, Report | Close | Reserve | Allocate | Lock)


def cost_of(request: Request) -> tuple[int, int]:
    """About its bytes, and what it lists."""
    if isinstance(request, StatMany):
        return sum(len(one.path) + 16 for one in request.places), len(request.places)
    if isinstance(request, ListDirectory):
        return 300, request.limit
    if isinstance(request, SetValue):
        return len(request.value) + 300, 0
    return 300, 0


def lane_of(request: Request) -> bytes:
    """What it changes or looks at, as far as its client knows: requests with the same go to the same service. The
    directory of a place, or the inode."""
    for name in ("place", "target", "directory", "inode"):
        found = getattr(request, name, None)
        if isinstance(found, Place):
            return b"%d/%s" % (found.base, found.path.rpartition(b"/")[0])
        if found is not None:
            return b"%d" % cast("int", found)
    return b""


def service_for(lane: bytes, services: Sequence[str]) -> str:
    """The one with the highest hash: when one comes or goes, only its lanes move."""
    if len(services) == 1:
        return services[0]
    return max(services, key=lambda one: hashlib.blake2b(lane + b"@" + one.encode(), digest_size=8).digest())
