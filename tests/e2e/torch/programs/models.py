"""A model, its batches, and what it has become: shared by the programs that train."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 24


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch(step: int) -> torch.Tensor:
    """That of this rank."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    chosen = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        chosen.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        chosen.step()
        losses.append(loss.item())
    return losses


def digest(model: nn.Module) -> list[float]:
    """Sums of its parameters in double precision: they tell a difference of one bit."""
    return [parameter.detach().double().sum().item() for parameter in model.parameters()]
