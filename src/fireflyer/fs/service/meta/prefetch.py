"""What requests are going to read, asked of the database in a few questions before they are carried out.

Over a network each key that a body reads is a round trip, and a batch of a commit queue reads hundreds, one after the
other. Most of them are known before: the rows of the client, and the directories and names that lie on the way of a
path. A question brings one step of all paths. What is not prefetched (links, quota trees) is read when it is needed;
what was prefetched and not needed has done no harm but to the conflict set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from fireflyer.base.errors import DataCorruption
from fireflyer.fs.core.meta.replies import rows_of
from fireflyer.fs.core.meta.tables import WRITERS, decode_entry, entry_key, inode_key, pair_key
from fireflyer.fs.schema.inodes import MAX_NAME_BYTES, ROOT, InodeId
from fireflyer.fs.schema.meta import Close, PathRef, Report, Request, Reserve, SetAttributes
from fireflyer.kvstore import TransactionBatch

__all__ = ["places_of", "prefetch"]

MAX_STEPS: Final = 8
"""Names of a path that are prefetched."""
_PLACES: Final = ("place", "source", "target", "existing")
_INODES: Final = ("inode", "directory")

Asking = tuple[int, int, Request]
"""Client, number (0: none), request."""


def places_of(request: Request) -> Iterable[PathRef]:
    """That it names, as far as that is seen."""
    places = getattr(request, "places", None)
    if places is not None:
        yield from places
        return
    for name in _PLACES:
        place = getattr(request, name, None)
        if isinstance(place, PathRef):
            yield place
    for name in _INODES:
        inode = getattr(request, name, None)
        if isinstance(inode, int):
            yield PathRef(inode)


async def prefetch(transaction_batch: TransactionBatch, asking: Sequence[Asking]) -> None:
    """The batch knows it then. Raises what the store raises."""
    keys: dict[bytes, None] = {}
    walks: list[tuple[InodeId, list[bytes]]] = []
    for client, number, request in asking:
        if number:
            keys.update(dict.fromkeys(rows_of(client, number)))
        told = request.report if isinstance(request, SetAttributes) else request
        if isinstance(told, Report | Close | Reserve):
            keys[pair_key(WRITERS, told.inode, client)] = None
        for place in places_of(request):
            base = ROOT if place.path.startswith(b"/") else place.base
            walks.append((base, [name for name in place.path.split(b"/") if name][:MAX_STEPS]))
    while keys or walks:
        steps: list[tuple[bytes, list[bytes]]] = []
        for inode, names in walks:
            keys[inode_key(inode)] = None
            if names and len(names[0]) <= MAX_NAME_BYTES:
                key = entry_key(inode, names[0])
                keys[key] = None
                steps.append((key, names[1:]))
        found = dict(zip(keys, await transaction_batch.get_many(list(keys)), strict=True))
        walks = [(inode, names) for key, names in steps if (inode := _inode_of(key, found.get(key)))]
        keys = {}


def _inode_of(key: bytes, value: bytes | None) -> InodeId:
    """0: none, or a damaged row, of which the request that reads it is told."""
    if value is None:
        return 0
    try:
        return decode_entry(key, value).id
    except DataCorruption:
        return 0
