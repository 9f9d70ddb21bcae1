"""What an operator declares about a network, and what plans made for it should be. Pure.

    [speeds]                        # what is left out keeps the default of `cost.Speeds`
    latency_ns = 6000
    bytes_per_s = 22e9
    cross_bytes_per_s = 40e9

    [zone_of_host]                  # or, by number of the node: zones = [0, 0, 1, 1]
    node001 = 0
    node601 = 1

    [[routes]]                      # instead of what would be chosen, for this kind of operation
    kind = "allreduce"
    algorithm = "double_binary_tree"
    chunk_bytes = 524288

The file is TOML and is read by the command line alone (`ff run --topology`, `ff collectives plan --topology`); a job
keeps it as JSON in the directory of its run.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.collectives.planning.cost import FLIGHT_BYTES, SLOT_BYTES, Layout, Speeds
from fireflyer.collectives.planning.plan import MAX_ROUTES, Plan, Route
from fireflyer.collectives.planning.routing import layout_of, plan_for
from fireflyer.topology import zones_of_hosts

__all__ = ["Declaration", "RouteRow"]


class RouteRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As `plan.Route`. Rows of one kind stand together, from small sizes to large ones; the last is for any size."""

    kind: str
    algorithm: str
    chunk_bytes: int
    up_to_bytes: int | None = None


class Declaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises `UsageError` (when decoded: `msgspec.ValidationError`) where it makes no sense by itself; what depends on
    the group is checked by `plan`."""

    speeds: Speeds = Speeds()
    zones: tuple[int, ...] = ()
    """The zone of each node of the group, in order."""
    zone_of_host: dict[str, int] = {}
    """The same by host name, for groups of any of these hosts."""
    algorithms: tuple[str, ...] = ()
    """To choose from; empty: all."""
    window: int | None = None
    """Chunks in flight on a node; None: the best."""
    sockets: int = 1
    """TCP connections for each pair of neighbours and lane."""
    slot_bytes: int = SLOT_BYTES
    flight_bytes: int = FLIGHT_BYTES
    """Bounds on the memory of a node's slots, and on what is in flight; as in `cost.Layout`."""
    routes: tuple[RouteRow, ...] = ()

    def __post_init__(self) -> None:
        if self.zones and self.zone_of_host:
            raise UsageError("zones and zone_of_host exclude each other; give one of them")
        if len(self.routes) > MAX_ROUTES:
            raise UsageError(f"routes has {len(self.routes)} rows; a plan has at most {MAX_ROUTES}")
        self.plan((0, 1), zones=())  # refuses algorithms, windows, sockets and rows that no plan can have

    def zones_of(self, host_of_node: Sequence[str]) -> tuple[int, ...]:
        """The zone of each node; empty where none are declared. Raises `UsageError` for a host without one."""
        return zones_of_hosts(host_of_node, self.zone_of_host) if self.zone_of_host else self.zones

    def plan(self, node_of_rank: Sequence[int], *, zones: Sequence[int], speeds: Speeds | None = None) -> Plan:
        """The plan of a group on nodes in these zones; `speeds` stands in for those declared. Raises `UsageError`."""
        rows = [Route(row.kind, row.up_to_bytes, row.algorithm, row.chunk_bytes, "declared") for row in self.routes]
        return plan_for(
            node_of_rank,
            speeds or self.speeds,
            zones=zones,
            window=self.window,
            only=self.algorithms or None,
            sockets=self.sockets,
            routes=rows,
            slot_bytes=self.slot_bytes,
            flight_bytes=self.flight_bytes,
        )

    def layout(self, plan: Plan, zones: Sequence[int]) -> Layout:
        """For predictions about `plan`."""
        layout = layout_of(plan.node_of_rank, zones)
        return msgspec.structs.replace(
            layout, window=plan.window, slot_bytes=self.slot_bytes, flight_bytes=self.flight_bytes
        )
