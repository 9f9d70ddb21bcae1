"""BufferPool: buffers are lent again, so that what is held does not grow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.collectives.torch.buffer_pool import BufferPool

KIB = 1024


def memory(size_bytes: int) -> npt.NDArray[np.uint8]:
    return np.zeros(size_bytes, np.uint8)


def test_a_buffer_is_lent_again_when_the_tensor_and_its_views_are_gone() -> None:
    pool = BufferPool(memory)
    first: torch.Tensor | None = pool.take(1000, torch.float32)
    assert first is not None
    address = first.data_ptr()
    view: torch.Tensor | None = first[10:20].view(2, 5)
    first = None
    assert pool.use() == (4 * KIB, 4 * KIB, 4 * KIB, 1)
    other = pool.take(1000, torch.float32)
    assert other.data_ptr() != address, "a view is there still"
    view = None
    assert view is None
    again = pool.take(2000, torch.bfloat16)
    assert again.data_ptr() == address
    assert again.dtype == torch.bfloat16
    assert again.shape == (2000,)
    assert pool.use() == (8 * KIB, 8 * KIB, 8 * KIB, 2)


def test_a_small_request_does_not_take_a_large_buffer() -> None:
    pool = BufferPool(memory)
    pool.take(64 * KIB, torch.uint8)
    small = pool.take(1, torch.uint8)
    assert pool.use() == (68 * KIB, 4 * KIB, 64 * KIB, 2)
    half = pool.take(32 * KIB, torch.uint8)
    assert pool.use() == (68 * KIB, 68 * KIB, 68 * KIB, 2), "up to twice the size is taken"
    assert small.numel() + half.numel() == 32 * KIB + 1


def test_requests_that_repeat_make_nothing_new() -> None:
    pool = BufferPool(memory)
    sizes = [5000, 70_000, 300, 70_000, 5000]
    held = []
    for _ in range(50):
        window: list[torch.Tensor] = []
        for size in sizes:
            window = [*window[-1:], pool.take(size, torch.float32)]
        window = []
        held.append(pool.use())
    assert len({*held[1:]}) == 1
    assert held[-1].lent_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 5)), max_size=30))
@settings(deadline=None, max_examples=60)
def test_no_two_tensors_share_memory_and_counts_are_exact(requests: list[tuple[int, int]]) -> None:
    pool = BufferPool(memory)
    lent: list[tuple[torch.Tensor, int]] = []
    for number, (count, drops) in enumerate(requests):
        lent.append((pool.take(count, torch.int32).fill_(number), number))
        assert all(bool((tensor == value).all()) for tensor, value in lent)
        use = pool.use()
        assert sum(4 * tensor.numel() for tensor, _ in lent) <= use.lent_bytes <= use.held_bytes
        del lent[:drops]
    lent.clear()
    assert pool.use().lent_bytes == 0


def test_an_arena_that_is_full_is_an_error_of_its_own() -> None:
    def full(size_bytes: int) -> npt.NDArray[np.uint8]:
        raise UsageError(f"the arena has no {size_bytes} bytes left")

    with pytest.raises(UsageError, match="no 8192 bytes left"):
        BufferPool(full).take(5000, torch.uint8)
