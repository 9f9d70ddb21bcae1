"""The norm of gradients that are spread over ranks, with the same bits on all of them, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fireflyer.training.mesh import PlanMesh

__all__ = ["clip_over_ranks", "counted_here"]


@torch.no_grad()
def clip_over_ranks(held: Iterable[nn.Parameter], counted: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales the gradients of `held`, all parameters of this rank, so that the norm of the gradients of the whole model
    is at most `max_norm`; returns the norm before.

    `counted` are those of `held` that no other rank counts, plain tensors: each parameter of the model is counted by
    one rank. Squares are added in fp64, in the order of ranks. Collective over all ranks, which get the same bits, and
    scale nothing where the norm is not finite.
    """
    mine = _squares(counted).reshape(1)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    total = torch.stack(parts).sum().sqrt()
    if math.isfinite(float(total)):
        torch.nn.utils.clip_grads_with_norm_(list(held), max_norm, total)
    return float(total)


def counted_here(
    parameters: Iterable[nn.Parameter], experts: Iterable[nn.Parameter], mesh: PlanMesh
) -> list[nn.Parameter]:
    """Those of `parameters`, of a stage, that this rank counts: the first of the ranks that have them; of divided
    `experts` the first that has the same ones."""
    divided = {id(one) for one in experts}
    first, first_of_experts = mesh.group("data").rank() == 0, mesh.coordinates.expert_data == 0
    return [one for one in parameters if (first_of_experts if id(one) in divided else first)]


def _squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Squared norm of the gradients, a float64 scalar on the CPU; norms of tensors are formed in fp32 or wider."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in (one.grad for one in parameters):
        if gradient is not None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            total += torch.linalg.vector_norm(gradient, dtype=wide).double().cpu() ** 2
    return total
