"""One rank of the benchmark: is told on stdin what to run, one JSON object a line, and answers with seconds.

Ours and the peer use the same array in the same process, one after the other, so that neither has better pages.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fireflyer.collectives import Communicator
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.store import StoreClient

Array = npt.NDArray[Any]
BLOCK = 1 << 18
STORAGE = {"fp32": "f4", "fp16": "f2", "bf16": "u2"}
NATIVE = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def block_of(rank: int, dtype: str) -> Array:
    """A block of random values of small exact sums: integers, so that any order of adding gives the same bits."""
    values = np.random.default_rng(rank).integers(-8, 9, BLOCK).astype("f4")
    if dtype == "bf16":
        return (values.view("u4") >> 16).astype("u2")
    return values.astype(STORAGE[dtype])


def repeated(block: Array, count: int) -> Array:
    return np.resize(block, count)


class Rank:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.rank: int = arguments["rank"]
        self.world_size: int = arguments["world_size"]
        store = StoreClient(arguments["store"], load_secret(arguments["secret_file"]))
        self.comm = Communicator.create(
            rank=self.rank,
            world_size=self.world_size,
            node=arguments["node"],
            store=store,
            secret=load_secret(arguments["secret_file"]),
        )
        store.close()
        self.gloo = self._join_gloo(arguments["rendezvous"])
        self.source = self.array = np.empty(0, "f4")
        self.dtype = "fp32"

    def _join_gloo(self, rendezvous: str) -> str:
        try:
            import torch
            import torch.distributed as dist
        except ImportError:
            return "torch is not installed"
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=self.rank, world_size=self.world_size)
        return ""

    def prepare(self, dtype: str, count: int) -> dict[str, Any]:
        self.dtype = dtype
        self.source = repeated(block_of(self.rank, dtype), count)
        self.array = self.source.copy()
        return {"gloo": self.gloo}

    def time(self, what: str) -> dict[str, Any]:
        """Seconds from a common start until this rank has its result."""
        calls: dict[str, Callable[[], None]] = {"ours": self._ours, "gloo": self._gloo, "memory": self._memory}
        np.copyto(self.array, self.source)
        call = calls[what]
        self.comm.barrier()
        begun = time.perf_counter()
        call()
        return {"seconds": time.perf_counter() - begun}

    def check(self) -> dict[str, Any]:
        """Whether the array holds the exact sum, after `time` of something that sums."""
        total = sum(_widened(block_of(rank, self.dtype), self.dtype) for rank in range(self.world_size))
        expected = repeated(np.asarray(total), self.array.size)
        return {"right": bool(np.array_equal(_widened(self.array, self.dtype), expected))}

    def close(self) -> None:
        if not self.gloo:
            import torch.distributed as dist

            dist.destroy_process_group()
        self.comm.close()

    def _ours(self) -> None:
        self.comm.allreduce(self.array, dtype=NATIVE[self.dtype])

    def _gloo(self) -> None:
        import torch
        import torch.distributed as dist

        tensor = torch.from_numpy(self.array)
        dist.all_reduce(tensor.view(torch.bfloat16) if self.dtype == "bf16" else tensor)

    def _memory(self) -> None:
        """What every allreduce must do at the least: read the whole array once and write it once."""
        whole = self.array.view("u4") if self.array.nbytes % 4 == 0 else self.array
        np.add(whole, 1, out=whole)


def _widened(array: Array, dtype: str) -> Array:
    return (array.astype("u4") << 16).view("f4") if dtype == "bf16" else array.astype("f4")


def main() -> None:
    rank = Rank(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        name = order.pop("do")
        if name == "stop":
            break
        answers: dict[str, Callable[..., dict[str, Any]]] = {
            "prepare": rank.prepare,
            "time": rank.time,
            "check": rank.check,
        }
        print(json.dumps(answers[name](**order)), flush=True)
    rank.close()


if __name__ == "__main__":
    main()
