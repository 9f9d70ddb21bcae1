"""torch's hooks in Python: plain, half precision, and half precision around another hook.

DDP refuses those of bfloat16 without CUDA by their names, whatever the backend is.
"""

from __future__ import annotations

from typing import Any

from tests.e2e.torch.programs.models import digest, network, train
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    found = []
    for hook in (hooks.allreduce_hook, hooks.fp16_compress_hook, hooks.fp16_compress_wrapper(hooks.allreduce_hook)):
        model = DistributedDataParallel(network(), bucket_cap_mb=1e-3)
        model.register_comm_hook(None, hook)
        found.append([train(model, 4), digest(model)])
    return found
