"""What the profiler shows of collectives, without the name of the backend."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main() -> Any:
    tensor = torch.ones(3, 5)
    parts = [torch.ones(3, 5) for _ in range(dist.get_world_size())]
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 1)
        dist.all_gather(parts, tensor)
        dist.gather(tensor, parts if dist.get_rank() == 0 else None)
        dist.scatter(tensor, parts if dist.get_rank() == 0 else None)
        dist.barrier()
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
    prefix = dist.get_backend() + ":"
    events = [event for event in profile.events() if event.name.startswith(prefix)]
    sizes = {event.name: event.input_shapes[:1] for event in events if "all_reduce" in event.name}
    return [sorted(event.name.removeprefix(prefix) for event in events), list(sizes.values())]
