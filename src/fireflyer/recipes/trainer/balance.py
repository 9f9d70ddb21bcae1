"""Balance of experts: once a step the bias of each gate moves by the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from fireflyer.recipes.deepseek import DeepseekModel
from fireflyer.recipes.deepseek.gate import BIAS_STEP, Gate

__all__ = ["ExpertBalance"]


class ExpertBalance:
    """Of a model that is whole when this is made; of one without experts there is nothing to do."""

    def __init__(self, model: nn.Module) -> None:
        gates = [gate for _, gate in model.gates()] if isinstance(model, DeepseekModel) else []
        self._gates: list[Gate | None] = list(gates)
        self._experts = len(gates[0].counts) if gates else 0

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
        for own, gate in zip(counts, self._gates, strict=True):
            if gate is not None:
                gate.move_bias(own, BIAS_STEP if committed else 0.0)
