"""One rank of training: our DDP, stock DDP over our process group, stock DDP over gloo, a model for each."""

from __future__ import annotations

import importlib
import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

from bench.collectives.models import Step, build
from bench.collectives.ranks.orders import join_ours, obey
from bench.collectives.spans import covered
from fireflyer.collectives import Communicator
from fireflyer.training import DistributedDataParallel as OurDDP
from fireflyer.training.reducer import ReducerStats

_LEARNING_RATE: Final = 1e-5
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
_HIDDEN_STEPS: Final = 3


class Trainer:
    """A wrapped model, its optimizer, and how to leave out the synchronisation."""

    def __init__(self, wrapped: OurDDP | StockDDP, loss: Step) -> None:
        self.wrapped = wrapped
        self.loss = loss
        self.optimizer = torch.optim.SGD(wrapped.parameters(), lr=_LEARNING_RATE)

    def step(self, *, sync: bool) -> None:
        self.gradients(sync=sync)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self, *, sync: bool) -> None:
        context: AbstractContextManager[Any] = nullcontext() if sync else self.wrapped.no_sync()
        with context:
            self.loss(self.wrapped).backward()  # type: ignore[no-untyped-call]


class Rank:
    orders = ("join", "prepare", "time", "check", "hidden")

    def __init__(self, arguments: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.arguments = arguments
        self.rank: int = arguments["rank"]
        self.comm: Communicator = join_ours(arguments)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{arguments['rendezvous']}",
            rank=self.rank,
            world_size=arguments["world_size"],
        )
        self.groups: dict[str, Any] = {"gloo": dist.group.WORLD}
        self.model = ""
        self.trainers: dict[str, Trainer] = {}

    def join(self, _: str) -> dict[str, Any]:
        """Joins our process group, where there is one."""
        try:
            group = importlib.import_module("fireflyer.collectives.torch_group")
        except ImportError as error:
            return {"missing": f"there is no process group of ours: {error}"}
        options = group.HfreduceOptions(node=self.arguments["node"])
        self.groups["hfreduce"] = dist.new_group(backend="hfreduce", pg_options=options)
        return {}

    def prepare(self, model: str, _: str) -> dict[str, Any]:
        """A copy of the model for each way."""
        self.trainers.clear()
        self.model = model
        for name in ("ours", *self.groups) if model != "fp32" else ():
            self.trainers[name] = self._trainer(name)
        return {}

    def time(self, what: str, loops: str) -> dict[str, Any]:
        """`what` is e.g. "gloo/no_sync"; forward, backward and optimizer step."""
        name, way = what.split("/")
        each = []
        self.comm.barrier()
        for _ in range(int(loops)):
            begun = time.perf_counter()
            self.trainers[name].step(sync=way == "sync")
            each.append(time.perf_counter() - begun)
        return {"seconds": sum(each), "p50": sorted(each)[len(each) // 2], "p99": max(each)}

    def check(self, what: str) -> dict[str, Any]:
        """Whether fresh models get the gradients that gloo gets them."""
        name, _ = what.split("/")
        mine, gloo = self._trainer(name), self._trainer("gloo")
        for trainer in (mine, gloo):
            trainer.gradients(sync=True)
        pairs = zip(mine.wrapped.parameters(), gloo.wrapped.parameters(), strict=True)
        return {"right": all(_close(a.grad, b.grad) for a, b in pairs)}

    def hidden(self, name: str) -> dict[str, Any]:
        """The share of the time with a sum under way that lay before the last one began."""
        trainer = self._trainer(name)
        clock = _HookClock(self.groups[name]) if name in self.groups else None
        if clock is not None:
            assert isinstance(trainer.wrapped, StockDDP)
            trainer.wrapped.register_comm_hook(None, lambda _, bucket: clock.hook(bucket))
        before = ReducerStats()
        for number in range(_HIDDEN_STEPS + 1):
            if clock is not None:
                clock.begin(counts=number > 0)
            trainer.step(sync=True)
            if isinstance(trainer.wrapped, OurDDP) and number == 0:
                before = trainer.wrapped.stats()
        if clock is not None:
            clock.begin(counts=False)
            return {"flight_s": clock.flight_s, "hidden_s": clock.hidden_s}
        assert isinstance(trainer.wrapped, OurDDP)
        after = trainer.wrapped.stats()
        return {
            "flight_s": (after.in_flight_ns - before.in_flight_ns) / 1e9,
            "hidden_s": (after.overlapped_ns - before.overlapped_ns) / 1e9,
        }

    def close(self) -> None:
        self.trainers.clear()
        dist.destroy_process_group()
        self.comm.close()

    def _trainer(self, name: str) -> Trainer:
        model, loss = build(self.model, self.rank)
        return Trainer(self._wrap(name, model), loss)

    def _wrap(self, name: str, model: nn.Module) -> OurDDP | StockDDP:
        if name == "ours":
            return OurDDP(model, self.comm)
        return StockDDP(model, process_group=self.groups[name], gradient_as_bucket_view=True)


class _HookClock:
    """A hook of stock DDP that sums as DDP does by itself, and notes when each bucket was under way."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.flight_s = self.hidden_s = 0.0
        self._counts = False
        self._spans: list[list[float]] = []

    def begin(self, *, counts: bool) -> None:
        """A step begins: adds up the one before."""
        if self._counts and self._spans:
            last = max(begun for begun, _ in self._spans)
            self.flight_s += covered(self._spans)
            self.hidden_s += covered([[begun, min(ended, last)] for begun, ended in self._spans])
        self._spans = []
        self._counts = counts

    def hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        span = [time.perf_counter(), float("inf")]
        self._spans.append(span)
        buffer = bucket.buffer()
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None

        def end(future: torch.futures.Future[Any]) -> torch.Tensor:
            span[1] = time.perf_counter()
            found: torch.Tensor = future.value()[0]
            return found.div_(self.group.size())

        returned: torch.futures.Future[torch.Tensor] = work.get_future().then(end)
        return returned


def _close(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE)


if __name__ == "__main__":
    obey(Rank(json.loads(sys.argv[2])))
