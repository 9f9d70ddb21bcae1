"""Counts of tokens that a checkpoint has of experts are checked before experts are put on ranks by them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fireflyer.base.errors import DataCorruption
from fireflyer.codesign.parallel.expert_placement import place_experts
from fireflyer.recipes.deepseek import PRESETS, DeepseekModel
from fireflyer.recipes.trainer import expert_places
from fireflyer.recipes.trainer.balance import ExpertBalance
from fireflyer.recipes.trainer.expert_places import LOADS, common_parts, loads_of, place_measured

SHAPE = PRESETS["tiny"].shape


def test_counts_are_those_of_the_steps_since_and_go_on_from_a_checkpoint() -> None:
    model = DeepseekModel(PRESETS["tiny"])
    balance = ExpertBalance(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        for committed in (True, False):
            model(tokens, tokens)
            balance.move(committed=committed)
    finally:
        dist.destroy_process_group()
    loads = loads_of({LOADS: balance.loads}, SHAPE)
    assert loads.keys() == {name for name, _ in model.gates()}
    each = [sum(counts) for counts in loads.values()]
    assert each == [2 * 2 * 8 * 3] * (len(each) - 1) + [2 * 2 * 7 * 3], "a prediction module has a token less"
    other = ExpertBalance(model)
    other.count_from(loads)
    assert other.loads == loads
    other.count_from({})
    assert not any(sum(counts) for counts in other.loads.values())
    assert loads_of({}, SHAPE) == {}


@pytest.mark.parametrize(
    "counts",
    [{"a": [1] * 7}, {"a": [1] * 7 + [-1]}, {"a": [1] * 7 + [1 << 63]}, {"a": [0.5] * 8}, {"a": "12345678"}, [1]],
)
def test_what_is_no_count_of_experts_is_refused(counts: Any) -> None:
    with pytest.raises(DataCorruption, match="expert_loads of the checkpoint"):
        loads_of({LOADS: counts}, SHAPE)


@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        ([[0, 0, 1, 1]], 2),
        ([[0, 0], [0, 1], [1, 1]], 2),  # two nodes of three ranks
        ([[0, 0], [1, 1]], 1),
        ([[0, 0, 0, 1], [1, 1, 2, 2]], 2),
        ([[0, 0, 1]], 1),
        ([[0, 1, 0, 1]], 1),
        ([[0, 1, 2, 3], [4, 4, 5, 5]], 4),
    ],
)
def test_parts_are_those_of_the_group_on_most_nodes(groups: list[list[int]], parts: int) -> None:
    for first in range(len(groups)):
        assert common_parts(groups[first:] + groups[:first]) == parts, "it depends on no group's place"


def test_an_expert_group_on_one_node_gets_the_order_of_one_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of three ranks each, two ranks in an expert group: the group in the middle is on both."""
    model, experts, loads = DeepseekModel(PRESETS["tiny"]), SHAPE.experts, [3, 2, 2, 2, 2, 2, 1, 1]
    assert experts is not None
    on_one, on_two = (place_experts([float(one) for one in loads], experts, 2, nodes).order for nodes in (1, 2))
    assert on_one != on_two, "an order shows for how many nodes it is"
    groups = [(0, 0), (0, 1), (1, 1)]
    given: list[list[Any]] = []
    monkeypatch.setattr(expert_places, "renumber_experts", lambda _, order, *__: given[-1].append(order))
    monkeypatch.setattr(expert_places, "_told_by_all", lambda _: groups, raising=False)
    for nodes in groups:
        given.append([])
        comm = SimpleNamespace(plan=SimpleNamespace(node_of_rank=nodes))
        monkeypatch.setattr(expert_places, "communicator_beside", lambda _, comm=comm: comm)
        mesh: Any = SimpleNamespace(group=lambda _: SimpleNamespace(size=lambda: 2))
        arrangement: Any = SimpleNamespace(module=model, optimizer=None)
        place_measured(arrangement, mesh, SHAPE, {name: loads for name, _ in model.gates()})
    assert given == [[on_two] * len(list(model.gates()))] * len(groups)
