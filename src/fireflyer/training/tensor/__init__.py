"""Tensor and sequence parallelism: each matrix of a model is divided over the ranks of a tensor group, by DTensor.

    mesh = PlanMesh(plan, node=node)
    tensor_parallel(model, mesh.tensor)          # our GPT, Hugging Face Llama, or what a `TensorLayout` describes
    fully_shard(model, mesh=mesh.data)           # optional, or:
    loss.backward()
    finish_gradients(model, data=mesh.group("data"))
    clip_gradients(model, 1.0)

Megatron's division (Shoeybi et al. 2019; sequence parallelism: Korthikanti et al. 2022). Imports torch.
"""

from fireflyer.training.tensor.apply import tensor_parallel
from fireflyer.training.tensor.counting import CollectiveBytes
from fireflyer.training.tensor.gradients import clip_gradients, finish_gradients
from fireflyer.training.tensor.layouts import GPT_LAYOUT, LLAMA_LAYOUT, TensorLayout
from fireflyer.training.tensor.projections import whole_tensors

__all__ = [
    "GPT_LAYOUT",
    "LLAMA_LAYOUT",
    "CollectiveBytes",
    "TensorLayout",
    "clip_gradients",
    "finish_gradients",
    "tensor_parallel",
    "whole_tensors",
]
