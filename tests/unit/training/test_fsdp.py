"""`shard`: what it refuses, the mean over replicas, and a model on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fireflyer.base.errors import UsageError
from fireflyer.training.fsdp import ReplicaMean, ShardedModel, shard


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def inputs() -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_model_on_one_rank_trains_as_without(zero: Any) -> None:
    plain = network()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    model = network()
    sharded = shard(model, [*model][:2], zero=zero)
    ours = sharded.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), max_norm=0.5)
    for _ in range(3):
        for part in sharded.micro_batches(inputs().chunk(2)):
            model(part).square().sum().backward()
        for part in inputs().chunk(2):
            plain(part).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for each in (theirs, ours):
            each.step()
            each.zero_grad()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(cast("Any", mine).full_tensor(), other)
    assert sharded.buffers().held_bytes == 0


def test_bf16_parameters_have_a_master_copy_that_a_dropped_step_leaves_alone() -> None:
    model = network()
    sharded = shard(model, [*model], param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    optimizer = sharded.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    expected = model(inputs())
    assert expected.dtype == torch.bfloat16
    model(inputs()).mul(torch.inf).sum().backward()
    optimizer.step()
    assert optimizer.outcome is not None
    assert not optimizer.outcome.committed
    optimizer.zero_grad()
    assert torch.equal(model(inputs()), expected)
    model(inputs()).sum().backward()
    optimizer.step()
    assert not torch.equal(model(inputs()), expected)


class TestReplicaMean:
    def test_replicas_are_averaged_once_in_a_step(self) -> None:
        calls: list[torch.Tensor] = []
        last = False

        def average(tensor: torch.Tensor) -> None:
            calls.append(tensor.clone())
            tensor.mul_(0.5)

        hook = ReplicaMean(average, lambda: last)
        kept = torch.zeros(3)  # what FSDP adds up over the micro-batches
        for value, last in ((1.0, False), (2.0, False), (5.0, True)):  # noqa: B007 - the hook reads it
            output = torch.full((3,), value)
            hook(output)
            kept += output
        assert [call.tolist() for call in calls] == [[8.0] * 3]
        assert kept.tolist() == [4.0] * 3

    def test_the_next_step_begins_anew(self) -> None:
        last = [False, True, True]
        hook = ReplicaMean(lambda tensor: None, lambda: last.pop(0))
        found = []
        for value in (1.0, 2.0, 7.0):
            output = torch.tensor([value])
            hook(output)
            found.append(output.item())
        assert found == [0.0, 3.0, 7.0]


def test_micro_batches_say_which_one_is_last() -> None:
    model = network()
    sharded = shard(model, [*model])
    seen = [(part, sharded.is_last) for part in sharded.micro_batches(["a", "b", "c"])]
    assert seen == [("a", False), ("b", False), ("c", True)]
    assert sharded.is_last
    with pytest.raises(KeyError), sharded.micro_batch(last=False):
        raise KeyError
    assert sharded.is_last, "an error ends the step"


def refused(match: str, model: nn.Module | None = None, **arguments: Any) -> None:
    chosen = network() if model is None else model
    layers = arguments.pop("layers", None)
    with pytest.raises(UsageError, match=match):
        shard(chosen, list(chosen.children()) if layers is None else layers, **arguments)


def test_what_cannot_be_sharded_is_refused() -> None:
    refused("layers is empty", layers=[])
    refused(r"layers\[0\], a Linear, is not a part of the model", layers=[nn.Linear(1, 1)])
    refused("zero 4 is not one of 1, 2, 3", zero=4)
    refused("prefetch -1 is not between", prefetch=-1)
    refused("replicas 2 does not divide 1 ranks", replicas=2)
    refused("mesh has the axes", mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("data",)))
    model = network()
    assert isinstance(shard(model, [*model]), ShardedModel)
    refused("is sharded already", model=model)
    with pytest.raises(UsageError, match="at least one micro-batch"):
        next(shard(network_ := network(), [*network_]).micro_batches([]))


def test_a_mesh_with_shards_alone_is_taken() -> None:
    model = network()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shards",))
    sharded = shard(model, [*model], mesh=mesh, prefetch=0)
    assert sharded.mesh is mesh
    assert model(inputs()).shape == (6, 2)
