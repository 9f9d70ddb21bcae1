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
    return both.tolist() == [True, False, False] and either.tolist() == [True, True, False]


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


@refused
def recv_from_any(rank: int) -> object:
    return dist.recv(torch.zeros(1))


@refused
def cuda_tensor(rank: int) -> object:
    # any device that is not the CPU; a machine without CUDA has this one
    return dist.all_reduce(torch.empty(3, device="meta"))


@refused
def sparse_tensor(rank: int) -> object:
    return dist.all_reduce(torch.eye(3).to_sparse())


@refused
def unknown_op(rank: int) -> object:
    return dist.all_reduce(torch.zeros(3, dtype=torch.int32), op=dist.ReduceOp.BXOR)


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
def average_of_integers(rank: int) -> object:
    return dist.all_reduce(torch.zeros(3, dtype=torch.int64), op=dist.ReduceOp.AVG)


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
    one = torch.ones(1)
    dist.all_reduce(one, group=other)
    results["other_group"] = one.item()
    dist.destroy_process_group()
    print(json.dumps(results), flush=True)


def message(function: Callable[[], object]) -> str:
    try:
        return f"returned {function()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
