"""A compiled model in DDP, whose methods C++ calls while Dynamo watches."""

from __future__ import annotations

from typing import Any

from tests.e2e.torch.programs.models import digest, network, train
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    found = []
    for whole in (True, False):
        model = network()
        if not whole:
            model.compile(backend="eager")
        wrapped = DistributedDataParallel(model)
        if whole:
            wrapped.compile(backend="eager")
        found.append([train(wrapped, 4), digest(model)])
    return found
