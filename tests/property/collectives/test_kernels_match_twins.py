"""Native kernels equal their NumPy twins bit for bit: every type, count, offset and instruction set."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from fireflyer import native
from fireflyer.collectives import arrays, kernels

Bytes = npt.NDArray[np.uint8]
SIZES = arrays.DTYPES
REDUCTIONS = [
    (d, op) for d in kernels.DTYPES for op in kernels.OPS if d in kernels.INTEGERS or op not in kernels.BITWISE
]
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
    reduction=st.sampled_from(REDUCTIONS),
    n=st.integers(1, 12),
    count=st.integers(0, 300),
    offset=st.integers(0, 9),
    divisor=st.sampled_from([1, 2, 3, 7, 8, 1000, 2**31 + 1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_reductions_equal_the_twin(
    reduction: tuple[str, str], n: int, count: int, offset: int, divisor: int, seed: int
) -> None:
    dtype, op = reduction
    if op != "mean":
        divisor = 1
    inputs = make_inputs(seed, n, count * SIZES[dtype], offset)
    wide = count * SIZES[kernels.accum_dtype(dtype)]
    expected, expected_wide = bytearray(count * SIZES[dtype]), bytearray(wide)
    saturated = kernels.reduce(expected, inputs, dtype, op, divisor)
    kernels.reduce_to_accum(expected_wide, inputs, dtype, op)
    for isa in native.isa_names():
        out, acc, rounded = bytearray(len(expected)), bytearray(wide), bytearray(len(expected))
        with instruction_set(isa):
            counts = [native.reduce(out, inputs, dtype, op, divisor)]
            assert native.reduce_to_accum(acc, inputs, dtype, op) == 0
            counts.append(native.round_from_accum(rounded, acc, dtype, divisor))
        assert out == expected, isa
        assert acc == expected_wide, isa
        assert rounded == expected, isa
        assert counts == [saturated] * 2, isa


@given(
    reduction=st.sampled_from(REDUCTIONS),
    count=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
    at=st.sets(st.integers(0, 3), min_size=1),
)
def test_outputs_may_be_inputs(reduction: tuple[str, str], count: int, seed: int, at: set[int]) -> None:
    """Index 3 is an output that is no input."""
    dtype, op = reduction
    inputs = make_inputs(seed, 4, count * SIZES[dtype], 0)
    expected = bytearray(count * SIZES[dtype])
    saturated = kernels.reduce(expected, inputs[:3], dtype, op)
    for module, isa in [(kernels, native.active_isa()), *((native, isa) for isa in native.isa_names())]:
        copies = [item.copy() for item in inputs]
        with instruction_set(isa):
            assert module.reduce_many([copies[i] for i in at], copies[:3], dtype, op) == saturated
        for index, copy in enumerate(copies):
            assert copy.tobytes() == (bytes(expected) if index in at else inputs[index].tobytes()), isa


@given(
    count=st.integers(0, 700),
    block=st.integers(1, 200) | st.just(128),
    exponents=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    seed=st.integers(0, 2**32 - 1),
)
def test_fp8_blocks_equal_the_twin(count: int, block: int, exponents: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    exponent = rng.integers(min(exponents), max(exponents) + 1, count, dtype=np.uint32)
    bits = (exponent << 23) | rng.integers(0, 1 << 23, count, dtype=np.uint32) | (rng.integers(0, 2, count) << 31)
    values = bits.astype(np.uint32).view(np.float32)
    codes, scales = np.empty(count, np.uint8), np.empty(-(-count // block), np.float32)
    back = np.empty(count, np.float32)
    kernels.quantize_fp8_blocks(codes, scales, values, block)
    kernels.dequantize_fp8_blocks(back, codes, scales, block)
    for isa in native.isa_names():
        got_codes, got_scales, got_back = np.empty_like(codes), np.empty_like(scales), np.empty_like(back)
        with instruction_set(isa):
            native.quantize_fp8_blocks(got_codes, got_scales, values, block)
            native.dequantize_fp8_blocks(got_back, got_codes, got_scales, block)
        assert got_codes.tobytes() == codes.tobytes(), isa
        assert got_scales.tobytes() == scales.tobytes(), isa
        assert got_back.tobytes() == back.tobytes(), isa


@given(data=st.binary(max_size=2000), cut=st.integers(0, 2000), start=st.integers(0, 2**32 - 1))
def test_checksums_equal_the_twin_and_chain(data: bytes, cut: int, start: int) -> None:
    expected = kernels.crc32c(data, start)
    assert native.crc32c(data, start) == expected
    assert native.crc32c_portable(data, start) == expected
    assert native.crc32c(data[cut:], native.crc32c(data[:cut], start)) == expected
    copy, twin = bytearray(len(data)), bytearray(len(data))
    assert native.crc32c_copy(copy, data, start) == kernels.crc32c_copy(twin, data, start) == expected
    assert copy == twin == data


@given(size=st.integers(400, 40_000), offset=st.integers(0, 70), seed=st.integers(0, 2**32 - 1))
def test_fast_checksum_equals_the_table(size: int, offset: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size + offset, dtype=np.uint8)[offset:]
    expected = native.crc32c_portable(data)
    assert native.crc32c(data) == expected
    copy = np.zeros(size + 1, np.uint8)[1:]
    assert native.crc32c_copy(copy, data) == expected
    assert np.array_equal(copy, data)
