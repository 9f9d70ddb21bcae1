"""Callbacks of futures that start collectives and wait for them: by the work, by its future, and in a chain."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def total(count: int) -> Any:
    work = dist.all_reduce(torch.full((count,), float(dist.get_rank() + 1)), async_op=True)
    assert work is not None
    return work.get_future()


def by_work(_: torch.futures.Future[Any]) -> Any:
    tensor = torch.full((3,), float(dist.get_rank()))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return [work.wait(), tensor.tolist()]


def main() -> Any:
    found: list[Any] = []
    for _ in range(10):
        found.append(total(5).then(by_work).wait())
        found.append(total(5).then(lambda _: total(4).wait()[0].tolist()).wait())
        found.append(total(5).then(by_work).then(lambda _: total(2).wait()[0].tolist()).wait())
    return found
