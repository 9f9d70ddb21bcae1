"""Which ranks are on which node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.rank_layout import RankLayout, counts_text
from fireflyer.cluster.schema.hosts import expand_counts


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_each_rank_is_on_one_node_and_nodes_have_their_ranks_in_order(counts: list[int]) -> None:
    layout = RankLayout(counts)
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    assert layout.world_size == len(places)
    assert [(layout.node_of(rank), layout.local_rank(rank)) for rank in range(layout.world_size)] == places
    assert [rank for node in range(layout.nodes) for rank in layout.ranks(node)] == list(range(layout.world_size))
    assert expand_counts(counts_text(counts)) == tuple(counts), "it is written as Slurm does"
