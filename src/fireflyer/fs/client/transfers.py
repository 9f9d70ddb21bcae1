"""Reads and writes of files as transfers between nodes, for network simulators: what a client of a cluster with this
routing sends and gets. Pure.

A read takes each chunk from one of the replicas that serve, in turns. A write goes to the head of each chunk's chain,
and from replica to replica to its end, each of which sends on what it has received as a whole. Chunks of one call go
from one node to another one after the other, as over one connection. Requests, answers, and the work of disks take no
time here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, pairwise
from typing import Final

import numpy as np

from fireflyer.base.errors import UsageError
from fireflyer.fs.client.replica_selector import READ, ReplicaSelector
from fireflyer.fs.core.files.chunk_map import ChunkMap, ChunkRange
from fireflyer.fs.schema.ids import NodeId
from fireflyer.fs.schema.routing import Routing, TargetState
from fireflyer.topology.traffic import Transfer

__all__ = ["FileTransfers"]

_UPDATED: Final = (TargetState.SERVING, TargetState.SYNCING)
"""Members that an update goes through."""
MAX_TRANSFERS: Final = 1 << 24


class FileTransfers:
    """Makes the transfers of one client after another; numbers go on from one to the next.

    >>> of_job = FileTransfers(routing, {1: 10, 2: 11, 3: 12})          # nodes of the storage nodes 1 to 3
    >>> found = of_job.reads(0, ChunkMap(layout, chains), 0, 1 << 30, window=16)
    """

    def __init__(self, routing: Routing, nodes: Mapping[NodeId, int], *, first_id: int = 0) -> None:
        """`nodes`: of the network, by storage node; what is not there serves nobody."""
        self._nodes, self._numbers = dict(nodes), count(first_id)
        self._select = ReplicaSelector(routing, self._nodes)
        self._chains = {chain.id: chain for chain in routing.chains}

    def reads(self, client: int, file: ChunkMap, offset: int, size: int, *, window: int = 0) -> list[Transfer]:
        """Of bytes [offset, offset + size) of a file to the node `client`. `window`: chunks that are read at once; the
        next begins when the one so many places before has arrived; 0: all at once. Raises `UsageError` where nobody
        serves a chain."""
        parts = self._parts(file, offset, size)
        asked = np.zeros(len(parts), READ)
        asked["chain"] = [part.chain for part in parts]
        placed, lost = self._select.place(asked)
        if lost is not None:
            chain = parts[int(np.flatnonzero(lost)[0])].chain
            raise UsageError(f"no storage node that is in `nodes` serves chain {chain}")
        found: list[Transfer] = []
        last: dict[tuple[int, int], int] = {}
        for index, (part, server) in enumerate(zip(parts, placed["server"].tolist(), strict=True)):
            after = (found[index - window].id,) if window and index >= window else ()
            found.append(self._transfer(server, client, part.size, after, last))
        return found

    def writes(self, client: int, file: ChunkMap, offset: int, size: int, *, window: int = 0) -> list[Transfer]:
        """Of bytes [offset, offset + size) of a file from the node `client`. `window`: chunks that are written at once;
        the next begins when the last replica has the one so many places before; 0: all at once. Raises `UsageError`
        where nobody serves a chain, or `nodes` lacks a node of it."""
        found: list[Transfer] = []
        ends: list[int] = []
        last: dict[tuple[int, int], int] = {}
        for index, part in enumerate(self._parts(file, offset, size)):
            after = (ends[index - window],) if window and index >= window else ()
            for source, target in pairwise((client, *self._chain(part))):
                found.append(self._transfer(source, target, part.size, after, last))
                after = (found[-1].id,)
            ends.append(found[-1].id)
        return found

    def _parts(self, file: ChunkMap, offset: int, size: int) -> list[ChunkRange]:
        chunks = size // file.chunk_bytes
        if offset < 0 or size < 0 or chunks > MAX_TRANSFERS:
            raise UsageError(
                f"{size} bytes from byte {offset} in chunks of {file.chunk_bytes}; give at most {MAX_TRANSFERS} chunks"
            )
        return list(file.parts(offset, size))

    def _chain(self, part: ChunkRange) -> list[int]:
        chain = self._chains.get(part.chain)
        members = [] if chain is None else [one for one in chain.members if one.state in _UPDATED]
        if not members or members[0].state is not TargetState.SERVING:
            raise UsageError(f"no storage node serves chain {part.chain}")
        missing = next((one.node for one in members if one.node not in self._nodes), None)
        if missing is not None:
            raise UsageError(f"`nodes` lacks storage node {missing} of chain {part.chain}")
        return [self._nodes[one.node] for one in members]

    def _transfer(
        self, source: int, target: int, nbytes: int, after: tuple[int, ...], last: dict[tuple[int, int], int]
    ) -> Transfer:
        """`last`: the transfer before it on each way."""
        number = next(self._numbers)
        waits = (*after, last[source, target]) if (source, target) in last else after
        last[source, target] = number
        return Transfer(
            id=number,
            source=source,
            target=target,
            nbytes=nbytes,
            after=tuple(dict.fromkeys(waits)),
            connection=0,
        )
