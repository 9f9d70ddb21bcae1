"""One rank of a pipeline of small stages: our executor, and PyTorch's runtime over gloo, on 1F1B."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bench.collectives.ranks.orders import join_ours, obey
from bench.training.sleeping import SleepingStage
from fireflyer.codesign.schedule import build_schedule
from fireflyer.training.pipeline import Pipeline, split_batch

_WIDTH: Final = 32
_SAMPLES: Final = 4
"""Of a micro-batch."""


class Rank:
    orders: tuple[str, ...] = ("prepare", "time", "sleep")

    def __init__(self, arguments: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.rank: int = arguments["rank"]
        self.world_size: int = arguments["world_size"]
        self.comm = join_ours(arguments)
        dist.init_process_group(
            "gloo", init_method=f"file://{arguments['rendezvous']}", rank=self.rank, world_size=self.world_size
        )

    def prepare(self, micro_batches: str) -> dict[str, Any]:
        self.count = int(micro_batches)
        self.tokens = torch.randn(self.count * _SAMPLES, _WIDTH)
        self.targets = torch.randn(self.count * _SAMPLES, _WIDTH)
        schedule = build_schedule("1f1b", self.world_size, self.count)
        self.pipeline = Pipeline(
            schedule, {(0, self.rank): nn.Linear(_WIDTH, _WIDTH)}, self.comm,
            loss=nn.functional.mse_loss, now_ns=time.thread_time_ns,
        )  # fmt: skip
        stage = PipelineStage(nn.Linear(_WIDTH, _WIDTH), self.rank, self.world_size, torch.device("cpu"))
        self.stage_ns = 0
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, name, self._counted(getattr(stage, name)))
        self.torch = Schedule1F1B(stage, self.count, loss_fn=nn.functional.mse_loss)
        return {}

    def time(self, what: str, loops: str) -> dict[str, Any]:
        """Processor seconds for each action outside stages."""
        call = self._ours if what == "ours" else self._torch
        self.comm.barrier()
        return {"overhead_s": sum(call() for _ in range(int(loops))) / int(loops)}

    def sleep(self, name: str, micro_batches: str) -> dict[str, Any]:
        """The record of a step of stages that sleep."""
        count = int(micro_batches)
        schedule = build_schedule(name, self.world_size, count)
        stages = {key: SleepingStage() for key in schedule.placement.stages_of(self.rank)}
        pipeline = Pipeline(schedule, stages, self.comm, loss=lambda output, target: (output - target).sum())
        batch = [torch.zeros(1, 1)] * count
        for _ in range(2):  # the first one loads code
            self.comm.barrier()
            pipeline.step(batch, batch)
        return {"record": msgspec.to_builtins(pipeline.record)}

    def close(self) -> None:
        dist.destroy_process_group()
        self.comm.close()

    def _ours(self) -> float:
        first, last = self.rank == 0, self.rank == self.world_size - 1
        self.pipeline.step(
            split_batch(self.tokens, self.count) if first else None,
            split_batch(self.targets, self.count) if last else None,
        )
        assert self.pipeline.record is not None
        record = self.pipeline.record
        # What a wait takes of the processor is of the executor, too.
        return (record.end_ns - record.begin_ns - record.passes_ns) / len(record.spans) / 1e9

    def _torch(self) -> float:
        self.stage_ns = 0
        begun = time.thread_time_ns()
        inputs: tuple[Tensor, ...] = (self.tokens,) if self.rank == 0 else ()
        more: dict[str, Any] = {"target": self.targets, "losses": []} if self.rank == self.world_size - 1 else {}
        self.torch.step(*inputs, **more)
        return (time.thread_time_ns() - begun - self.stage_ns) / (2 * self.count) / 1e9

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.stage_ns += time.thread_time_ns() - begun

        return counted


if __name__ == "__main__":
    obey(Rank(json.loads(sys.argv[2])))
