"""Tensor parallelism of one rank, whose peers are not there: what it sends and holds, and what is refused.

The group of torch's tests has no peers: values are wrong, the collectives are those of a job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import ModelShape
from fireflyer.codesign.model.shape import Attention
from fireflyer.codesign.parallel import ParallelPlan, Precision, coordinates_of
from fireflyer.codesign.parallel.memory import static_memory
from fireflyer.codesign.parallel.mesh import placement_refusals
from fireflyer.codesign.parallel.plan import RECOMPUTE, Recompute
from fireflyer.codesign.parallel.tensor import tensor_collectives
from fireflyer.recipes.gpt import GPTConfig, GPTModel
from fireflyer.recipes.trainer.models import summed_cross_entropy
from fireflyer.training.recompute import recompute
from fireflyer.training.tensor import GPT_LAYOUT, CollectiveBytes, finish_gradients, tensor_parallel

CONFIG = GPTConfig(vocab_size=64, layers=2, heads=4, width=32, context=16)
SHAPE = ModelShape(
    model_type="gpt",
    layers=2,
    hidden=32,
    vocabulary=64,
    feed_forward=128,
    attention=Attention(heads=4, kv_heads=4, head_dim=8),
    gated=False,
    tied_embeddings=True,
)


@contextmanager
def alone(ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("tensor", "mode"), [(2, mode) for mode in RECOMPUTE] + [(4, "none")], ids=[*RECOMPUTE, "four ranks"]
)
def test_a_step_sends_and_a_rank_holds_the_bytes_that_its_plan_predicts(tensor: int, mode: Recompute) -> None:
    plan = ParallelPlan(
        sequence_tokens=16,
        batch_sequences=6,
        micro_batch=3,
        tensor=tensor,
        recompute=mode,
        precision=Precision(gradients="bf16"),
    )
    model = GPTModel(CONFIG).bfloat16()
    with alone(tensor) as mesh:
        tensor_parallel(model, mesh)
        recompute(model, mode, blocks=list(model.blocks))
        tokens = torch.zeros(3, 16, dtype=torch.int64)
        with CollectiveBytes(mesh.get_group()) as counted:
            for _ in range(plan.micro_batches):
                torch.autograd.backward(summed_cross_entropy(model(tokens), tokens))
            finish_gradients(model)
        for one in model.parameters():
            assert isinstance(one, DTensor)
            assert isinstance(one.grad, DTensor)
            assert one.grad.placements == one.placements  # nothing is left to be added
        held = [one.to_local() for one in model.parameters() if isinstance(one, DTensor)]
    expected = tensor_collectives(plan, SHAPE, 0)
    assert counted.calls["allgather"] == expected.allgathers
    assert counted.calls["reduce_scatter"] == expected.reduce_scatters
    assert counted.sent_bytes["allgather"] == expected.allgather_bytes
    assert counted.sent_bytes["reduce_scatter"] == expected.reduce_scatter_bytes
    assert counted.sent_bytes["allreduce"] == expected.allreduce_bytes
    assert sum(counted.sent_bytes.values()) == expected.sent_bytes
    parameters, gradients, _ = static_memory(plan, SHAPE, 0)
    assert sum(one.numel() * one.element_size() for one in held) == parameters
    assert sum(one.numel() * 2 for one in held) == gradients


def test_without_sequence_parallelism_as_many_bytes_are_sent() -> None:
    sent = []
    with alone(2) as mesh:
        for sequence in (True, False):
            model = tensor_parallel(GPTModel(CONFIG), mesh, sequence=sequence)
            tokens = torch.zeros(3, 16, dtype=torch.int64)
            with CollectiveBytes(mesh.get_group()) as counted:
                model(tokens, tokens).backward()
            sent.append(sum(counted.sent_bytes.values()))
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 2, "width": 36}, "heads = 2 does not divide into tensor = 3 parts"),
        ({"heads": 3, "width": 36, "vocab_size": 64}, "a vocabulary of 64 does not divide .* pad it to 66"),
        ({"heads": 3, "width": 36, "vocab_size": 65}, "pad it to 66$"),
        ({"heads": 1, "width": 34, "vocab_size": 66}, "out_features = 136 of mlp_in does not divide into 3 parts"),
    ],
)
def test_what_does_not_divide_is_refused_with_its_numbers(changes: dict[str, int], message: str) -> None:
    model = GPTModel(GPTConfig(**{"layers": 1, "context": 16} | changes))
    with alone(3) as mesh, pytest.raises(UsageError, match=message):
        tensor_parallel(model, mesh)
    assert not any(isinstance(one, DTensor) for one in model.parameters())


def test_heads_of_keys_and_values_must_divide() -> None:
    class Config:
        num_attention_heads = 8
        num_key_value_heads = 2

    class LlamaForCausalLM(nn.Module):
        config = Config()

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.embed_tokens = nn.Embedding(8, 4)
            self.model.layers = nn.ModuleList()

    with alone(4) as mesh, pytest.raises(UsageError, match=r"^num_key_value_heads = 2 does not divide into tensor = 4"):
        tensor_parallel(LlamaForCausalLM(), mesh)


def test_other_models_meshes_and_sequences_are_refused() -> None:
    with alone(4) as mesh:
        with pytest.raises(UsageError, match=r"Linear is not known.*layout=TensorLayout"):
            tensor_parallel(nn.Linear(4, 4), mesh)
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        with pytest.raises(UsageError, match="the mesh has 2 dimensions; pass that of the tensor axis alone"):
            tensor_parallel(GPTModel(CONFIG), both)
        model = tensor_parallel(GPTModel(CONFIG), mesh)
        with pytest.raises(UsageError, match="is a DTensor already; apply tensor_parallel once"):
            tensor_parallel(model, mesh)
        with pytest.raises(UsageError, match="sequences of 14 tokens do not divide into tensor = 4 parts"):
            model(torch.zeros(1, 14, dtype=torch.int64))


def test_a_layout_divides_a_model_that_is_not_known() -> None:
    class Other(GPTModel):
        pass

    with alone(2) as mesh:
        model = tensor_parallel(Other(CONFIG), mesh, layout=GPT_LAYOUT)
        assert all(isinstance(one, DTensor) for one in model.parameters())


def test_nodes_that_split_tensor_groups_or_stages_are_named() -> None:
    plan = ParallelPlan(pipeline=2, shard=2, tensor=2, zero=1, sequence_tokens=8, batch_sequences=8)
    assert placement_refusals(plan, [0, 0, 0, 0, 1, 1, 1, 1]) == []
    assert placement_refusals(plan, [0] * 8) == []
    assert placement_refusals(plan, [0, 0, 1, 1, 2, 2, 3, 3]) == []
    split = placement_refusals(plan, [0, 1, 1, 0, 2, 2, 2, 2])
    assert split == [
        "tensor group [0, 1] is on nodes [0, 1]; start all its ranks on one node",
        "tensor group [2, 3] is on nodes [0, 1]; start all its ranks on one node",
    ]
    (mixed,) = placement_refusals(plan, [0, 0, 1, 1, 1, 1, 2, 2])
    assert mixed == (
        "node 1 has 4 ranks of stages [0, 1], which have 4 ranks each; a node has ranks of one stage, or whole stages"
    )
    assert coordinates_of(plan, 4).pipeline == 1
