"""How a checkpoint manager finds the other ranks: by the launcher's store, or by that of a torch process group."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from fireflyer.base.errors import UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.collectives.torch.store import C10dStore, store_of
from fireflyer.runtime.store import Store, open_store

__all__ = ["Peers", "find_peers"]

_made_here = itertools.count(1)
"""Managers of ranks that `ff run` started, in this process. All ranks make the same ones in the same order."""


class Peers(msgspec.Struct, frozen=True):
    """Where this rank stands among those that save together."""

    rank: int
    world_size: int
    store: Store | None
    name: str
    """Of the manager: keys of one made before in the same group, or attempt, must not be read again."""
    store_ends_with_rank_0: bool
    """Its process may be the one that serves the store."""


def find_peers(env: RankEnvironment, group: dist.ProcessGroup | None = None) -> Peers:
    """The ranks of `group`, else those that `ff run` started, else those of the default process group; a process that
    is alone needs none. Collective. Raises `UsageError` where there are others, and no way to meet them."""
    if env.control is not None and group is None:
        number = next(_made_here)
        return Peers(env.rank, env.world_size, open_store(env), "main" if number == 1 else f"main-{number}", False)
    if dist.is_available() and dist.is_initialized():
        chosen: Any = group or dist.group.WORLD
        rank, world_size = chosen.rank(), chosen.size()
        store = C10dStore(store_of(chosen), for_threads=True)  # a save waits beside training
        return Peers(rank, world_size, store, f"group-{_new_number(chosen, rank, world_size):x}", True)
    if env.world_size == 1:
        return Peers(0, 1, None, "main", False)
    raise UsageError(
        f"rank {env.rank} of {env.world_size} cannot find the others to save a checkpoint together: call "
        "torch.distributed.init_process_group before the checkpoint manager is made, or start the job with `ff run`"
    )


def _new_number(group: Any, rank: int, world_size: int) -> int:
    """The same on all ranks, and never seen before. It goes over the group and not its store, which torchrun keeps over
    restarts with all that dead ranks have written."""
    devices = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    device = "cpu" if "cpu" in devices else devices[0]
    number = torch.tensor([secrets.randbits(62) if rank == 0 else 0], device=device)
    if world_size > 1:
        dist.broadcast(number, group=group, group_src=0)
    return int(number.item())
