"""Tables that arguments have always led to: a stored seed must mean the same layout in every version.

To accept a change, which no cluster in use will thank you for: `FF_ACCEPT=1 pytest tests/golden`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fireflyer.fs.core.placement import StorageNode, Table, place, rebalance, uniform_cluster

HERE = Path(__file__).parent
RACKS = tuple(f"rack-{i // 3}" for i in range(12))


def lines(table: Table) -> str:
    return "".join(" ".join(f"{place.node}.{place.disk}" for place in chain) + "\n" for chain in table.chains)


def moved() -> Table:
    cluster = uniform_cluster(8, 6, disks=2)
    after = (*(StorageNode(node.id, (4, 4)) for node in cluster[1:]), StorageNode(9, (4, 4)))
    return rebalance(after, place(cluster, 3).table, seed=2).goal


TABLES = {
    "7_nodes": lambda: place(uniform_cluster(7, 6, disks=2), 3).table,
    "10_nodes_seed_9": lambda: place(uniform_cluster(10, 8), 2, seed=9).table,
    "12_nodes_in_racks": lambda: place(uniform_cluster(12, 6, domains=RACKS), 3).table,
    "16_nodes": lambda: place(uniform_cluster(16, 5), 4).table,
    "8_nodes_rebalanced": moved,
}


@pytest.mark.parametrize("name", TABLES)
def test_the_same_arguments_lead_to_the_same_table_for_ever(name: str) -> None:
    text = lines(TABLES[name]())
    path = HERE / f"placement_{name}.txt"
    if os.environ.get("FF_ACCEPT"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
