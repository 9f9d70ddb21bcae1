"""PowerSGD with several buckets: the callbacks of one start collectives while the backward pass starts others.

Gloo has no order of these, so with it each bucket waits for the end of the one before."""

from __future__ import annotations

import os
from typing import Any

import torch
from tests.e2e.torch.programs.models import digest, network, train
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel


def ended(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    if os.environ["BACKEND"] == "gloo":
        future.wait()
    return future


def main() -> Any:
    model = DistributedDataParallel(network(), bucket_cap_mb=1e-4)
    state = power.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, lambda state, bucket: ended(power.powerSGD_hook(state, bucket)))
    return [train(model, 12), digest(model)]
