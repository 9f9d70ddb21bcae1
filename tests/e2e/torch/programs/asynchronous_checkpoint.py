"""A checkpoint that is written while training goes on, and holds what was there when it began."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch.distributed as dist
from tests.e2e.torch.programs.models import digest, network, train
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.parallel import DistributedDataParallel


def main() -> Any:
    where: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    inner = network()
    model = DistributedDataParallel(inner)
    found = [train(model, 2), digest(inner)]
    beside = dist.new_group(backend="gloo")  # the thread that writes may not use the group of the gradients
    saving: Any = async_save({"model": inner.state_dict()}, checkpoint_id=where[0], process_group=beside)
    found.append(train(model, 3))
    saving.result()
    state = {"model": network().state_dict()}
    load(state, checkpoint_id=where[0])
    other = network()
    other.load_state_dict(state["model"])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where[0])
    return [found, digest(other), digest(inner)]
