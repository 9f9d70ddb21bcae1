"""The flight recorder of one rank of one group, and the moment at which it is written down.

The first operation that is seen to fail makes the rank leave a dump, where it has a directory for dumps. That happens
in the thread that asked after the operation, before the error is raised: the process may be about to end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from fireflyer.base.errors import FireflyerError, PeerFailed
from fireflyer.collectives.flight.dump import (
    Dump,
    Fault,
    Snapshot,
    fault_from_native,
    plan_digest,
    snapshot_from_native,
)
from fireflyer.collectives.flight.files import write_dump
from fireflyer.collectives.planning.plan import Plan

__all__ = ["FlightRecorder", "how_far"]

logger = logging.getLogger(__name__)

_LABELLED: Final = 1024
"""In a larger group a dump names only the ranks of its own node, and the culprit."""


class FlightRecorder:
    """Thread-safe. `snapshot` returns what `native.Executor.flight()` does."""

    def __init__(
        self,
        snapshot: Callable[[], Mapping[str, Any]],
        *,
        group: str,
        plan: Plan,
        rank: int,
        labels: tuple[str, ...],
        timeout_ns: int,
        transport: str,
        directory: str | None,
    ) -> None:
        self._snapshot = snapshot
        self._group = group
        self._plan = plan
        self._rank = rank
        self._labels = labels
        self._timeout_ns = timeout_ns
        self._transport = transport
        self._directory = directory
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._tell: Callable[[PeerFailed], None] | None = None
        self._came = ""

    def snapshot(self) -> Snapshot:
        return snapshot_from_native(self._snapshot())

    def tell_of_failure(self, tell: Callable[[PeerFailed], None]) -> None:
        """Calls `tell` when the first operation that fails does so because of a peer. It neither blocks nor raises."""
        self._tell = tell

    def failed(self, failure: tuple[int, int, int, str]) -> str:
        """Record what an operation failed with, (kind, culprit, seq, text), any number of times. How far the
        operation of that number came on this rank, for people; empty where nothing can be said. Never raises."""
        with self._lock:
            if self._fault is None:
                self._first(failure)
            return self._came

    def _first(self, failure: tuple[int, int, int, str]) -> None:
        self._fault = fault_from_native(failure)
        if self._fault is None:
            return
        if self._tell is not None and self._fault.code == "peer_failed":
            self._tell(PeerFailed(self._fault.text, rank=self._fault.rank))
        self._came = how_far(self.snapshot(), self._fault)
        if self._directory is None:
            return
        try:
            path = write_dump(self._directory, self._dump("an operation failed"))
        except FireflyerError as error:
            logger.warning("flight_dump=failed rank=%d error=%s", self._rank, error)
        else:
            logger.info("flight_dump=%s rank=%d", path, self._rank)

    def write(self, directory: str | None, reason: str) -> str | None:
        """Dumps now into `directory` (None: the one that dumps of failures go to) and returns the path; None where
        there is no directory. Raises `FireflyerError`."""
        directory = self._directory if directory is None else directory
        if directory is None:
            return None
        with self._lock:
            return write_dump(directory, self._dump(reason))

    def _dump(self, reason: str) -> Dump:
        node = self._plan.node_of_rank[self._rank]
        named: set[int] = set(range(len(self._labels)))
        if len(self._labels) > _LABELLED:
            named = set(self._plan.ranks_of(node)) | ({self._fault.rank} if self._fault else set())
        return Dump(
            group=self._group,
            plan=plan_digest(self._plan),
            rank=self._rank,
            world_size=self._plan.world_size,
            node=node,
            labels={rank: self._labels[rank] for rank in sorted(named) if rank >= 0},
            timeout_ns=self._timeout_ns,
            transport=self._transport,
            reason=reason,
            fault=self._fault,
            snapshot=self.snapshot(),
        )


def how_far(snapshot: Snapshot, fault: Fault) -> str:
    seq = fault.seq
    for record in snapshot.records:
        if record.state == "done" and f"{record.kind} #{seq}" not in fault.text:
            continue  # a rank died between operations: the number, 0, is none
        if record.seq == seq and not record.message and record.inside and record.chunks:
            return f"{record.kind} #{seq} had completed {record.chunks_done} of {record.chunks} chunks on this rank"
        if record.seq == seq and not record.message and not record.inside and f"{record.kind} #{seq}" in fault.text:
            return f"{record.kind} #{seq} had not begun on this rank"
    return ""
