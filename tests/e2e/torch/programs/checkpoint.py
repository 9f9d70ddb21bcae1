"""A distributed checkpoint, saved by all ranks and loaded into another model."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.torch.programs.models import digest, network
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def main() -> Any:
    where: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    save({"model": model.state_dict()}, checkpoint_id=where[0])
    other = network()
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=where[0])
    other.load_state_dict(state["model"])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where[0])
    return [digest(other), digest(other) == digest(model)]
