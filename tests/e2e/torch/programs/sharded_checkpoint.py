"""Model and optimizer in shards: saved with their options, loaded into others, trained on; and saved as a whole."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.torch.programs.models import network, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard


def sharded() -> tuple[Any, torch.optim.Optimizer]:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def main() -> Any:
    where: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    model, optimizer = sharded()
    found = [train(model, 3, optimizer)]
    saved: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    save(saved, checkpoint_id=where[0])
    other, its = sharded()
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
    load(state, checkpoint_id=where[0])
    set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for each, used in ((model, optimizer), (other, its)):
        found.append(train(each, 2, used))
    whole: dict[str, Any] = get_model_state_dict(
        other, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where[0])
    return [found, {name: value.double().sum().item() for name, value in sorted(whole.items())}]
