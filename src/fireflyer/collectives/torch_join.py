"""A communicator for the ranks of a `torch.distributed` group, whichever its backend is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Final, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import Store as TorchStore

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS
from fireflyer.collectives.bootstrap.job import JobPlans, tell_launcher, tell_launcher_of_saturation
from fireflyer.collectives.bootstrap.transports import check_transport
from fireflyer.collectives.communicator import Communicator
from fireflyer.collectives.planning.plan import Plan
from fireflyer.collectives.planning.routing import default_plan
from fireflyer.collectives.torch.bridges import find_pairs
from fireflyer.collectives.torch.store import C10dStore, WorldNodes, agree_on_world_nodes, own_address, store_of
from fireflyer.collectives.torch_devices import DeviceCommunicator
from fireflyer.collectives.torch_pair_join import pair_on_cuda
from fireflyer.runtime.environment import read_environment

__all__ = ["HfreduceOptions", "Joined", "communicator_of", "join"]

_MICROSECOND_NS: Final = 1000
_AUTO: Final = "auto"
DEFAULT_TIMEOUT: Final = timedelta(minutes=5)


class HfreduceOptions:
    """Options for `init_process_group(pg_options=)` and `new_group(pg_options=)`.

    `node`: the node of this rank (default GROUP_RANK, and always the machine on which it runs). `host`: the address at
    which other nodes reach this one (default: FF_ADDRESS, else that from which it reaches MASTER_ADDR). `plan` fixes
    the order of sums (default: what the job keeps, see `job`; for a part of its ranks a new one).
    `transport` carries the operations between nodes: "tcp", "ucx" or "auto", the same on all ranks (default: that of
    the world for a part of it, else `ff run --transport` or FF_TRANSPORT, else "tcp"; see docs/how-to/ucx.md).
    `nvlink_pairs`: pairs of ranks whose GPUs are bridged; all ranks, the same everywhere. Each rank's GPU is then its
    current CUDA device when the group is made. "auto" asks the driver, and goes without pairs where it names none.
    `inline_callbacks`: `get_future` waits for the end of its work, so that callbacks run at once in the thread that
    adds them, in the order of the program and so the same on all ranks. For programs whose callbacks start collectives
    while other threads do (PowerSGD with more than one bucket); the price is that nothing overlaps with such a future.
    None: where the function that calls `get_future` has a callback written inside of it that names a collective, as
    torch's PowerSGD hooks have; give True for callbacks that are written elsewhere.
    """

    def __init__(
        self,
        *,
        node: int | None = None,
        host: str | None = None,
        plan: Plan | None = None,
        transport: str | None = None,
        nvlink_pairs: Sequence[tuple[int, int]] | Literal["auto"] = (),
        inline_callbacks: bool | None = None,
    ) -> None:
        """Raises `UsageError` where a name is not known."""
        if isinstance(nvlink_pairs, str) and nvlink_pairs != _AUTO:
            raise UsageError(f"nvlink_pairs {nvlink_pairs!r} is not known; give pairs of ranks, or {_AUTO!r}")
        if transport is not None:
            check_transport(transport)
        self.transport = transport
        self.nvlink_pairs = nvlink_pairs if isinstance(nvlink_pairs, str) else tuple(nvlink_pairs)
        self.node = node
        self.host = host
        self.plan = plan
        self.inline_callbacks = inline_callbacks


class Joined(NamedTuple):
    communicator: Communicator
    places: WorldNodes
    transport: str
    """Transport that was asked for; parts of the group ask for the same."""
    inline_callbacks: bool | None = None


def join(
    store: TorchStore,
    *,
    rank: int,
    world_size: int,
    name: str,
    timeout: timedelta,
    options: HfreduceOptions,
    places: WorldNodes | None = None,
    transport: str | None = None,
) -> Joined:
    """Collective over the ranks of `store`. `places`: what a larger group, of which this is a part, agreed on.
    `transport`: what that asked for."""
    env = read_environment()
    ours = C10dStore(store)
    timeout_ns = max(MS, int(timeout / timedelta(microseconds=1)) * _MICROSECOND_NS)
    if places is None:
        places = agree_on_world_nodes(
            ours, env, rank=rank, world_size=world_size, node=options.node, timeout_ns=timeout_ns
        )
    asked = options.transport or transport or env.transport or "tcp"
    create = partial(
        Communicator.create,
        store=ours,
        secret=places.secret,
        attempt=env.attempt,
        host=options.host or own_address(env),
        ports=env.ports,
        timeout_ns=timeout_ns,
        join_timeout_ns=timeout_ns,
        pin=env.pin,
        peer_memory=env.peer_memory,
        transport=asked,
        dump_dir=env.dump_dir,
    )
    whole = world_size == env.world_size  # ranks of a part have other numbers, and what was declared does not fit it
    communicator = create(
        rank=rank,
        world_size=world_size,
        node=places.node_of_rank[rank],
        plan=options.plan,
        name=name,
        planner=JobPlans.of_job(env, f"torch-{name}").plan if whole else default_plan,
    )
    if whole:
        communicator.tell_of_failure(lambda error: tell_launcher(env, error))
    communicator.tell_of_saturation(partial(tell_launcher_of_saturation, env, name))
    wish = options.nvlink_pairs
    pairs = find_pairs(communicator).pairs if isinstance(wish, str) else wish
    if pairs:
        pair_on_cuda(DeviceCommunicator.of(communicator), pairs, create)
    return Joined(communicator, places, asked, options.inline_callbacks)


def communicator_of(
    group: dist.ProcessGroup | None = None,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    options: HfreduceOptions | None = None,
) -> Communicator:
    """A communicator for the ranks of a group of any backend (None: the world), numbered as in the group.

    Collective: all ranks of the group call it, and each call makes another. Close it before the group is destroyed.
    """
    chosen = group or dist.group.WORLD
    if chosen is None:
        raise UsageError("there is no process group yet; call torch.distributed.init_process_group first")
    store = store_of(chosen)
    number = C10dStore(store).add(f"hfreduce/{chosen.rank()}", 1)
    joined = join(
        PrefixStore(f"hfreduce-{number}", store),
        rank=chosen.rank(),
        world_size=chosen.size(),
        name=f"torch-beside-{chosen.group_name}-{number}",  # its dumps lie beside those of the others
        timeout=timeout,
        options=options or HfreduceOptions(),
    )
    return joined.communicator
