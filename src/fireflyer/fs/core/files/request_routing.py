"""How requests to the meta service are sent: which are numbered, which go alone, to which service."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, cast

from fireflyer.fs.schema.meta import (
    Access,
    Allocate,
    Close,
    GetLock,
    GetQuota,
    GetSpace,
    GetXattr,
    ListDirectory,
    ListXattrs,
    Lock,
    Open,
    OpenFlag,
    PathRef,
    ReadLink,
    RemoveTree,
    Renew,
    Report,
    Request,
    Reserve,
    SetAttributes,
    SetXattr,
    Stat,
    StatMany,
    Truncate,
)

__all__ = [
    "MAX_LISTED_TOGETHER",
    "MAX_TOGETHER_BYTES",
    "changes",
    "cost_of",
    "of_handle",
    "routing_key_of",
    "service_for",
]
__all__ += ["is_lazy", "takes_long"]

MAX_TOGETHER_BYTES: Final = 1 << 20
"""Of the requests of one `Calls`, about."""
MAX_LISTED_TOGETHER: Final = 16384
"""Entries and places that one `Calls` may ask for."""
_READING: Final = (
    Stat, StatMany, ListDirectory, ReadLink, Access, GetXattr, ListXattrs, GetSpace, GetLock, GetQuota, Renew,
)  # fmt: skip
_WRITES: Final = OpenFlag.CREATE | OpenFlag.TRUNCATE | OpenFlag.WRITE


def changes(request: Request) -> bool:
    """It has a number."""
    if isinstance(request, Open):
        return bool(request.flags & _WRITES)
    return not isinstance(request, _READING)


def takes_long(request: Request) -> bool:
    """It is sent alone: nobody else waits for it. An open that cuts asks the chains of the file, one of which may be
    away; with `CREATE` there is mostly nothing to cut, and such opens come in numbers."""
    if isinstance(request, Open):
        return request.flags & (OpenFlag.TRUNCATE | OpenFlag.CREATE) == OpenFlag.TRUNCATE
    return isinstance(request, Truncate | Allocate | RemoveTree) or (isinstance(request, Lock) and request.wait_ns > 0)


def is_lazy(request: Request) -> bool:
    """Its answer may wait for other requests, and theirs must not wait for it: they are sent apart."""
    return isinstance(request, Close) and request.lazy


def of_handle(request: Request) -> bool:
    """It means what this client's session holds: in another session there is no such thing."""
    if isinstance(request, Truncate):
        return request.handle != 0
    if isinstance(request, SetAttributes):
        return request.report is not None
    return isinstance(request, Report | Close | Reserve | Allocate | Lock)


def cost_of(request: Request) -> tuple[int, int]:
    """About its bytes, and what it lists."""
    if isinstance(request, StatMany):
        return sum(len(one.path) + 16 for one in request.places), len(request.places)
    if isinstance(request, ListDirectory):
        return 300, request.limit
    if isinstance(request, SetXattr):
        return len(request.value) + 300, 0
    return 300, 0


def routing_key_of(request: Request) -> bytes:
    """What it changes or looks at, as far as its client knows: requests with the same go to the same service. The
    directory of a place, or the inode."""
    for name in ("place", "target", "directory", "inode"):
        found = getattr(request, name, None)
        if isinstance(found, PathRef):
            return b"%d/%s" % (found.base, found.path.rpartition(b"/")[0])
        if found is not None:
            return b"%d" % cast("int", found)
    return b""


def service_for(routing_key: bytes, services: Sequence[str]) -> str:
    """The one with the highest hash: when one comes or goes, only its requests move."""
    if len(services) == 1:
        return services[0]
    return max(services, key=lambda one: hashlib.blake2b(routing_key + b"@" + one.encode(), digest_size=8).digest())
