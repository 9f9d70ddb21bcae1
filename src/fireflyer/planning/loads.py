"""How many flows share the links of a fabric when the nodes of a job form a ring in random order. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fireflyer.netsim import Links, Settings, pattern_transfers, simulate
from fireflyer.topology.fabrics import Fabric

__all__ = ["HeatMap", "LayerLoad", "LinkLoads", "link_loads"]

MOST_CELLS = 64
"""Of a side of a heat map; neighbours are joined where there are more switches."""


class LayerLoad(NamedTuple):
    """Load of the links that lead from one layer to another."""

    name: str
    links: int
    mean: float
    """Flows on a link."""
    most: float
    utilisation: float
    """Share of what its links could carry until the last flow has ended, 0 to 1."""
    most_utilisation: float
    """Utilisation of the busiest link of the layer, 0 to 1."""


class HeatMap(NamedTuple):
    """Flows on the links from a switch below (row) to one above (column); of joined switches the mean."""

    below: str
    above: str
    cells: tuple[tuple[float, ...], ...]


class LinkLoads(NamedTuple):
    layers: tuple[LayerLoad, ...]
    heat: HeatMap | None
    """Flows between the lowest two layers of switches; None: the network has one layer only."""


def link_loads(fabric: Fabric, nodes: Sequence[int], settings: Settings) -> LinkLoads:
    """`nodes`: of the job, two or more."""
    nbytes = 1 << 20
    transfers = pattern_transfers("shuffled-ring", nodes, nbytes, seed=settings.seed)
    run = simulate(fabric, transfers, settings)
    flows = run.link_bytes / nbytes
    links = Links(fabric)
    by_layers: dict[str, list[float]] = defaultdict(list)
    for (source, target), load in zip(links.ends, flows, strict=True):
        by_layers[f"{fabric.layer_of(source)} to {fabric.layer_of(target)}"].append(float(load))
    busy = nbytes / (run.makespan_s * fabric.link_bytes_per_s)  # share of the time, for a flow
    layers = []
    for name, loads in by_layers.items():
        mean, most = float(np.mean(loads)), max(loads)
        layers.append(LayerLoad(name, len(loads), mean, most, mean * busy, most * busy))
    return LinkLoads(tuple(layers), _heat(fabric, links, flows))


def _heat(fabric: Fabric, links: Links, flows: NDArray[np.float64]) -> HeatMap | None:
    layers = [layer for layer in fabric.layers if layer.count]
    if len(layers) < 2:
        return None
    below, above = layers[0], layers[1]
    first, second = fabric.first_of(below.name), fabric.first_of(above.name)
    total, count = np.zeros((below.count, above.count)), np.zeros((below.count, above.count))
    for (source, target), load in zip(links.ends, flows, strict=True):
        row, column = source - first, target - second
        if 0 <= row < below.count and 0 <= column < above.count:
            total[row, column] += load
            count[row, column] += 1
    joined, many = (_joined(matrix) for matrix in (total, count))
    cells = np.divide(joined, many, out=np.zeros_like(joined), where=many > 0)
    return HeatMap(below.name, above.name, tuple(tuple(map(float, row)) for row in cells))


def _joined(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of neighbours, at most `MOST_CELLS` on each side."""
    for axis in (0, 1):
        size = matrix.shape[axis]
        if size > MOST_CELLS:
            starts = np.unique(np.arange(MOST_CELLS) * size // MOST_CELLS)
            matrix = np.add.reduceat(matrix, starts, axis=axis)
    return matrix
