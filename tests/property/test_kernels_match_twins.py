"""Native kernels equal their NumPy twins bit for bit: every type, count, offset and instruction set."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from fireflyer import native
from fireflyer.collectives import kernels

Bytes = npt.NDArray[np.uint8]
SIZES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1, "f8e5m2": 1, "i32": 4, "i64": 8}
# Byte patterns that make NaNs, infinities, zeros, subnormals, ties and the largest numbers likely in every type.
TELLING = [
    0x00,
    0x00,
    0x01,
    0x08,
    0x3C,
    0x3F,
    0x40,
    0x7B,
    0x7C,
    0x7E,
    0x7F,
    0x80,
    0x80,
    0xBF,
    0xC0,
    0xF0,
    0xFC,
    0xFF,
    0xFF,
]


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    before = native.active_isa()
    native.set_isa(name)
    try:
        yield
    finally:
        native.set_isa(before)


def make_inputs(seed: int, n: int, size: int, offset: int) -> list[Bytes]:
    """Half of the bytes random, half telling; each array starts `offset` bytes past an allocation."""
    rng = np.random.default_rng(seed)
    inputs = []
    for _ in range(n):
        raw = rng.integers(0, 256, size + offset, dtype=np.uint8)
        inputs.append(
            np.where(rng.random(raw.size) < 0.5, raw, rng.choice(np.array(TELLING, np.uint8), raw.size))[offset:]
        )
    return inputs


@given(
    dtype=st.sampled_from(kernels.DTYPES),
    n=st.integers(1, 12),
    count=st.integers(0, 300),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_equal_the_twin(dtype: str, n: int, count: int, offset: int, seed: int) -> None:
    inputs = make_inputs(seed, n, count * SIZES[dtype], offset)
    wide = count * SIZES[kernels.accum_dtype(dtype)]
    expected, expected_wide = bytearray(count * SIZES[dtype]), bytearray(wide)
    kernels.reduce(expected, inputs, dtype)
    kernels.reduce_to_accum(expected_wide, inputs, dtype)
    for isa in native.isa_names():
        out, acc, rounded = bytearray(len(expected)), bytearray(wide), bytearray(len(expected))
        with instruction_set(isa):
            native.reduce(out, inputs, dtype)
            native.reduce_to_accum(acc, inputs, dtype)
            native.round_from_accum(rounded, acc, dtype)
        assert out == expected, isa
        assert acc == expected_wide, isa
        assert rounded == expected, isa


@given(
    dtype=st.sampled_from(kernels.DTYPES),
    count=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
    at=st.integers(0, 2),
)
def test_the_output_may_be_an_input(dtype: str, count: int, seed: int, at: int) -> None:
    inputs = make_inputs(seed, 3, count * SIZES[dtype], 0)
    expected = bytearray(count * SIZES[dtype])
    kernels.reduce(expected, inputs, dtype)
    for isa in native.isa_names():
        copies = [item.copy() for item in inputs]
        with instruction_set(isa):
            native.reduce(copies[at], copies, dtype)
        assert copies[at].tobytes() == expected, isa
    copies = [item.copy() for item in inputs]
    kernels.reduce(copies[at], copies, dtype)
    assert copies[at].tobytes() == expected


@given(data=st.binary(max_size=2000), cut=st.integers(0, 2000), start=st.integers(0, 2**32 - 1))
def test_checksums_equal_the_twin_and_chain(data: bytes, cut: int, start: int) -> None:
    expected = kernels.crc32c(data, start)
    assert native.crc32c(data, start) == expected
    assert native.crc32c_portable(data, start) == expected
    assert native.crc32c(data[cut:], native.crc32c(data[:cut], start)) == expected


@given(size=st.integers(700, 40_000), offset=st.integers(0, 8), seed=st.integers(0, 2**32 - 1))
def test_fast_checksum_equals_the_table(size: int, offset: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size + offset, dtype=np.uint8)[offset:]
    assert native.crc32c(data) == native.crc32c_portable(data)
