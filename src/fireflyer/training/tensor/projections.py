"""Modules that take the place of those that DTensor does not divide well; and the tensors of a divided model under its
own names."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.nn import functional

__all__ = ["StackedProjection", "VocabularyEmbedding", "whole_tensors"]


class StackedProjection(nn.Module):
    """Several linear maps of one input, results side by side: what one `nn.Linear` with stacked rows computes.

    Contiguous rows of a stacked query, key and value matrix would be all of the queries and half of the keys. Divided
    part by part each rank has the queries, keys and values of its heads.
    """

    def __init__(self, linear: nn.Linear, parts: int) -> None:
        super().__init__()
        rows = linear.out_features // parts
        self.parts = nn.ModuleList()
        for part in range(parts):
            one = nn.Linear(linear.in_features, rows, bias=linear.bias is not None, device="meta")
            for name, whole in linear.named_parameters():
                piece = whole.detach()[part * rows : (part + 1) * rows].clone()
                setattr(one, name, nn.Parameter(piece, requires_grad=whole.requires_grad))
            self.parts.append(one)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`; on a divided model the outputs of this rank: of each part its share."""
        return torch.cat([part(hidden) for part in self.parts], dim=-1)


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank has a contiguous part of the vocabulary.

    DTensor's own embedding computes the gradient of the whole table on each rank.
    """

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh, stream: Placement) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        whole = embedding.weight
        divided = distribute_tensor(whole.detach(), mesh, [Shard(0)])
        self.weight = nn.Parameter(divided, requires_grad=whole.requires_grad)
        self._mesh, self._stream = mesh, stream
        rows = self.num_embeddings // mesh.size()
        self._first, self._end = mesh.get_local_rank() * rows, (mesh.get_local_rank() + 1) * rows

    def forward(self, tokens: Tensor) -> DTensor:
        """`[B, T]` int64, whole on each rank, to `[B, T, D]` as the residual stream is divided."""
        outside = (tokens < self._first) | (tokens >= self._end)
        rows = (tokens - self._first).masked_fill(outside, 0)
        found = functional.embedding(rows, cast("DTensor", self.weight).to_local())
        if self.padding_idx is not None:  # its row gets no gradient
            found = torch.where((tokens == self.padding_idx).unsqueeze(-1), found.detach(), found)
        found = found.masked_fill(outside.unsqueeze(-1), 0)
        return DTensor.from_local(found, self._mesh, [Partial()], run_check=False).redistribute(
            placements=[self._stream]
        )


def whole_tensors(model: nn.Module, of: Literal["values", "gradients"] = "values") -> dict[str, Tensor]:
    """Parameters of `model`, or their gradients, undivided and under the names of the model before it was divided.

    Collective: all ranks of the mesh call it. Copies; for checks and for export to one process. A parameter without a
    gradient is left out of gradients.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter if of == "values" else parameter.grad
        if tensor is not None:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = whole.detach().clone()
    for name, module in model.named_modules():
        if isinstance(module, StackedProjection):
            for kind in dict(cast("nn.Linear", module.parts[0]).named_parameters()):
                pieces = [found.pop(f"{name}.parts.{part}.{kind}", None) for part in range(len(module.parts))]
                given = [piece for piece in pieces if piece is not None]
                if given:
                    found[f"{name}.{kind}"] = torch.cat(given)
    return found
