"""Tables and figures of both papers that can be computed again, beside what was printed. Pure.

for figure in published_figures():
    for row in figure.rows: print(row.what, row.published, row.computed, row.verdict)
"""

from __future__ import annotations

from collections.abc import Mapping

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel import NodeModel, load_node
from fireflyer.planning.prices import PriceList
from fireflyer.planning.published import models, networks, nodes
from fireflyer.planning.published.figure import PublishedFigure, PublishedRow
from fireflyer.planning.shipped import fitted_prices, load_shape, shape_names

__all__ = ["PublishedFigure", "PublishedRow", "published_figures"]


def published_figures(
    shapes: Mapping[str, ModelShape] | None = None, node: NodeModel | None = None, prices: PriceList | None = None
) -> tuple[PublishedFigure, ...]:
    """Compute all tables and figures. `shapes`: of models, by the names that `load_shape` knows; `node`: that of
    Fire-Flyer 2; `prices`: of the networks of table 3 of the DeepSeek-V3 paper, in USD. None: those that are shipped,
    `fitted_prices` among them. Raises `UsageError` for prices that do not have what the table needs."""
    shapes = {name: load_shape(name) for name in shape_names()} if shapes is None else shapes
    node = load_node("pcie-a100") if node is None else node
    prices = fitted_prices() if prices is None else prices
    return (
        networks.architecture_costs(),
        networks.network_costs(),
        nodes.allreduce_limits(node),
        models.scaling(),
        networks.storage(),
        networks.next_generation(),
        models.kv_cache(shapes),
        models.sizes(shapes),
        models.training_cost(shapes),
        networks.topologies(prices),
        models.v3_metrics(shapes),
        networks.latencies(),
        models.decoding(),
        models.local_use(shapes),
        models.routing(),
        models.wire_formats(),
        nodes.lanes(),
    )
