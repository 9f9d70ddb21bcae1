"""The native kernels of rows give what their NumPy twins give, bit for bit, on every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.collectives.test_kernels_match_twins import instruction_set

from fireflyer import native
from fireflyer.collectives.dispatch import row_twins, rows
from fireflyer.collectives.tokens import TOKEN_CODECS, token_codec

Array = npt.NDArray[Any]
WIDTH = 128
TYPES = (np.dtype(np.uint16), np.dtype(np.float32), np.dtype(np.float64))
WIDE = TYPES[1:]

codecs = st.sampled_from([token_codec(name) for name in TOKEN_CODECS])
seeds = st.integers(0, 2**32 - 1)


def values_of_every_kind(rng: np.random.Generator, count: int, dtype: np.dtype[Any]) -> Array:
    """Of many magnitudes; some zeros, infinities and NaNs."""
    wide = rng.standard_normal((count, WIDTH)) * np.exp2(rng.integers(-30, 30, (count, 1)))
    for special, share in ((0.0, 0.05), (-0.0, 0.05), (np.inf, 0.005), (-np.inf, 0.005), (np.nan, 0.005)):
        wide[rng.random(wide.shape) < share] = special
    if dtype == np.uint16:
        return (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return wide.astype(dtype)


def payloads_of(rng: np.random.Generator, sizes: list[int], codec: Any) -> list[Array]:
    made = []
    for size in sizes:
        payload = np.empty((size, codec.row_bytes(WIDTH)), np.uint8)
        codec.encode_rows(values_of_every_kind(rng, size, TYPES[1]), payload)
        made.append(payload)
    return made


def bits(array: Array) -> list[int]:
    whole: list[int] = array.reshape(-1).view(np.uint8).tolist()
    return whole


@given(codec=codecs, dtype=st.sampled_from(TYPES), seed=seeds)
def test_rows_are_encoded_as_the_twin_says(codec: Any, dtype: np.dtype[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, index = values_of_every_kind(rng, 5, dtype), rng.integers(0, 5, rng.integers(0, 9))
    found, expected = (np.empty((index.size, codec.row_bytes(WIDTH)), np.uint8) for _ in range(2))
    row_twins.encode_rows(expected, values, index, codec)
    for isa in native.isa_names():
        with instruction_set(isa):
            rows.encode_rows(found, values, index, codec)
            assert bits(found) == bits(expected), isa


@given(codec=codecs, dtype=st.sampled_from(TYPES), seed=seeds)
def test_rows_are_decoded_and_repeated_as_the_twin_says(codec: Any, dtype: np.dtype[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    payloads, index = payloads_of(rng, [2, 0, 3], codec), rng.integers(0, 5, rng.integers(0, 9))
    found, expected = (np.empty((index.size, WIDTH), dtype) for _ in range(2))
    row_twins.decode_rows(expected, payloads, index, codec)
    for isa in native.isa_names():
        with instruction_set(isa):
            rows.decode_rows(found, payloads, index, codec)
            assert bits(found) == bits(expected), isa


@given(codec=codecs, to=codecs, dtype=st.sampled_from(WIDE), seed=seeds)
def test_sums_are_those_of_the_twin(codec: Any, to: Any, dtype: np.dtype[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    payloads, counts = payloads_of(rng, [3, 4], codec), rng.integers(0, 5, 4)
    index, first = rng.integers(0, 7, counts.sum()), np.concatenate([[0], np.cumsum(counts)])
    found, expected = (np.empty((4, to.row_bytes(WIDTH)), np.uint8) for _ in range(2))
    with np.errstate(all="ignore"):
        row_twins.sum_rows(expected, payloads, index, first, (codec, to), WIDTH, dtype)
    for isa in native.isa_names():
        with instruction_set(isa):
            rows.sum_rows(found, payloads, index, first, (codec, to), WIDTH, dtype)
            assert bits(found) == bits(expected), isa


def test_a_sum_runs_from_left_to_right() -> None:
    """In another order it would be 0, or 2^-24."""
    payloads = [np.full((1, 4), value, np.float32).view(np.uint8) for value in (1.0, 2.0**-24, 2.0**-24, -1.0)]
    codec = token_codec("f32")
    for order, expected in (([0, 1, 2, 3], 0.0), ([1, 2, 0, 3], 2.0**-23)):
        found = np.empty((1, 4), np.float32)
        index, first = np.array(order), np.array([0, 4])
        rows.sum_rows(found.view(np.uint8), payloads, index, first, (codec, codec), 4, np.dtype(np.float32))
        assert found.tolist() == [[expected] * 4]


@pytest.mark.parametrize(
    ("index", "first", "said"),
    [
        ([0, 2], [0, 2], "index names row 2 of 2"),
        ([0, -1], [0, 2], "index names row -1 of 2"),
        ([0, 1], [0, 1], "first must go from 0 to the end of index"),
        ([0, 1], [1, 2], "first must go from 0 to the end of index"),
        ([0, 1], [0, 2, 1, 2], "first must not descend"),
        ([0, 1], [0, 1, 2], "out holds 16 bytes, not the 32 of 2 rows"),
    ],
)
def test_numbers_of_rows_that_are_not_there_are_refused(index: list[int], first: list[int], said: str) -> None:
    payload, out = np.zeros((2, 16), np.uint8), np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match=said):
        native.sum_rows(out, [payload], np.array(index), np.array(first), 4, "f32", "f32", "f32")


def test_a_result_that_overlaps_a_row_is_refused() -> None:
    payload = np.zeros((2, 16), np.uint8)
    with pytest.raises(ValueError, match="out overlaps rows"):
        native.gather_rows(payload[1:], [payload], np.array([0]), 16)


@pytest.mark.parametrize("width", [(1 << 62) + 1, (1 << 63) + 1, (1 << 64) - 1])
@pytest.mark.parametrize("codec", ["f32", "bf16", "fp8"])
def test_widths_whose_bytes_overflow_are_refused(width: int, codec: str) -> None:
    """(2^62 + 1) values of 4 bytes would count as 4 bytes."""
    payload, out, index = np.zeros(4, np.uint8), np.zeros(4, np.uint8), np.array([0])
    with pytest.raises(ValueError, match=f"width is {width}; allowed: up to"):
        native.encode_rows(out, [payload], index, width, codec, "f32")
    with pytest.raises(ValueError, match=f"width is {width}; allowed: up to"):
        native.decode_rows(out, [payload], index, width, codec, "f32")
    with pytest.raises(ValueError, match=f"width is {width}; allowed: up to"):
        native.sum_rows(out, [payload], index, np.array([0, 1]), width, codec, codec, "f32")


def test_a_result_that_overlaps_the_numbers_of_rows_does_not_change_them() -> None:
    """Each row lies over the number of the next one. Bytes of float64 are those of small whole numbers."""
    payload = np.arange(4).view(np.uint8)

    def numbers_and_result(numbers: list[int], rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        memory = np.array([*numbers, 0])
        return memory[:-1], memory[1 : rows + 1].view(np.uint8)

    index, out = numbers_and_result([3, 0, 2], rows=3)
    native.gather_rows(out, [payload], index, 8)
    assert out.view(np.int64).tolist() == [3, 0, 2]

    index, out = numbers_and_result([3, 0, 2], rows=3)
    native.decode_rows(out, [payload], index, 1, "f64", "f64")
    assert out.view(np.int64).tolist() == [3, 0, 2]

    first, out = numbers_and_result([0, 1, 3], rows=2)
    native.sum_rows(out, [payload], np.array([2, 1, 3]), first, 1, "f64", "f64", "f64")
    assert out.view(np.int64).tolist() == [2, 1 + 3]
