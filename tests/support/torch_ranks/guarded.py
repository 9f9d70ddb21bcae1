"""Ranks that train under the guard, one of which flips bits or dies.

Run as `python -m tests.support.torch_ranks.guarded JSON`.

The result is the verdicts that are not agreement, for each scenario, as text and in parts.
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fireflyer.base.errors import PeerFailed
from fireflyer.training.guard import CorruptionFound, Guard, GuardVerdict

STEPS = 12
FLIP_AT = 5


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Of a float32 tensor, in place."""
    with torch.no_grad():
        tensor.view(-1)[element : element + 1].view(torch.int32).bitwise_xor_(1 << bit)


class Trained:
    def __init__(self, every: int, on_corruption: Any = "return") -> None:
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(20, 30), nn.Linear(30, 5)
        self.module = nn.Sequential(self.first, nn.GELU(), self.last)
        self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.guard = Guard(self.module, self.optimizer, every=every, on_corruption=on_corruption)

    def run(self, steps: int, disturb: Callable[[str, int], None]) -> list[GuardVerdict]:
        found: list[GuardVerdict] = []
        for step in range(steps):
            batch = torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            disturb("before", step)
            found += self.kept(self.guard.before_commit(step))
            self.optimizer.step()
            disturb("after", step)
            found += self.kept(self.guard.after_commit(step))
        return found

    @staticmethod
    def kept(verdict: GuardVerdict | None) -> list[GuardVerdict]:
        return [verdict] if verdict is not None and verdict.corrupt else []


def flipped(where: str, rank: int, every: int) -> dict[str, Any]:
    """What is found of one flipped bit; the first verdict."""
    trained = Trained(every)
    weight = trained.last.weight

    def disturb(point: str, step: int) -> None:
        if step != FLIP_AT or dist.get_rank() != rank:
            return
        if where == "gradient" and point == "before":
            assert weight.grad is not None
            flip(weight.grad, 7, 12)
        elif where == "moment" and point == "after":
            flip(trained.optimizer.state[weight]["exp_avg_sq"], 11, 20)
        elif where == "parameter" and point == "after":
            flip(weight, 3, 0)

    found = trained.run(STEPS, disturb)
    return shown(found[0]) if found else {}


def shown(verdict: GuardVerdict) -> dict[str, Any]:
    return {
        "step": verdict.step,
        "point": verdict.point,
        "finding": verdict.finding,
        "ranks": verdict.ranks,
        "tensors": [one.name for one in verdict.tensors],
        "agreed": verdict.agreed_step,
    }


def undisturbed() -> dict[str, Any]:
    trained = Trained(1)
    found = trained.run(60, lambda _point, _step: None)
    return {"found": len(found), "looks": trained.guard.cost.looks}


def raised() -> str:
    """All ranks raise the same error, before the optimizer uses the gradient."""
    trained = Trained(1, "raise")
    try:
        trained.run(1, lambda point, _: flip(trained.first.weight, 0, 31) if dist.get_rank() == 1 else None)
    except CorruptionFound as error:
        return str(error)
    return ""


def dying(rank: int) -> str:
    """The error of the others when one dies between two looks; gradients are not summed, so the guard meets it."""
    trained = Trained(1)
    trained.guard.before_commit(0)
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        trained.guard.after_commit(0)
    except PeerFailed as error:
        return str(error)
    return ""


def main() -> None:
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    result: Any
    if arguments["scenario"] == "dies":
        result = dying(1)
    else:
        result = {
            where: flipped(where, dist.get_world_size() - 1, arguments["every"])
            for where in ("parameter", "moment", "gradient")
        }
        result |= {"undisturbed": undisturbed(), "raised": raised()}
        dist.destroy_process_group()
    os.write(1, (json.dumps(result) + "\n").encode())
    os._exit(0)  # a group that has lost a rank may not end by itself


if __name__ == "__main__":
    main()
