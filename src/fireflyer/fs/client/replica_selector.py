"""Routing as arrays, so that a batch of plain reads is spread over the replicas by a few NumPy operations.

Each read goes to the next of the replicas of its chain that serve and are connected, in turns. This is what the machine
would do with replicas of which none has much under way; every answer that is not the data goes to the machine.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from fireflyer.base.errors import UsageError
from fireflyer.fs.schema.ids import MAX_CHUNK_BYTES, NodeId
from fireflyer.fs.schema.routing import MAX_REPLICAS, Routing, TargetState

__all__ = ["ANSWER", "READ", "Reads", "ReplicaSelector", "check_reads"]

READ: Final = np.dtype(
    [
        ("file", "<u8"), ("at", "<u8"), ("server", "<u4"), ("chain", "<u4"), ("chain_version", "<u4"), ("index", "<u4"),
        ("offset", "<u4"), ("length", "<u4"), ("reserved", "<u8"),
    ]
)  # fmt: skip
"""A read of a batch: bytes [offset, offset + length) of chunk (file, index) of the chain, to position `at` of the
caller's memory. The other fields are filled in here."""
ANSWER: Final = np.dtype(
    [
        ("tag", "<u8"), ("version", "<u8"), ("where", "<u8"), ("status", "<u4"), ("length", "<u4"), ("made_in", "<u4"),
        ("chunk_length", "<u4"), ("chain_version", "<u4"), ("reserved", "<u4"), ("reserved_too", "<u8"),
    ]
)  # fmt: skip
"""As the ring packs completions."""
Reads = np.ndarray[Any, np.dtype[np.void]]


def check_reads(reads: Reads, memory_bytes: int) -> None:
    """Raises `UsageError` for what does not fit into a chunk, or into the memory."""
    if reads.dtype != READ or reads.ndim != 1:
        raise UsageError(f"reads are a one-dimensional array of fireflyer.fs.client.READ, not of {reads.dtype}")
    ends = reads["at"] + reads["length"]
    if len(reads) and (int(ends.max()) > memory_bytes or int(reads["at"].max()) > memory_bytes):
        raise UsageError(f"a read ends at byte {int(ends.max())} of a buffer of {memory_bytes} bytes")
    last = reads["offset"].astype(np.uint64) + reads["length"]
    if len(reads) and int(last.max()) > MAX_CHUNK_BYTES:
        raise UsageError(
            f"a read ends at byte {int(last.max())} of a chunk; a chunk has at most {MAX_CHUNK_BYTES} bytes"
        )


class ReplicaSelector:
    """Of one routing, and the connections that can be used. `servers`: of nodes, their numbers in the ring."""

    def __init__(self, routing: Routing, servers: dict[NodeId, int]) -> None:
        serving = [
            [servers[one.node] for one in chain.members if one.state is TargetState.SERVING and one.node in servers]
            for chain in routing.chains
        ]
        self._chains = np.array([chain.id for chain in routing.chains], dtype=np.uint32)
        self._versions = np.array([chain.version for chain in routing.chains], dtype=np.uint32)
        self._counts = np.array([len(one) for one in serving], dtype=np.uint32)
        self._servers = np.zeros((len(serving), MAX_REPLICAS), dtype=np.uint32)
        for row, some in enumerate(serving):
            self._servers[row, : len(some)] = some
        self._turn = 0
        self._complete = bool(len(serving)) and bool((self._counts > 0).all())

    def place(self, reads: Reads) -> tuple[Reads, np.ndarray[Any, np.dtype[np.bool_]] | None]:
        """A copy with `server` and `chain_version`, and which of them nobody can be asked; None: there is none."""
        count = len(reads)
        if not len(self._chains):
            return reads, np.ones(count, dtype=np.bool_)
        placed = reads.copy()
        chain = reads["chain"]
        rows = np.searchsorted(self._chains, chain)
        rows[rows == len(self._chains)] = 0
        choices = self._counts[rows]
        lost = self._chains[rows] != chain
        if not self._complete:
            lost |= choices == 0
            choices = np.maximum(choices, 1)
        turns = np.arange(self._turn, self._turn + count, dtype=np.uint32) % choices
        self._turn = (self._turn + count) % (1 << 30)
        placed["server"] = self._servers[rows, turns]
        placed["chain_version"] = self._versions[rows]
        return placed, lost if lost.any() else None
