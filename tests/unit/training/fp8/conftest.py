"""What the tests of FP8 layers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models of these tests are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def single_rank_group() -> Iterator[None]:
    """The world of one rank, over gloo, without a network."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, the stub lacks it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
