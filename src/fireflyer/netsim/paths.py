"""Simulates transfers over paths that are given, on links that have no graph: the inside of a node. Pure.

The same engine and the same fluid model as of fabrics; only the routing is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fireflyer.base.errors import UsageError
from fireflyer.netsim.arrays import NO_ROUTE, Route, transfer_arrays
from fireflyer.netsim.fair import Incidence
from fireflyer.netsim.simulate import ENGINES, Engine, NetworkRun, check_lanes
from fireflyer.topology.traffic import Transfer, check_transfers

__all__ = ["PathLike", "simulate_paths"]


class PathLike(Protocol):
    """`fireflyer.topology.node_fabric.Path` is one."""

    @property
    def links(self) -> tuple[int, ...]: ...

    @property
    def weights(self) -> tuple[float, ...]:
        """Bytes on each link for one byte of the transfer, more than 0."""
        ...


def simulate_paths(
    capacities: Sequence[float],
    transfers: Sequence[Transfer],
    paths: Sequence[PathLike],
    *,
    lane_weights: tuple[float, ...] = (1.0,),
    engine: Engine = "native",
) -> NetworkRun:
    """`capacities`: bytes per second of each link; `paths`: of each transfer, whose ends only name it. A flow of lane n
    has `lane_weights[n]`: see `Settings`. Raises `UsageError` for links that are none, and as `check_transfers`."""
    rates = np.array(capacities, np.float64)
    if not (rates > 0).all() or not np.isfinite(rates).all():
        raise UsageError(f"links have the rates {list(capacities)}; each is a finite number above 0")
    if len(paths) != len(transfers):
        raise UsageError(f"{len(paths)} paths for {len(transfers)} transfers; give each its own")
    check_transfers(transfers, max((max(one.source, one.target) + 1 for one in transfers), default=0))
    check_lanes(transfers, lane_weights)
    for path in paths:
        if any(not 0 <= link < len(rates) for link in path.links) or not all(weight > 0 for weight in path.weights):
            raise UsageError(f"the path {path} has links beyond the {len(rates)} that there are, or weights below 0")
    run = ENGINES[engine](rates)
    known: dict[tuple[tuple[int, ...], tuple[float, ...], int], int] = {}
    rows: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
    routes = []
    for one, path in zip(transfers, paths, strict=True):
        if not one.nbytes or not path.links:
            routes.append(NO_ROUTE)
            continue
        key = (path.links, path.weights, one.lane)
        if key not in known:
            rows.append((path.links, path.weights))
            known[key] = run.add_path(np.array(path.links, np.uint32), np.array(path.weights), lane_weights[one.lane])
        routes.append(Route((known[key],), (1.0,)))
    run.add_transfers(*transfer_arrays(transfers, routes, [0] * len(transfers)))
    run.run_until(float("inf"))
    link_bytes = Incidence.of(rows).loads(run.path_bytes, len(rates))
    return NetworkRun(run.start_s, run.finish_s, link_bytes, run.events)
