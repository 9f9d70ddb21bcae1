"""The hooks of DDP that torch has in C++."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from tests.e2e.torch.programs.models import digest, network, train
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    found = []
    for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):  # type: ignore[attr-defined]
        for as_view in (False, True):
            model = DistributedDataParallel(network(), bucket_cap_mb=1e-3, gradient_as_bucket_view=as_view)
            model._register_builtin_comm_hook(hook)  # type: ignore[no-untyped-call]
            found.append([train(model, 4), digest(model)])
    return found
