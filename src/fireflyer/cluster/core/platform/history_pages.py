"""Pages of the history in the order of its changes, for programs that keep a copy of it: who has all until a change
asks from the next number on. A run that has changed since comes again."""

from __future__ import annotations

import msgspec

from fireflyer.cluster.core.health.findings import Finding

__all__ = ["NodeEntry", "NodePage", "RunEntry", "RunPage"]


class RunEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as it was last."""

    change: int
    task: int
    number: int
    user: str
    submitted_ns: int
    """Of its task."""
    state: str
    nodes: tuple[str, ...]
    scheduled_ns: int
    started_ns: int | None
    ended_ns: int | None
    wish: str
    """Why it was to leave, a value of `rows.Wish`; empty: a release that did not keep it."""
    leave_reason: str
    cause: str | None
    exit_code: int | None
    saved_ns: int | None
    """When the state of its last checkpoint was taken."""
    overhead_ns: int
    """From the decision until its ranks were ready, and from its end until the manager knew."""
    ready_ns: int | None = None
    """Of `overhead_ns` what was before its ranks were ready; None: it has not begun, or an older release says it."""


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    cluster: str
    """Word of the cluster whose changes these are."""
    clusters: tuple[str, ...]
    """All words that the history has: there is a new one when a store is restored."""
    entries: tuple[RunEntry, ...]
    more: bool
    """There are changes after the last one."""


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a node."""

    change: int
    at_ns: int
    node: str
    state: str
    """As `history.NodeChange`."""
    reason: str
    fault: Finding | None
    ticket: int
    """0: none."""


class NodePage(msgspec.Struct, frozen=True, kw_only=True):
    """As `RunPage`."""

    cluster: str
    clusters: tuple[str, ...]
    entries: tuple[NodeEntry, ...]
    more: bool
