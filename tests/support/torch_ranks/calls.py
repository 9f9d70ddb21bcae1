"""What ranks call in the conformance tests of process groups: each function is one scenario of one rank.

They use `torch.distributed` only, so every backend can run them. Values are whole numbers, so that sums are exact in
every type and every order; what a scenario returns must be the same with every backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.support.torch_ranks.values import NUMBERS
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

__all__ = ["COLLECTIVES", "EXCHANGES", "SCENARIOS"]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ANY = [*NUMBERS, torch.bool, torch.complex64]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (40_001,)]
COLLECTIVES: dict[str, Callable[[int, int], Any]] = {}
EXCHANGES: dict[str, Callable[[int, int], Any]] = {}


def collective(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    COLLECTIVES[function.__name__] = function
    return function


def exchange(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    EXCHANGES[function.__name__] = function
    return function


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """From 0 to 5."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * 7 + seed * 3) % 6).reshape(shape).to(dtype)


def plain(tensor: torch.Tensor) -> Any:
    """Its values, shortened if it is long."""
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    numbers = flat.to(torch.float64)
    return numbers.tolist() if numbers.numel() < 200 else [numbers[:8].tolist(), numbers.sum().item()]


@collective
def all_reduce_of_every_type_and_shape(rank: int, size: int) -> Any:
    found = []
    for dtype in NUMBERS:
        for shape in SHAPES:
            tensor = values(shape, dtype, rank)
            dist.all_reduce(tensor)
            found.append(plain(tensor))
    return found


@collective
def all_reduce_with_every_operation(rank: int, size: int) -> Any:
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for dtype in NUMBERS:
            tensor = values((11,), dtype, rank)
            dist.all_reduce(tensor, op=op)
            found.append(plain(tensor))
    return found


@collective
def all_reduce_of_bits(rank: int, size: int) -> Any:
    found = []
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        for dtype in (torch.int8, torch.int32, torch.int64, torch.uint8):
            tensor = torch.arange(rank + 1, rank + 12).mul(37).to(dtype)
            dist.all_reduce(tensor, op=op)
            found.append(plain(tensor))
            dist.reduce(tensor, 0, op=op)
            found.append(plain(tensor) if rank == 0 else None)
    return found


@collective
def messages_in_the_order_of_tags(rank: int, size: int) -> Any:
    found = []
    for count in (3, 100_000):
        if rank == 0:
            works = [
                dist.isend(values((count,), torch.float32, tag), other, tag=tag)
                for other in range(1, size)
                for tag in (1, 2)
            ]
            for work in works:
                work.wait()  # type: ignore[union-attr]
            continue
        if rank < size:
            for tag in (2, 1):
                tensor = torch.zeros(count)
                dist.recv(tensor, 0, tag=tag)
                found.append(plain(tensor))
    return found


@collective
def messages_from_any_rank(rank: int, size: int) -> Any:
    if rank != 0:
        tensor = torch.full((3,), float(rank))
        for work in [dist.isend(tensor, 0, tag=tag) for tag in (5, 6)]:
            work.wait()  # type: ignore[union-attr]
        return None
    found: list[Any] = []
    for tag in (6, 5):
        sources = []
        for _ in range(1, size):
            tensor = torch.zeros(3)
            source = dist.recv(tensor, tag=tag)
            found.append(bool((tensor == source).all()))
            sources.append(source)
        found.append(sorted(sources))
    return found


@collective
def averages(rank: int, size: int) -> Any:
    found = []
    for dtype in FLOATS:
        tensor = values((9,), dtype, rank) * size
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        found.append(plain(tensor))
    return found


@collective
def all_reduce_of_several_at_once(rank: int, size: int) -> Any:
    tensors = [values((n,), torch.float32, rank + n) for n in (1, 5, 300)]
    work = dist.group.WORLD.allreduce_coalesced(tensors)  # type: ignore[union-attr]
    work.wait()
    return [plain(tensor) for tensor in tensors]


@collective
def works_in_flight(rank: int, size: int) -> Any:
    tensors = [values((n,), torch.float32, rank + n) for n in (1, 5, 30_000, 4, 77)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return [plain(tensor) for tensor in tensors] + [work.is_completed() for work in works]


@collective
def futures(rank: int, size: int) -> Any:
    first, second = values((3,), torch.float32, rank), values((4,), torch.float32, rank)
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in (first, second)]
    doubled = futures[1].then(lambda done: [tensor * 2 for tensor in done.value()])
    return [plain(tensor) for tensor in (*futures[0].wait(), *doubled.wait(), first)]


@collective
def tensors_with_gaps(rank: int, size: int) -> Any:
    base = values((6, 8), torch.float32, rank)
    transposed = base.clone().t()
    dist.all_reduce(transposed)
    late = base.clone().t()
    dist.all_reduce(late, async_op=True).wait()
    channels = values((2, 3, 4, 4), torch.float32, rank).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(channels)
    return [plain(tensor) for tensor in (transposed, late, channels)]


@collective
def broadcast_of_every_type(rank: int, size: int) -> Any:
    found = []
    for root in range(size):
        for dtype in ANY:
            tensor = values((13,), dtype, rank)
            dist.broadcast(tensor, root)
            found.append(plain(tensor))
    return found


@collective
def reduce_to_every_rank(rank: int, size: int) -> Any:
    found = []
    for root in range(size):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            tensor = values((17,), torch.float32, rank)
            dist.reduce(tensor, root, op=op)
            found.append(plain(tensor) if rank == root else None)  # others' tensors are not defined
    return found


@collective
def all_gather_lists(rank: int, size: int) -> Any:
    found = []
    for dtype in ANY:
        outputs = [torch.zeros((2, 3), dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, values((2, 3), dtype, rank))
        found += [plain(output) for output in outputs]
    return found


@collective
def all_gather_into_one_tensor(rank: int, size: int) -> Any:
    found = []
    for shape in ((size * 4,),):
        output = torch.zeros(shape)
        dist.all_gather_single(output, values((4,), torch.float32, rank))
        found.append(plain(output))
    whole = torch.full((size * 4,), -1.0)
    mine = whole[4 * rank : 4 * rank + 4]
    mine.copy_(values((4,), torch.float32, rank))
    dist.all_gather_single(whole, mine)  # in place, as FSDP2 does it
    return [*found, plain(whole)]


@collective
def reduce_scatter_lists(rank: int, size: int) -> Any:
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        output = torch.zeros(2, 3)
        dist.reduce_scatter(output, [values((2, 3), torch.float32, rank + other) for other in range(size)], op=op)
        found.append(plain(output))
    return found


@collective
def reduce_scatter_of_one_tensor(rank: int, size: int) -> Any:
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        output = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter_single(output, values((size * 5,), dtype, rank))
        found.append(plain(output))
    return found


@collective
def barriers(rank: int, size: int) -> Any:
    dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    return work.is_completed()


@collective
def objects_everywhere(rank: int, size: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    shared = [f"from {rank}", rank]
    dist.broadcast_object_list(shared, src=size - 1)
    return [gathered, shared]


@collective
def functional_collectives(rank: int, size: int) -> Any:
    group = dist.group.WORLD
    assert group is not None
    tensor = values((size * 2,), torch.float32, rank)
    found = [
        functional.all_reduce(tensor, "sum", group),
        functional.all_gather_single(tensor, 0, group),
        functional.reduce_scatter_single(tensor, "sum", 0, group),
        functional.broadcast(tensor, 0, group),
        *functional.all_reduce_coalesced([tensor, tensor + 1], "max", group),
        *functional.all_gather_into_tensor_coalesced([tensor, tensor + 1], group),
    ]
    return [plain(each + 0) for each in found]


@collective
def subgroups(rank: int, size: int) -> Any:
    found: list[Any] = []
    even = dist.new_group(list(range(0, size, 2)))
    last_two = dist.new_group([size - 2, size - 1])
    for group in (even, last_two):
        if dist.get_rank(group) >= 0:
            tensor = values((6,), torch.float32, rank)
            dist.all_reduce(tensor, group=group)
            found.append([dist.get_rank(group), dist.get_world_size(group), plain(tensor)])
            tensor = values((6,), torch.float32, rank)
            dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
            found.append(plain(tensor))
    dist.barrier()
    if dist.get_rank(last_two) >= 0:
        dist.destroy_process_group(last_two)
    tensor = values((6,), torch.float32, rank)
    dist.all_reduce(tensor)
    return [*found, plain(tensor)]


@collective
def device_meshes(rank: int, size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))
    found = []
    for name in ("replicas", "shards"):
        tensor = values((5,), torch.float32, rank)
        dist.all_reduce(tensor, group=mesh.get_group(name))
        found.append(plain(tensor))
    whole = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
    return [*found, whole.size(), mesh.get_local_rank("shards")]


@collective
def coalescing(rank: int, size: int) -> Any:
    tensors = [values((n,), torch.float32, rank) for n in (2, 3)]
    with _coalescing_manager(group=dist.group.WORLD):
        for tensor in tensors:
            dist.all_reduce(tensor)
    return [plain(tensor) for tensor in tensors]


@exchange
def all_to_all_lists(rank: int, size: int) -> Any:
    inputs = [values((3, 2), torch.float32, 10 * rank + other) for other in range(size)]
    outputs = [torch.zeros(3, 2) for _ in range(size)]
    dist.all_to_all(outputs, inputs)
    return [plain(output) for output in outputs]


@exchange
def all_to_all_of_one_tensor(rank: int, size: int) -> Any:
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        output = torch.zeros((2 * size, 3), dtype=dtype)
        dist.all_to_all_single(output, values((2 * size, 3), dtype, rank))
        found.append(plain(output))
    return found


@exchange
def all_to_all_with_splits(rank: int, size: int) -> Any:
    sends = [(rank + 2 * other) % 4 for other in range(size)]
    receives = [(other + 2 * rank) % 4 for other in range(size)]
    output = torch.zeros(sum(receives), 3)
    dist.all_to_all_single(output, values((sum(sends), 3), torch.float32, rank), receives, sends)
    return plain(output)


@exchange
def gather_to_every_rank(rank: int, size: int) -> Any:
    found = []
    for root in range(size):
        outputs = [torch.zeros(2, 2) for _ in range(size)] if rank == root else None
        dist.gather(values((2, 2), torch.float32, rank), outputs, dst=root)
        found.append([plain(output) for output in outputs or []])
    return found


@exchange
def scatter_from_every_rank(rank: int, size: int) -> Any:
    found = []
    for root in range(size):
        inputs = [values((3,), torch.float32, rank + other) for other in range(size)] if rank == root else None
        output = torch.zeros(3)
        dist.scatter(output, inputs, src=root)
        found.append(plain(output))
    return found


@exchange
def objects_to_one_rank(rank: int, size: int) -> Any:
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object({"rank": rank}, gathered, dst=1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {other}" for other in range(size)] if rank == 0 else None, src=0)
    return [gathered, mine]


@exchange
def send_and_receive_around_a_ring(rank: int, size: int) -> Any:
    following, before = (rank + 1) % size, (rank - 1) % size
    found = []
    for tag, count in ((0, 3), (7, 50_000), (2, 0)):
        output = torch.zeros(count)
        sent = dist.isend(values((count,), torch.float32, rank), following, tag=tag)
        source = dist.recv(output, before, tag=tag)
        assert sent is not None
        sent.wait()
        found.append([source, plain(output)])
    return found


@exchange
def batches_of_sends_and_receives(rank: int, size: int) -> Any:
    others = [other for other in range(size) if other != rank]
    outputs = {other: torch.zeros(2, 4) for other in others}
    operations = [dist.P2POp(dist.irecv, outputs[other], other) for other in others]
    operations += [dist.P2POp(dist.isend, values((2, 4), torch.float32, 10 * rank + other), other) for other in others]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return [plain(outputs[other]) for other in others]


@exchange
def functional_exchange(rank: int, size: int) -> Any:
    tensor = values((size * 2,), torch.float32, rank)
    group = dist.group.WORLD
    assert group is not None
    return plain(functional.all_to_all_single(tensor, None, None, group) + 0)


SCENARIOS = COLLECTIVES | EXCHANGES
warnings.simplefilter("ignore", FutureWarning)  # older names are tested too
