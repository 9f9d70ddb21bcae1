"""Balance of experts: once a step the bias of each gate moves by the tokens of all ranks, which are counted up, too, so
that experts can be put on ranks by them when the run is started again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from fireflyer.recipes.deepseek import DeepseekModel
from fireflyer.recipes.deepseek.gate import BIAS_STEP, Gate

__all__ = ["ExpertBalance"]


class ExpertBalance:
    """Of a model that is whole when this is made; of one without experts there is nothing to do."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.gates()) if isinstance(model, DeepseekModel) else []
        self._names = [name for name, _ in named]
        self._gates: list[Gate | None] = [gate for _, gate in named]
        self._experts = len(named[0][1].counts) if named else 0
        self._loads = torch.zeros(len(named), self._experts, dtype=torch.int64)

    @property
    def loads(self) -> dict[str, list[int]]:
        """Tokens that each expert got since `count_from`, by the name of the gate in the whole model: of all ranks, of
        steps that were taken and of those that were not. The same on all ranks."""
        return dict(zip(self._names, self._loads.tolist(), strict=True))

    def count_from(self, loads: Mapping[str, list[int]]) -> None:
        """Goes on from these; a gate that is not among them begins with zeros."""
        none = [0] * self._experts
        self._loads = torch.tensor([loads.get(name, none) for name in self._names], dtype=torch.int64)

    def keep(self, modules: Iterable[nn.Module]) -> None:
        """Only what is among `modules` is on this rank."""
        here = {id(one) for one in modules}
        self._gates = [gate if id(gate) in here else None for gate in self._gates]

    def move(self, *, committed: bool) -> None:
        """Moves the biases, unless the step was not taken, and counts anew. Collective over all ranks."""
        if not self._gates:
            return
        counts = torch.zeros(len(self._gates), self._experts, dtype=torch.int64)
        for own, gate in zip(counts, self._gates, strict=True):
            if gate is not None:
                own.copy_(gate.counts)
        dist.all_reduce(counts)
        self._loads += counts
        for own, gate in zip(counts, self._gates, strict=True):
            if gate is not None:
                gate.move_bias(own, BIAS_STEP if committed else 0.0)
