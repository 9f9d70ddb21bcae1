"""Experts of a layer in another order, over the ranks of an expert group: parameters, states of the optimizer, gate.

A model whose experts, rows of the gate and biases are put in the same order computes the same: only the order in which
results of a token's experts are added changes, and with it rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fireflyer.base.errors import UsageError

__all__ = ["renumber_experts"]


@torch.no_grad()
def renumber_experts(
    layer: nn.Module, order: Sequence[int], optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> None:
    """Puts the experts of `layer` in the `order`, for each new number the number before, with the states that
    `optimizer` has of them. Collective over `group`, whose ranks have consecutive experts, and over the mesh of a gate
    whose rows are divided.

    The layer has `gate.weight [E, h]`, a buffer `gate.e_score_correction_bias [E]`, and parameters of `experts`,
    stacked along their first dimension: this rank's, or DTensors of which it has a part. Raises `UsageError` for an
    order that does not fit.
    """
    gate, experts = layer.get_submodule("gate"), layer.get_submodule("experts")
    weight = gate.get_parameter("weight")
    if sorted(order) != list(range(len(weight))) or len(order) % group.size():
        raise UsageError(f"an order of {len(order)} experts does not fit {len(weight)} experts on {group.size()} ranks")
    rows = torch.tensor(order, device=weight.device)
    for whole in (*_with_states(weight, optimizer), gate.get_buffer("e_score_correction_bias")):
        if isinstance(whole, DTensor):  # of rows: a rank has some of them
            (count, *_), (first, *_) = compute_local_shape_and_global_offset(
                whole.shape, whole.device_mesh, whole.placements
            )
            whole.to_local().copy_(whole.full_tensor()[rows[first : first + count]])
        else:
            whole.copy_(whole[rows])
    for parameter in experts.parameters():
        for stacked in _with_states(parameter, optimizer):
            _exchange(_local(stacked), order, group)


def _with_states(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """The parameter, and states of its shape; counters of steps are numbers of all."""
    states = optimizer.state.get(parameter, {}).values()
    return [parameter.detach(), *(one for one in states if isinstance(one, Tensor) and one.shape == parameter.shape)]


def _exchange(stacked: Tensor, order: Sequence[int], group: dist.ProcessGroup) -> None:
    """Rows of `stacked`, in place: rank r gets those with the r-th part of `order`."""
    ranks, rank = group.size(), group.rank()
    each = len(order) // ranks
    wanted = [order[first : first + each] for first in range(0, len(order), each)]
    given = [[expert % each for expert in theirs if expert // each == rank] for theirs in wanted]
    sources = [[place for place, expert in enumerate(wanted[rank]) if expert // each == peer] for peer in range(ranks)]
    sent = stacked[torch.tensor([row for rows in given for row in rows], dtype=torch.int64, device=stacked.device)]
    received = torch.empty_like(stacked)
    if ranks == 1:
        received.copy_(sent)
    else:
        dist.all_to_all_single(
            received, sent, [len(places) for places in sources], [len(rows) for rows in given], group=group
        )
    stacked[torch.tensor([place for places in sources for place in places], device=stacked.device)] = received


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
