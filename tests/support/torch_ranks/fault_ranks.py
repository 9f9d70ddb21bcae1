"""Ranks that train until a backward pass fails; in the middle of one, a rank dies, stops, or calls something else.

Run as `python -m tests.support.torch_ranks.fault_ranks JSON`, by `processes`. Events are lines as those of
`collective_scenarios`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.support.torch_ranks.training import MODELS, sharded, stock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives.communicator import Communicator
from fireflyer.collectives.torch_fsdp import use_for_fsdp
from fireflyer.collectives.torch_hooks import HookState
from fireflyer.collectives.torch_join import communicator_of
from fireflyer.training import DistributedDataParallel as OurDdp

STEPS_BEFORE = 2


def say(event: str, **fields: Any) -> None:
    os.write(1, (json.dumps({"event": event} | fields) + "\n").encode())


class Trainer:
    """A model that trains in one of the ways, and a collective call on what its gradients go through."""

    def __init__(self, way: str, timeout: timedelta) -> None:
        torch.manual_seed(3)
        make, self.loss_of = MODELS["gpt"]
        module = make()
        self.first = next(layer for layer in module.modules() if isinstance(layer, nn.Linear))
        self.comm: Communicator | None = None
        if way in ("hfreduce", "fsdp hfreduce"):
            group = dist.new_group(backend="hfreduce", timeout=timeout)
            self.other: Callable[[], object] = lambda: dist.all_reduce(torch.ones(3), group=group)
            mesh = DeviceMesh.from_group(group, "cpu") if way != "hfreduce" else None
            self.model = stock(module, group=group) if mesh is None else sharded(module, mesh)
            return
        comm = self.comm = communicator_of(timeout=timeout)
        self.other = lambda: comm.allreduce(torch.ones(3))
        if way == "hook":
            self.model = stock(module, hook=HookState(comm))
        elif way == "ours":
            self.model = OurDdp(module, comm, bucket_bytes=20_000)
        else:
            gloo = init_device_mesh("cpu", (dist.get_world_size(),))
            self.model = sharded(module, gloo, lambda model: use_for_fsdp(model, comm))

    def step(self, number: int) -> None:
        self.model.zero_grad()
        self.loss_of(self.model, number, slice(0, 2)).backward()  # type: ignore[no-untyped-call]

    def in_the_middle_of_backward(self, what: Callable[[], object]) -> None:
        """Calls it once, when the gradients of all later layers are there and those of the first are not."""

        def after_forward(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            handle.remove()
            output.register_hook(lambda _: (what(), None)[1])  # type: ignore[no-untyped-call]

        handle = self.first.register_forward_hook(after_forward)


def befall(fault: str, trainer: Trainer) -> None:
    say("fault")
    if fault == "other":
        trainer.other()
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    trainer = Trainer(arguments["way"], timedelta(seconds=arguments["timeout_s"]))
    try:
        for number in range(STEPS_BEFORE):
            trainer.step(number)
        if dist.get_rank() == arguments["victim"]:
            trainer.in_the_middle_of_backward(lambda: befall(arguments["fault"], trainer))
        for number in range(STEPS_BEFORE, 1000):
            trainer.step(number)
    except (RuntimeError, FireflyerError) as error:
        mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm" in line}  # noqa: SIM115
        say("failed", type=type(error).__name__, message=str(error), shared_files=sorted(mapped))
    sys.stdin.read()  # so that the end of one process is not what the others report
    if trainer.comm is not None:
        trainer.comm.close()


if __name__ == "__main__":
    main()
