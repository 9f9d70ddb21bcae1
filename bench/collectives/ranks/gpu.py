"""One rank with a tensor on a GPU, which it may share with others; does what it is told, see `crew`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.collectives.data import NATIVE, block_of, expected_sum, filled_with
from bench.collectives.ranks.orders import join_ours, obey
from bench.collectives.spans import covered
from fireflyer.collectives.devices.copies import HostMemory
from fireflyer.collectives.devices.pieces import Move
from fireflyer.collectives.torch.cuda import CudaCopyEngine
from fireflyer.collectives.torch_devices import DeviceCommunicator

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NS_PER_S = 1e9
MS_PER_S = 1e3


class Watch:
    """When sums were under way: from the start of each until its end was seen."""

    def __init__(self) -> None:
        self.sums: list[tuple[float, float]] = []
        self._begun: dict[int, int] = {}

    def see(self, stage: str, number: int, _begun_ns: int, ended_ns: int) -> None:
        if stage == "submit":
            self._begun[number] = ended_ns
        elif stage == "copy_to_device":
            self.sums.append((self._begun.pop(number) / NS_PER_S, ended_ns / NS_PER_S))


def shared_share(copies: list[tuple[float, float]], sums: list[tuple[float, float]]) -> float:
    """The part of the time with copies during which sums were under way, too."""
    both = covered(copies) + covered(sums) - covered([*copies, *sums])
    return both / covered(copies) if copies else 0.0


class GpuRank:
    orders = ("join", "prepare", "time", "check", "spans")

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.rank: int = arguments["rank"]
        self.world_size: int = arguments["world_size"]
        self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.copies = CudaCopyEngine(self.device, timed=True)
        self.watch = Watch()
        self.comm = DeviceCommunicator.of(join_ours(arguments))
        self.comm.watch = self.watch.see
        self.comm.use(self.device, self.copies)
        self.tensor = self.clean = torch.empty(0, device=self.device)
        self.memory: HostMemory | None = None
        self.dtype = "fp32"
        self._nccl = False

    def join(self, library: str) -> dict[str, Any]:
        if library == "nccl":
            if torch.cuda.device_count() < self.world_size:
                return {"missing": f"NCCL needs a GPU for each of {self.world_size} ranks"}
            if not dist.is_nccl_available():
                return {"missing": "torch was built without NCCL"}
            method = f"file://{self.arguments['rendezvous']}"
            dist.init_process_group("nccl", init_method=method, rank=self.rank, world_size=self.world_size)
            self._nccl = True
        return {}

    def prepare(self, dtype: str, count_bytes: str) -> dict[str, Any]:
        self.dtype = dtype
        count = int(count_bytes) // DTYPES[dtype].itemsize
        array = np.resize(block_of(self.rank, dtype), count)
        carrier = torch.from_numpy(array.view(np.int16) if dtype == "bf16" else array)
        self.clean = carrier.view(DTYPES[dtype]).to(self.device)
        self.tensor = self.clean.clone()
        if self.memory is not None:
            self.memory.release()
        self.memory = self.copies.pin(self.comm.empty(max(1, self.clean.nbytes), "u8"))
        return {}

    def time(self, what: str, loops: str) -> dict[str, Any]:
        """Seconds from a common start until the GPU has the result."""
        call = self._call(what)
        self.tensor.copy_(self.clean)
        self.watch.sums.clear()
        self.copies.copies_made.clear()
        torch.cuda.synchronize()
        self.comm.barrier()
        begun = time.perf_counter()
        for _ in range(int(loops)):
            call()
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "p99": seconds / int(loops)}

    def check(self, what: str) -> dict[str, Any]:
        self.tensor.copy_(self.clean)
        self._call(what)()
        found = self.tensor.cpu()
        array = found.view(torch.uint16).numpy() if self.dtype == "bf16" else found.numpy()
        return {"right": filled_with(array, expected_sum(self.world_size, self.dtype), self.dtype)}

    def spans(self) -> dict[str, Any]:
        """Of the last `time` of ours: speeds of copies while they were copied, and how much of it ran beside sums."""
        origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        origin.record()
        origin.synchronize()
        now_s = time.perf_counter()
        spans: dict[str, list[tuple[float, float]]] = {"down": [], "up": []}
        moved = {"down": 0, "up": 0}
        for copy in self.copies.copies_made:
            # copies were before the origin, so the times are negative
            begun, ended = (origin.elapsed_time(point.event) / MS_PER_S for point in (copy.begun, copy.ended))
            spans[copy.direction].append((now_s + begun, now_s + ended))
            moved[copy.direction] += copy.size_bytes
        rates = {way: moved[way] / covered(spans[way]) if spans[way] else 0.0 for way in spans}
        share = shared_share([*spans["down"], *spans["up"]], self.watch.sums)
        return {"down": rates["down"], "up": rates["up"], "share": share}

    def close(self) -> None:
        if self._nccl:
            dist.destroy_process_group()
        self.comm.close()

    def _call(self, what: str) -> Callable[[], object]:
        if what == "ours":
            return lambda: self.comm.allreduce(self.tensor)
        if what == "started":
            return lambda: self.comm.allreduce(self.tensor, async_op=True).wait()
        if what == "nccl":
            return lambda: dist.all_reduce(self.tensor)
        return self._plain if what == "plain" else self._copy_both_ways

    def _plain(self) -> None:
        host = self.tensor.cpu()
        self.comm.communicator.allreduce(host, dtype=NATIVE[self.dtype])
        self.tensor.copy_(host)

    def _copy_both_ways(self) -> None:
        """What any way through the host must do: all of it down, and as much up at the same time."""
        assert self.memory is not None
        host, moves = self.memory.tensor, (Move(0, 0, self.clean.nbytes),)
        flat = self.tensor.reshape(-1).view(torch.uint8)
        down = self.copies.device_to_host(flat, host, moves, [self.copies.here()])
        up = self.copies.host_to_device(host, flat, moves, [])
        down.wait()
        up.wait()


if __name__ == "__main__":
    obey(GpuRank(json.loads(sys.argv[2])))
