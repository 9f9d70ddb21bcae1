"""Counts of tokens that a checkpoint has of experts are checked before experts are put on ranks by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fireflyer.base.errors import DataCorruption
from fireflyer.recipes.deepseek import PRESETS, DeepseekModel
from fireflyer.recipes.trainer.balance import ExpertBalance
from fireflyer.recipes.trainer.expert_places import LOADS, loads_of

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
