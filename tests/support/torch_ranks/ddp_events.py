"""What a rank says, by its flight recorder, of how gradients travel: `python -m tests.support.torch_ranks.ddp_events
JSON`."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.support.jobs.launching import wait_until
from tests.support.torch_ranks.ddp_programs import compiled_inside, compiled_wrapper, loss_of, wide
from torch import nn

from fireflyer.collectives import Communicator
from fireflyer.training import DistributedDataParallel
from fireflyer.training.process_groups import communicator_beside

LIMIT_S = 40
PRIVATE_ELEMENTS = 1 << 19  # what is shorter is copied through slots in any case
OPERATIONS = 3


def eager(ddp: Any, module: Callable[[], nn.Module]) -> Any:
    return ddp(module(), bucket_cap_mb=1)


def eager_in_one_bucket(ddp: Any, module: Callable[[], nn.Module]) -> Any:
    return ddp(module(), bucket_cap_mb=1000)


def overlap(params: dict[str, Any]) -> dict[str, Any]:
    """In the second pass, when the backward pass begins to compute the gradients that come last: how many sums had been
    started, and how many of these had ended. The computation waits for them; with no overlap none is there to wait for.

    `later`: of how many buckets all parameters belong to other layers than the first one."""
    makers = (eager, eager_in_one_bucket, compiled_inside, compiled_wrapper)
    make = next(maker for maker in makers if maker.__name__ == params["way"])
    torch.manual_seed(3)
    model = make(DistributedDataParallel, wide)
    wrapper: Any = next(each for each in model.modules() if isinstance(each, DistributedDataParallel))
    comm: Any = wrapper.communicator
    loss_of(model, 0).backward()
    model.zero_grad()
    before = comm.records().submitted
    found: list[tuple[int, int]] = []

    def first_layer(_: Any) -> None:
        started = comm.records().submitted - before
        wait_until(lambda: ended(comm, before) >= started, LIMIT_S)
        found.append((started, ended(comm, before)))

    loss = loss_of(model, 1)
    nodes = computing(loss)
    min(nodes, key=lambda node: int(node._sequence_nr())).register_prehook(first_layer)
    loss.backward()
    in_later_layers = [all(".0." not in f".{name}" for name in names) for names in wrapper.buckets]
    return {
        "compiled graphs": sum("Compiled" in node.name() for node in nodes),
        "buckets": len(in_later_layers),
        "later": sum(in_later_layers),
        "before the first layer": found,
    }


def computing(loss: torch.Tensor) -> list[Any]:
    """The nodes of the graph that multiply gradients by matrices, or compiled graphs."""
    nodes: dict[Any, None] = {}
    following: list[Any] = [loss.grad_fn]
    while following:
        node = following.pop()
        if node is not None and node not in nodes:
            nodes[node] = None
            following.extend(other for other, _ in node.next_functions)
    return [node for node in nodes if "Addmm" in node.name() or "Compiled" in node.name()]


def ended(comm: Communicator, first: int) -> int:
    records = comm.records().records
    return sum(r.kind == "allreduce" and r.state == "done" and r.seq >= first for r in records)


def paths(_params: dict[str, Any]) -> dict[str, Any]:
    """How the bytes of allreduces went, by where the tensors lie, and whether the kernel lets this process read the
    memory of the other."""
    world = dist.group.WORLD
    assert world is not None
    comm = communicator_beside(world)
    found: dict[str, dict[str, int]] = {}
    for place, tensor in (
        ("private", torch.ones(PRIVATE_ELEMENTS)),
        ("shared", torch.from_numpy(comm.empty(PRIVATE_ELEMENTS, "f32"))),
    ):
        before = comm.records().submitted
        for _ in range(OPERATIONS):
            comm.allreduce(tensor)
        records = [r for r in comm.records().records if r.kind == "allreduce" and r.seq >= before]
        found[place] = dict(Counter(record.path for record in records))
    return {"allowed": other_process_readable(), "paths": found}


def parameters(_params: dict[str, Any]) -> dict[str, Any]:
    """How the values of parameters went at construction, and whether they are in shared memory after a step."""
    world = dist.group.WORLD
    assert world is not None
    comm: Any = communicator_beside(world)
    found: dict[str, Any] = {}
    for shared in (False, True):
        before = comm.records().submitted
        model = DistributedDataParallel(wide(), parameters_in_shared_memory=shared)
        records = [r for r in comm.records().records if r.kind == "broadcast" and r.seq >= before]
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model, 0).backward()
        optimizer.step()
        model.load_state_dict(model.state_dict())
        found["shared" if shared else "private"] = {
            "path of the largest": max(records, key=lambda r: r.bytes).path,
            "bytes": max(record.bytes for record in records),
            "registered": all(comm.registered(p.detach()) for p in model.parameters()),
            "size": model.size_bytes,
        }
    return {"allowed": other_process_readable(), "parameters": sum(p.numel() * 4 for p in wide().parameters()), **found}


def other_process_readable() -> bool:
    """Whether process_vm_readv works on the next rank, on both of them."""
    value = ctypes.c_int64(dist.get_rank())
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (os.getpid(), ctypes.addressof(value)))
    pid, address = places[(dist.get_rank() + 1) % len(places)]

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    here = ctypes.c_int64(-1)
    own, remote = Vector(ctypes.addressof(here), 8), Vector(address, 8)
    read = ctypes.CDLL(None).process_vm_readv(pid, ctypes.byref(own), 1, ctypes.byref(remote), 1, 0)
    answers: list[Any] = [None] * len(places)
    dist.all_gather_object(answers, read == 8)
    return all(answers)


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    result = {"overlap": overlap, "paths": paths, "parameters": parameters}[arguments["scenario"]](arguments)
    dist.destroy_process_group()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
