"""Stages of torch's own pipelining, with two schedules: microbatches forward and back between two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

WIDTH = 6


def main() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(rank)
        layer = nn.Linear(WIDTH, WIDTH)
        stage = PipelineStage(layer, rank, size, torch.device("cpu"))
        schedule: Any = kind(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        data = torch.arange(8.0 * WIDTH).reshape(8, WIDTH) / 50
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(data)
        elif rank == size - 1:
            schedule.step(target=data.flip(0), losses=losses)
        else:
            schedule.step()
        gradients: list[Any] = [parameter.grad for parameter in layer.parameters()]
        found.append([[loss.item() for loss in losses], [gradient.double().sum().item() for gradient in gradients]])
    return found
