"""Groups of one, of all, and by enumeration; each with sums of its own, then destroyed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    own, groups = dist.new_subgroups(group_size=1)  # type: ignore[no-untyped-call]
    whole, _ = dist.new_subgroups_by_enumeration([list(range(size))])  # type: ignore[no-untyped-call]
    for group in (own, whole):
        tensor = torch.tensor([float(rank + 1)])
        dist.all_reduce(tensor, group=group)
        found.append([tensor.item(), dist.get_rank(group), dist.get_world_size(group)])
    for group in [*groups, whole]:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)
    return found
