"""Initial weights that depend on the seed and on the name of each tensor alone: a stage of a pipeline, or a rank with a
part of the experts, draws for its part what one process draws for the whole."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from fireflyer.recipes.deepseek.config import DeepseekConfig
from fireflyer.recipes.deepseek.experts import RoutedExperts

__all__ = ["initialise"]


@torch.no_grad()
def initialise(module: nn.Module, config: DeepseekConfig, prefix: str = "") -> None:
    """Fills the parameters of `module`, whose names in the whole model begin with `prefix`, as `layers.7.`: matrices
    normal with `config.deviation`, weights of norms 1, biases 0. Each routed expert is drawn by its number.

    Numbers are drawn in fp32 on the CPU, so that the device decides nothing, and are then cast.
    """
    experts = {
        f"{prefix}{path}.{name}": child.numbers
        for path, child in module.named_modules()
        if isinstance(child, RoutedExperts)
        for name, _ in child.named_parameters()
    }
    for name, parameter in module.named_parameters(prefix=prefix.removesuffix(".")):
        numbers = experts.get(name)
        if numbers is not None:
            for number, matrix in zip(numbers, parameter, strict=True):
                _draw(matrix, config, f"{name}.{number}")
        elif parameter.dim() > 1:
            _draw(parameter, config, name)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _draw(matrix: Tensor, config: DeepseekConfig, name: str) -> None:
    digest = hashlib.sha256(f"{config.seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    matrix.copy_(torch.empty(matrix.shape, dtype=torch.float32).normal_(std=config.deviation, generator=generator))
