"""One rank of `test_torch_group`. Run as `python -m tests.support.torch_ranks.extras JSON`."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fireflyer.collectives.torch_group import HfreduceGroup, HfreduceOptions

MORE: dict[str, Callable[[int], bool]] = {}
REFUSED: dict[str, Callable[[int], object]] = {}


def more(function: Callable[[int], bool]) -> Callable[[int], bool]:
    MORE[function.__name__] = function
    return function


def refused(function: Callable[[int], object]) -> Callable[[int], object]:
    REFUSED[function.__name__] = function
    return function


@more
def types_that_are_only_moved(rank: int) -> bool:
    right = True
    for dtype in (torch.int16, torch.uint16, torch.complex128, torch.float8_e4m3fn):
        tensor = torch.full((5,), 1.0 + rank).to(dtype)
        outputs = [torch.zeros(5).to(dtype) for _ in range(2)]
        dist.all_gather(outputs, tensor)
        dist.broadcast(tensor, 1)
        right &= [float(each[0].real if dtype.is_complex else each[0]) for each in (*outputs, tensor)] == [1, 2, 2]
    return right


@more
def booleans(rank: int) -> bool:
    both, either = torch.tensor([True, rank == 0, False]), torch.tensor([True, rank == 0, False])
    dist.all_reduce(both, op=dist.ReduceOp.BAND)
    dist.all_reduce(either, op=dist.ReduceOp.MAX)
    odd = torch.tensor([True, rank == 0, False])
    dist.all_reduce(odd, op=dist.ReduceOp.BXOR)
    same = odd.tolist() == [False, True, False]
    return same and both.tolist() == [True, False, False] and either.tolist() == [True, True, False]


@more
def bits_of_narrow_integers(rank: int) -> bool:
    right = True
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        tensor = torch.tensor([[12, 10], [7, 1000]][rank]).to(dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.BXOR)
        right &= tensor.tolist() == [12 ^ 7, 10 ^ 1000]
    return right


@more
def averages_of_integers(rank: int) -> bool:
    """As `sync_dist=True` of Lightning has it for counts: in place, the type kept, the fraction dropped."""
    right = True
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        tensor = torch.tensor([3 + rank, 4, 100]).to(dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        right &= tensor.dtype == dtype and tensor.tolist() == [3, 4, -28 if dtype == torch.int8 else 100]
    large = torch.tensor([-(2**60) - 1 - 2 * rank])
    dist.all_reduce(large, op=dist.ReduceOp.AVG)
    return right and large.item() == -(2**60) - 2


@more
def uneven_lists(rank: int) -> bool:
    inputs = [torch.full((1 + rank + other,), float(10 * rank + other)) for other in range(2)]
    outputs = [torch.zeros(1 + rank + other) for other in range(2)]
    dist.all_to_all(outputs, inputs)
    return all(bool((output == 10 * other + rank).all()) for other, output in enumerate(outputs))


@more
def messages_with_gaps(rank: int) -> bool:
    output = torch.zeros(4, 2).t()
    work = dist.isend(torch.arange(8.0).reshape(4, 2).t(), 1 - rank)
    dist.recv(output, 1 - rank)
    assert work is not None
    work.wait()
    return output.tolist() == torch.arange(8.0).reshape(4, 2).t().tolist()


@more
def strided_broadcast(rank: int) -> bool:
    base = torch.full((3, 4), float(rank))
    dist.broadcast(base[:, ::2], 1)
    return base.tolist() == [[1, rank, 1, rank]] * 3


@more
def fp8_sums(rank: int) -> bool:
    tensor = torch.tensor([1.5, -2.0, 300.0]).to(torch.float8_e4m3fn)
    dist.all_reduce(tensor)
    return tensor.float().tolist() == [3.0, -4.0, 448.0]


@more
def split_groups(rank: int) -> bool:
    alone = dist.split_group(split_ranks=[[0], [1]])
    both = dist.split_group(dist.group.WORLD, [[1, 0]], group_desc="both")
    none = dist.split_group(split_ranks=[[0]])
    tensors = [torch.tensor([1.0 + rank]) for _ in range(2)]
    dist.all_reduce(tensors[0], group=alone)
    dist.all_reduce(tensors[1], group=both)
    right = [tensor.item() for tensor in tensors] == [1 + rank, 3] and (none is not None) == (rank == 0)
    return right and both is not None and both.group_desc == "both"


@more
def monitored_barriers(rank: int) -> bool:
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    own = dist.new_group([0, 1])
    if rank == 1:
        told = dist.recv(torch.zeros(1), 0) == 0  # comes only when rank 0 has given up
        dist.monitored_barrier(own)
        return told
    text = message(lambda: dist.monitored_barrier(own, timedelta(0)))
    at_once = text == "HfreduceError: Rank 0 timed out in monitoredBarrier after 0 ms; pass a longer timeout"
    text = message(lambda: dist.monitored_barrier(own, timedelta(milliseconds=50), True))
    dist.send(torch.zeros(1), 1)
    begins = text.startswith("HfreduceError: Rank 1 failed to pass monitoredBarrier: ")
    ends = text.endswith("has not completed within 50 ms; it is still pending; rank 1 has not called it")
    return at_once and begins and ends


@refused
def overlapping_split(rank: int) -> object:
    return dist.split_group(split_ranks=[[0, 1], [1]])


@refused
def cuda_tensor(rank: int) -> object:
    # any device that is not the CPU; a machine without CUDA has this one
    return dist.all_reduce(torch.empty(3, device="meta"))


@refused
def sparse_tensor(rank: int) -> object:
    return dist.all_reduce(torch.eye(3).to_sparse())


@refused
def unknown_op(rank: int) -> object:
    return dist.all_reduce(torch.zeros(3), op=dist.ReduceOp.BXOR)


@refused
def short_list(rank: int) -> object:
    return dist.all_gather([torch.zeros(2)], torch.zeros(2))


@refused
def uneven_gather(rank: int) -> object:
    return dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.zeros(2))


@refused
def bad_splits(rank: int) -> object:
    return dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1], [2, 2])


@refused
def wrong_options(rank: int) -> object:
    return dist.new_group(pg_options=3)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("hfreduce", timeout=timedelta(seconds=30), pg_options=HfreduceOptions(transport="auto"))
    rank = dist.get_rank()
    results: dict[str, Any] = {name: function(rank) for name, function in MORE.items()}
    for name, function in REFUSED.items():
        results[name] = message(lambda function=function: function(rank))  # type: ignore[misc]
    other = dist.new_group([0, 1])
    assert isinstance(other, HfreduceGroup)
    results["asked_of_a_part"] = other.joined.transport
    broken = dist.new_group([0, 1])
    results["mismatch"] = message(
        lambda: (
            dist.all_reduce(torch.zeros(100), group=broken)
            if rank == 0
            else dist.broadcast(torch.zeros(100), 0, group=broken)
        )
    )
    results["after"] = message(lambda: dist.all_reduce(torch.zeros(3), group=broken, async_op=True).wait())
    late = dist.new_group([0, 1])
    dist.barrier(group=late)
    results["future"] = message(
        lambda: (
            required(dist.all_reduce(torch.zeros(100), group=late, async_op=True)).get_future().wait()
            if rank == 0
            else required(dist.broadcast(torch.zeros(100), 0, group=late, async_op=True)).get_future().wait()
        )
    )
    one = torch.ones(1)
    dist.all_reduce(one, group=other)
    results["other_group"] = one.item()
    dist.destroy_process_group()
    print(json.dumps(results), flush=True)


def required(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def message(function: Callable[[], object]) -> str:
    try:
        return f"returned {function()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
