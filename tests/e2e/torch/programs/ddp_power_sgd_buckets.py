"""PowerSGD with several buckets: the callbacks of one start collectives while the backward pass starts others."""

from __future__ import annotations

from typing import Any

from tests.e2e.torch.programs.models import digest, network, train
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    model = DistributedDataParallel(network(), bucket_cap_mb=1e-4)
    model.register_comm_hook(
        power.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5), power.powerSGD_hook
    )
    return [train(model, 12), digest(model)]
