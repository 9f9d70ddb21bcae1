"""Gradients compressed to low rank: callbacks of futures start collectives and wait for their futures."""

from __future__ import annotations

from typing import Any

from tests.e2e.torch.programs.models import digest, network, train
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    found = []
    # torch 2.13 refuses the matrix of its own batched hook with an AssertionError, so that one does not get to compress
    for hook, first in ((power.powerSGD_hook, 2), (power.batched_powerSGD_hook, 99)):
        model = DistributedDataParallel(network())
        state = power.PowerSGDState(None, start_powerSGD_iter=first, min_compression_rate=0.5)
        model.register_comm_hook(state, hook)
        found.append([train(model, 5), digest(model)])
    return found
