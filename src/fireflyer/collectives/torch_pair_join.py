"""Ranks with bridged GPUs find each other: the communicators of lanes and pairs, and memory that two processes share.

Each process maps the outbox of its partner by CUDA's IPC handles, as torch.multiprocessing does. What is exchanged is
plain data that is put into known classes here; nothing is unpickled. GPUs are known by their UUID, since each process
may number them in its own way (CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch.multiprocessing import reductions

from fireflyer.base.decoding import decode_published
from fireflyer.base.errors import UsageError
from fireflyer.collectives.communicator import Communicator
from fireflyer.collectives.devices.copies import CopyEngine
from fireflyer.collectives.torch.bridges import gpu_name
from fireflyer.collectives.torch.cuda import CudaCopyEngine
from fireflyer.collectives.torch.pairs import OUTBOX_BYTES, IpcBuffers, PairedSums, PairGroups
from fireflyer.collectives.torch.store import number_nodes
from fireflyer.collectives.torch_devices import DeviceCommunicator

__all__ = ["check_pairs", "cuda_ipc_buffers", "join_pairs", "pair_on_cuda"]

_CARD_BYTES: Final = 4096
Create = Callable[..., Communicator]


class _CudaIpcHandle(msgspec.Struct, frozen=True):
    """What is needed to map a tensor of another process; the fields of `torch.multiprocessing.reductions`."""

    device: str
    elements: int
    tensor_offset: int
    handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    needs_event: bool


def check_pairs(pairs: Sequence[tuple[int, int]], node_of_rank: Sequence[int]) -> None:
    """Raises `UsageError` unless every rank is in exactly one pair, with a rank of its node."""
    ranks = sorted(rank for pair in pairs for rank in pair)
    if ranks != list(range(len(node_of_rank))):
        raise UsageError(f"pairs {list(pairs)[:8]} must name each of {len(node_of_rank)} ranks once")
    for first, second in pairs:
        if node_of_rank[first] != node_of_rank[second]:
            raise UsageError(f"ranks {first} and {second} are a pair, but on different nodes; pair ranks of one node")


def join_pairs(
    comm: DeviceCommunicator,
    pairs: Sequence[tuple[int, int]],
    create: Create,
    show: Callable[[Communicator], IpcBuffers],
    places: tuple[CopyEngine, CopyEngine, CopyEngine],
) -> None:
    """Makes allreduces of `comm` go by pairs. Collective over its ranks, which must all give the same `pairs`.

    `create(rank=, world_size=, node=, name=, ...)` joins a part of the world; `show(pair)` exchanges outboxes.
    """
    nodes = comm.communicator.plan.node_of_rank
    check_pairs(pairs, nodes)
    number = next(index for index, pair in enumerate(pairs) if comm.rank in pair)
    pair = pairs[number]
    position = pair.index(comm.rank)
    lane_ranks = tuple(each[position] for each in pairs)
    lane_node = number_nodes([nodes[rank] for rank in lane_ranks])[number]
    lane = create(rank=number, world_size=len(pairs), node=lane_node, name=f"lane-{position}")
    of_pair = partial(create, rank=position, world_size=2, node=0, arena_bytes=0)
    before, after = of_pair(name=f"pair-{number}-before"), of_pair(name=f"pair-{number}-after")
    circle = PairGroups(DeviceCommunicator.of(lane), lane_ranks, before, after, pair)
    comm.pairs = PairedSums(circle, show(before), places, first=position == 0)


def pair_on_cuda(comm: DeviceCommunicator, pairs: Sequence[tuple[int, int]], create: Create) -> None:
    """`join_pairs` for the current CUDA device of each rank."""
    if not torch.cuda.is_available():
        raise UsageError("pairs of GPUs were declared, but this process has no CUDA device; leave nvlink_pairs out")
    device = torch.device("cuda", torch.cuda.current_device())
    places = (comm.place(device), CudaCopyEngine(device), CudaCopyEngine(device))
    join_pairs(comm, pairs, create, partial(cuda_ipc_buffers, device=device), places)


def cuda_ipc_buffers(pair: Communicator, *, device: torch.device, place_bytes: int = OUTBOX_BYTES) -> IpcBuffers:
    """Allocates one on `device`, and maps the partner's. Collective over the pair."""
    own = torch.empty(4 * place_bytes, dtype=torch.uint8, device=device)
    mine = np.zeros(_CARD_BYTES, np.uint8)
    card = msgspec.json.encode(_card_of(own))
    mine[: len(card)] = np.frombuffer(card, np.uint8)
    both = np.zeros((2, _CARD_BYTES), np.uint8)
    pair.allgather(both, mine)
    theirs = decode_published(both[1 - pair.rank].tobytes().rstrip(b"\0"), _CudaIpcHandle, "the partner")
    if theirs.elements != own.numel():
        raise UsageError(
            f"the partner has a buffer of {theirs.elements} bytes, this rank one of {own.numel()}; "
            "do both run the same version?"
        )
    partners = _tensor_of(theirs)
    if partners.device != device and not torch.cuda.can_device_access_peer(device, partners.device):
        raise UsageError(f"{device} has no peer access to {partners.device}; declare only bridged GPUs as pairs")
    pair.barrier()
    return IpcBuffers(own, partners)


def _card_of(tensor: torch.Tensor) -> _CudaIpcHandle:
    _, fields = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]  # torch lacks annotations
    _, _, _, tensor_offset, _, _, device, *rest, needs_event = fields
    handle, storage_bytes, storage_offset_bytes, _, counter, counter_offset, event = rest
    return _CudaIpcHandle(
        device=gpu_name(device),
        elements=tensor.numel(),
        tensor_offset=tensor_offset,
        handle=handle,
        storage_bytes=storage_bytes,
        storage_offset_bytes=storage_offset_bytes,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        needs_event=needs_event,
    )


def _tensor_of(card: _CudaIpcHandle) -> torch.Tensor:
    found = [index for index in range(torch.cuda.device_count()) if gpu_name(index) == card.device]
    if not found:
        raise UsageError(
            f"the partner's GPU {card.device} is not visible here; let both ranks see both (CUDA_VISIBLE_DEVICES)"
        )
    tensor: Any = reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]  # torch lacks annotations
        torch.Tensor,
        torch.Size([card.elements]),
        (1,),
        card.tensor_offset,
        torch.storage.TypedStorage,
        torch.uint8,
        found[0],
        card.handle,
        card.storage_bytes,
        card.storage_offset_bytes,
        False,
        card.counter,
        card.counter_offset,
        card.event,
        card.needs_event,
    )
    mapped: torch.Tensor = tensor
    return mapped
