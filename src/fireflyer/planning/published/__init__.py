"""Tables and figures of both papers that can be computed again, beside what was printed. Pure.

for figure in published_figures(shapes, node, prices):
    for row in figure.rows: print(row.what, row.published, row.computed, row.verdict)
"""

from __future__ import annotations

from collections.abc import Mapping

from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.planning.prices import PriceList
from fireflyer.planning.published import models, networks, nodes
from fireflyer.planning.published.figure import PublishedFigure, PublishedRow

__all__ = ["PublishedFigure", "PublishedRow", "published_figures"]


def published_figures(
    shapes: Mapping[str, ModelShape], node: NodeModel, prices: PriceList
) -> tuple[PublishedFigure, ...]:
    """`shapes`: of the models in `planning/models`, by the names of the files; `node`: pcie-a100; `prices`: of the
    networks of table 3 of the DeepSeek-V3 paper, as in `planning/published/v3-table-3.toml`. Raises `UsageError` for
    prices that do not have what the table needs."""
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
