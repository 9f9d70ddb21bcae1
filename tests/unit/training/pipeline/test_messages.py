"""Messages between stages: any tensors come back as they were sent, and what is no message is refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.training.pipeline.messages import (
    HEADER_BYTES,
    MAX_DIMS,
    MAX_TENSORS,
    Bytes,
    Outgoing,
    empty_bytes,
    layout_of,
    read_header,
    unpack,
)
from fireflyer.training.pipeline.phases import Gradients

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
LIMIT = 1 << 16
KEY = (True, 3, 5)
WHAT = "rank 1, a message"
ENTRY = 48
"""Where the first entry of a header begins: code, whether it gets a gradient, dimensions, sizes; 8 bytes each."""


@st.composite
def some_tensor(draw: st.DrawFn) -> torch.Tensor | None:
    if draw(st.integers(0, 4)) == 0:
        return None
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=MAX_DIMS))
    tensor = torch.randint(0, 2, shape).to(dtype)
    if tensor.ndim > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor.requires_grad_() if dtype.is_floating_point and draw(st.booleans()) else tensor


def sent(tensors: Gradients, buffer: Outgoing | None = None) -> Bytes:
    layout = layout_of(tensors, LIMIT, WHAT)
    buffer = buffer or Outgoing(layout.size_bytes)
    buffer.write(layout, KEY, tensors)
    message = empty_bytes(layout.size_bytes)
    message[:] = buffer.memory[: layout.size_bytes]
    return message


def received(message: Bytes) -> Gradients:
    return unpack(read_header(message, KEY, LIMIT, WHAT), message, None)


@given(st.lists(st.lists(some_tensor(), max_size=4).map(tuple), min_size=1, max_size=4))
def test_messages_of_any_layouts_in_one_buffer_come_back_as_they_were(messages: list[Gradients]) -> None:
    buffer = Outgoing(LIMIT)
    for tensors in (*messages, *messages[::-1]):
        found = received(sent(tensors, buffer))
        assert len(found) == len(tensors)
        for got, wanted in zip(found, tensors, strict=True):
            if wanted is None:
                assert got is None
                continue
            assert got is not None
            assert (got.dtype, got.shape, got.requires_grad) == (wanted.dtype, wanted.shape, wanted.requires_grad)
            assert got.is_leaf
            assert torch.equal(got.detach().double(), wanted.detach().double())


def test_a_tensor_that_is_changed_in_place_changes_no_other_of_its_message() -> None:
    first, second = received(sent((torch.ones(3), torch.ones(3))))
    assert first is not None
    assert second is not None
    version = second._version
    first.add_(1)
    assert second.tolist() == [1, 1, 1]
    assert second._version == version


def test_what_was_received_stays_when_the_next_message_is_written() -> None:
    buffer = Outgoing(LIMIT)
    (found,) = received(sent((torch.ones(3),), buffer))
    sent((torch.zeros(3),), buffer)
    assert found is not None
    assert found.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("at", "word", "problem"),
    [
        (0, 1, "the header names another message"),
        (16, 0, "the header names another message"),
        (24, 4, "the header names another message"),
        (32, 4, "the header names another message"),
        (8, LIMIT + 1, "the limits are 16"),
        (8, HEADER_BYTES - 1, "the limits are 16"),
        (8, HEADER_BYTES + 64, "the tensors of the header have"),
        (40, MAX_TENSORS + 1, "the limits are 16"),
        (40, -1, "the limits are 16"),
        (40, 1, "the tensors of the header have"),
        (ENTRY, 99, "tensor 0 of the header has no known dtype or shape"),
        (ENTRY, -1, "tensor 0 of the header has no known dtype or shape"),
        (ENTRY + 16, MAX_DIMS + 1, "tensor 0 of the header has no known dtype or shape"),
        (ENTRY + 16, -1, "tensor 0 of the header has no known dtype or shape"),
        (ENTRY + 24, -1, "tensor 0 of the header has no known dtype or shape"),
        (ENTRY + 24, 1 << 60, "the tensors of the header have"),
    ],
)
def test_a_damaged_header_is_refused_whatever_came_before_it(at: int, word: int, problem: str) -> None:
    message = sent((torch.ones(3), torch.ones(4)))
    received(message)
    struct.pack_into("=q", message.data, at, word)
    for _ in range(2):
        with pytest.raises(DataCorruption, match=f"{WHAT}: .*{problem}"):
            received(message)


def test_no_gradient_is_promised_to_integers() -> None:
    message = sent((torch.ones(3, dtype=torch.int64),))
    struct.pack_into("=q", message.data, ENTRY + 8, 1)
    with pytest.raises(DataCorruption, match=r"tensor 0 of the header is of torch.int64 and would get a gradient"):
        received(message)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ((torch.ones(1),) * (MAX_TENSORS + 1), "has 17 tensors; a stage passes on at most 16"),
        ((torch.ones((1,) * (MAX_DIMS + 1)),), "has a tensor of torch.float32, torch.strided, 7 dimensions"),
        ((torch.ones(2, dtype=torch.complex64),), "has a tensor of torch.complex64"),
        ((torch.eye(2).to_sparse(),), "torch.sparse_coo"),
        ((torch.ones(LIMIT),), f"more than max_message_bytes={LIMIT}"),
    ],
)
def test_tensors_that_no_message_can_hold_are_refused(tensors: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=f"{WHAT} .*{problem}"):
        layout_of(tensors, LIMIT, WHAT)
