"""Objects: configuration from rank 0, shares of a list, and what each rank has to say."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def main() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    config: list[Any] = [{"lr": 0.1, "layers": (1, 2)} if rank == 0 else None]
    dist.broadcast_object_list(config, src=0)
    share: list[Any] = [None]
    dist.scatter_object_list(share, [list(range(n)) for n in range(size)] if rank == 0 else None, src=0)
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank, "share": share[0]})
    told: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(f"rank {rank}", told, dst=0)
    return [config, everybody, told]
