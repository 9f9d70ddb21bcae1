"""One rank that saves a sharded model with `torch.distributed.checkpoint`, in our format and in DCP's own, or loads.

Run as `python -m tests.support.checkpoints.dcp_ranks JSON`: `how` to shard, `load` of checkpoints, `save` into a
directory or 3FS, `theirs` the directory for DCP's own format.
"""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.support.checkpoints.sharded_ranks import digest, sharded, train
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fireflyer.base.errors import FireflyerError, NoSpace
from fireflyer.checkpoint.dcp import FireFlyerReader, FireFlyerWriter, async_save, load


class Planner(DefaultSavePlanner):
    """Plans are kept by the name of the class."""


class Full(FireFlyerWriter):
    """The disk of rank 1 is full."""

    def _expect_space(self, needed_bytes: int) -> None:
        if dist.get_rank() == 1:
            raise NoSpace(f"no room for {needed_bytes} bytes")


def state_of(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, moments = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": moments, "number": 0}


def loaded(directory: str, how: str) -> list[Any]:
    """A digest of what is there, and a plain value."""
    net, _ = sharded(how)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    state = state_of(net, optimizer)
    state_dict_loader.load(state, storage_reader=FireFlyerReader(directory))
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return [digest(net, optimizer), state["number"]]


def refused(directory: str, how: str) -> str:
    """The message of the error, the same on each rank."""
    net, _ = sharded(how)
    state = state_of(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    try:
        load(state, directory)
    except FireflyerError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def saved(directory: str, theirs: str, how: str) -> str:
    net, model = sharded(how)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in (1, 2):
        train(model, optimizer, step)
    state = state_of(net, optimizer) | {"number": 7}
    state_dict_saver.save(state, storage_writer=FileSystemWriter(theirs))
    async_save(state, directory, step=2).result(60)
    for step in (3, 4):  # the second with the plan that DCP has kept
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state_dict_saver.save(state, storage_writer=FireFlyerWriter(directory, step=step), planner=planner)
    for step, writer in ((5, Full), (6, FireFlyerWriter)):  # the second with a plan that is of the one that failed
        with contextlib.suppress(CheckpointException):
            state_dict_saver.save(
                state, storage_writer=writer(directory, step=step), planner=Planner(enable_plan_caching=True)
            )
    return digest(net, optimizer)


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {"loaded": {path: loaded(path, arguments["how"]) for path in arguments["load"]}}
    if arguments.get("refuse"):
        found["refused"] = refused(arguments["refuse"], arguments["how"])
    if arguments.get("save"):
        found["saved"] = saved(arguments["save"], arguments["theirs"], arguments["how"])
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
