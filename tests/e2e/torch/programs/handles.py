"""Many collectives under way, waited for in another order, of several types, some of them views."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main() -> Any:
    rank = dist.get_rank()
    tensors = [torch.full((n, 3), n + rank).to(t) for n in (1, 4, 50) for t in (torch.int64, torch.float32)]
    others = [tensor.clone().t() for tensor in tensors]
    views = [tensor.t() for tensor in tensors]
    works = [dist.all_reduce(view, async_op=True) for view in views]
    works += [dist.broadcast(other, 0, async_op=True) for other in others]
    for work in reversed(works):
        assert work is not None
        work.wait()
    flags = torch.tensor([rank == 0, True])
    dist.broadcast(flags, 0)
    waves = torch.view_as_complex(torch.full((3, 2), float(rank)))
    dist.broadcast(waves, 1)
    return [[view.tolist() for view in (*views, *others)], flags.tolist(), torch.view_as_real(waves).tolist()]
