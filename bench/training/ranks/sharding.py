"""One rank of a step of FSDP: by our `shard`, by torch's FSDP2 over gloo, and of the whole model on each rank alone."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.collectives.ranks.orders import join_ours, obey
from fireflyer.training.fsdp import shard


class Layers(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same on all ranks
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            tokens = tokens + layer(tokens).tanh()
        return tokens


class Rank:
    orders: tuple[str, ...] = ("prepare", "time", "check")

    def __init__(self, arguments: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.rank: int = arguments["rank"]
        self.world_size: int = arguments["world_size"]
        self.comm = join_ours(arguments)
        dist.init_process_group(
            "gloo", init_method=f"file://{arguments['rendezvous']}", rank=self.rank, world_size=self.world_size
        )
        self.models: dict[str, Layers] = {}

    def prepare(self, layers: str, width: str, tokens: str) -> dict[str, Any]:
        """Three models of equal weights, and tokens of this rank."""
        self.models = {name: Layers(int(layers), int(width)) for name in ("ours", "gloo", "local")}
        shard(self.models["ours"], self.models["ours"].layers, zero=3)
        mesh = init_device_mesh("cpu", (self.world_size,))
        for layer in self.models["gloo"].layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.models["gloo"], mesh=mesh)
        self.tokens = torch.randn(int(tokens), int(width), generator=torch.Generator().manual_seed(self.rank))
        return {}

    def time(self, what: str, loops: str) -> dict[str, Any]:
        """Forward and backward pass, from a common start."""
        model, each = self.models[what], []
        for _ in range(int(loops)):
            model.zero_grad()
            self.comm.barrier()
            begun = time.perf_counter()
            model(self.tokens).square().mean().backward()
            each.append(time.perf_counter() - begun)
        return {"seconds": sum(each), "p50": sorted(each)[len(each) // 2], "p99": max(each)}

    def check(self, what: str) -> dict[str, Any]:
        """Whether the gradients of the last steps are the mean of those of all ranks."""
        right = True
        self.models["local"].zero_grad()
        self.models["local"](self.tokens).square().mean().backward()
        for found, own in zip(self.models[what].parameters(), self.models["local"].parameters(), strict=True):
            assert found.grad is not None
            assert own.grad is not None
            mean = own.grad.clone()
            dist.all_reduce(mean)
            whole: Any = found.grad
            right &= torch.allclose(whole.full_tensor(), mean / self.world_size, rtol=1e-3, atol=1e-7)
        return {"right": right}

    def close(self) -> None:
        self.models.clear()
        dist.destroy_process_group()
        self.comm.close()


if __name__ == "__main__":
    obey(Rank(json.loads(sys.argv[2])))
