"""Routing as it changes: the manager's log of what changed when, and the other side that applies it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fireflyer.base.errors import StaleVersion
from fireflyer.fs.core.rows import CHAINS, NODES, TABLES, NodeRow
from fireflyer.fs.schema.ids import RoutingVersion
from fireflyer.fs.schema.routing import Chain, ChainTable, Node, Routing, RoutingDelta

__all__ = ["RoutingLog", "apply_delta"]

_PUBLIC: Final = (NODES.prefix, CHAINS.prefix, TABLES.prefix)


def apply_delta(routing: Routing, delta: RoutingDelta) -> Routing:
    """The routing after `delta`; the same object if that is not newer, so deltas may come twice or out of order. Raises
    `StaleVersion` when changes between the two are missing: ask again with the version that is there."""
    if delta.version <= routing.version:
        return routing
    if delta.base > routing.version:
        raise StaleVersion(
            f"changes since routing {delta.base} do not apply to version {routing.version}; get the routing again"
        )
    old = routing if delta.base else Routing(0)
    nodes = {node.id: node for node in (*old.nodes, *delta.nodes)}
    for gone in delta.removed_nodes:
        nodes.pop(gone, None)
    chains = {chain.id: chain for chain in (*old.chains, *delta.chains)}
    tables = {table.id: table for table in (*old.tables, *delta.tables)}
    return Routing(
        delta.version,
        tuple(nodes[one] for one in sorted(nodes)),
        tuple(chains[one] for one in sorted(chains)),
        tuple(tables[one] for one in sorted(tables)),
    )


class RoutingLog:
    """Which version changed what, since the manager loaded its state at `base`. Who knows less gets everything."""

    def __init__(self, base: RoutingVersion) -> None:
        self._base = base
        self._changed: dict[tuple[bytes, int], RoutingVersion] = {}

    def record(self, prefix: bytes, row_id: int, version: RoutingVersion) -> None:
        """A row changed; versions must not fall."""
        if prefix in _PUBLIC:
            self._changed.pop((prefix, row_id), None)
            self._changed[prefix, row_id] = version

    def delta(
        self,
        known: RoutingVersion,
        version: RoutingVersion,
        nodes: Mapping[int, NodeRow],
        chains: Mapping[int, Chain],
        tables: Mapping[int, ChainTable],
    ) -> RoutingDelta | None:
        """From `known` to `version`, of which the rows are; None if that is nothing."""
        if known == version:
            return None
        if known < self._base or known > version:
            public = tuple(_node(nodes[one]) for one in sorted(nodes) if nodes[one].incarnation)
            all_chains = tuple(chains[one] for one in sorted(chains))
            return RoutingDelta(0, version, public, all_chains, tuple(tables[one] for one in sorted(tables)))
        changed: dict[bytes, list[int]] = {prefix: [] for prefix in _PUBLIC}
        for (prefix, row_id), changed_in in reversed(self._changed.items()):
            if changed_in <= known:
                break
            changed[prefix].append(row_id)
        of_nodes = sorted(changed[NODES.prefix])
        return RoutingDelta(
            known,
            version,
            tuple(_node(nodes[one]) for one in of_nodes if one in nodes and nodes[one].incarnation),
            tuple(chains[one] for one in sorted(changed[CHAINS.prefix])),
            tuple(tables[one] for one in sorted(changed[TABLES.prefix])),
            tuple(one for one in of_nodes if one not in nodes),
        )


def _node(row: NodeRow) -> Node:
    return Node(row.id, row.address, row.incarnation)
