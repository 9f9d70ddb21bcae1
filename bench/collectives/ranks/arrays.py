"""One rank of ours and of gloo, with NumPy arrays; does what it is told, see `crew`.

Ours and gloo use the same array in the same process, one after the other, so that neither has better pages.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.collectives.data import ELEMENT_BYTES, NATIVE, Array, block_of, expected_sum, filled_with, repeat_into
from bench.collectives.ranks.orders import join_ours, obey
from fireflyer.collectives import Communicator


class Rank:
    orders: tuple[str, ...] = ("join", "import_torch", "prepare", "time", "check", "wait")

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.rank: int = arguments["rank"]
        self.world_size: int = arguments["world_size"]
        self.dtype = "fp32"
        self.loops = 1
        self.arrays: dict[str, Array] = {}
        self.block = self.sum = np.empty(0, np.float32)
        self._comm: Communicator | None = None
        self._gloo = False

    @property
    def comm(self) -> Communicator:
        assert self._comm is not None
        return self._comm

    def join(self, library: str) -> dict[str, Any]:
        return self._join_ours() if library == "ours" else self._join_gloo()

    def import_torch(self) -> dict[str, Any]:
        """For those who measure what joining takes, apart from what torch takes."""
        try:
            import torch
        except ImportError:
            return {"missing": "torch is not installed"}
        torch.set_num_threads(1)
        return {}

    def prepare(self, dtype: str, count_bytes: str, what: str = "") -> dict[str, Any]:
        """Makes the arrays, or only the one that `what` needs; with 0 bytes gives their memory back."""
        self.dtype = dtype
        self.arrays = {}
        count = int(count_bytes) // ELEMENT_BYTES[dtype]
        if count > 0:
            self.block = block_of(self.rank, dtype)
            self.sum = expected_sum(self.world_size, dtype)
            if what != "registered":
                self.arrays["private"] = np.empty(count, self.block.dtype)
            empty = None if self._comm is None else getattr(self._comm, "empty", None)
            if empty is not None and what in ("", "registered"):
                self.arrays["registered"] = empty(count, NATIVE[dtype])
            for array in self.arrays.values():
                repeat_into(array, self.block)
        return {
            "registered": "registered" in self.arrays,
            "array_bytes": sum(array.nbytes for array in self.arrays.values()),
        }

    def time(self, what: str, loops: str) -> dict[str, Any]:
        """Seconds from a common start until this rank has its results."""
        self.loops = int(loops)
        array, call = self._call(what)
        repeat_into(array, self.block)
        each = np.empty(self.loops)
        self._barrier()
        begun = before = time.perf_counter()
        for number in range(self.loops):
            call()
            after = time.perf_counter()
            each[number] = after - before
            before = after
        p50, p99 = np.quantile(each, (0.5, 0.99))
        return {"seconds": before - begun, "p50": float(p50), "p99": float(p99)}

    def check(self, what: str) -> dict[str, Any]:
        """Whether the array holds the exact sum after `time` of `what`; of one more call where there were many."""
        array, call = self._call(what)
        if self.loops > 1:
            repeat_into(array, self.block)
            call()
        return {"right": filled_with(array, self.sum, self.dtype)}

    def wait(self, what: str, late_s: str) -> dict[str, Any]:
        """What waiting for rank 0 costs, which is late."""
        _, call = self._call(what)
        self._barrier()
        used, begun = _cpu_s(), time.perf_counter()
        if self.rank == 0:
            time.sleep(float(late_s))
        call()
        return {"cpu_s": _cpu_s() - used, "seconds": time.perf_counter() - begun}

    def close(self) -> None:
        self.arrays = {}
        if self._gloo:
            import torch.distributed as dist

            dist.destroy_process_group()
        if self._comm is not None:
            self._comm.close()

    def _join_ours(self) -> dict[str, Any]:
        self._comm = join_ours(self.arguments)
        return {}

    def _join_gloo(self) -> dict[str, Any]:
        missing = self.import_torch()
        if missing:
            return missing
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.arguments['rendezvous']}",
            rank=self.rank,
            world_size=self.world_size,
        )
        self._gloo = True
        return {}

    def _barrier(self) -> None:
        if self._comm is not None:
            self._comm.barrier()
        else:
            import torch.distributed as dist

            dist.barrier()

    def _call(self, what: str) -> tuple[Array, Callable[[], object]]:
        """What to call, on which array."""
        array = self.arrays["registered" if what == "registered" else "private"]
        if what == "floor":  # every allreduce must at the least read the whole array once and write it once
            whole = array.view("u4") if array.nbytes % 4 == 0 else array
            return array, lambda: np.add(whole, 1, out=whole)
        if what == "gloo":
            import torch
            import torch.distributed as dist

            tensor = torch.from_numpy(array)
            tensor = tensor.view(torch.bfloat16) if self.dtype == "bf16" else tensor
            return array, lambda: dist.all_reduce(tensor)
        comm, dtype = self.comm, NATIVE[self.dtype]
        return array, lambda: comm.allreduce(array, dtype=dtype)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    obey(Rank(json.loads(sys.argv[2])))
