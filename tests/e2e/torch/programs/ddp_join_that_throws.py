"""The first rank whose batches end stops all others with an error."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from tests.e2e.torch.programs.models import network, train
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    model = DistributedDataParallel(network())
    try:
        with model.join(throw_on_early_termination=True):
            train(model, 2 + 2 * dist.get_rank())
    except RuntimeError as error:
        return str(error)
    return None
