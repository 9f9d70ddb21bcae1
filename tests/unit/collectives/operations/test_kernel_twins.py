"""The NumPy kernels round and read small floats as PyTorch casts do, over all bit patterns."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fireflyer import native
from fireflyer.collectives import kernels

SMALL: dict[str, tuple[torch.dtype, Any]] = {
    "f16": (torch.float16, np.uint16),
    "bf16": (torch.bfloat16, np.uint16),
    "f8e4m3": (torch.float8_e4m3fn, np.uint8),
    "f8e5m2": (torch.float8_e5m2, np.uint8),
}
Round = Callable[[Any, Any, str], None]


def float32_samples() -> npt.NDArray[np.float32]:
    """All upper halves (each bf16), each with lower halves around the ties of every small type."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return (upper | lower).reshape(-1).view(np.float32)


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize(
    "round_from_accum", [kernels.round_from_accum, native.round_from_accum], ids=["twin", "native"]
)
def test_rounding_is_that_of_torch(dtype: str, round_from_accum: Round) -> None:
    torch_dtype, storage = SMALL[dtype]
    values = float32_samples()
    expected = torch.from_numpy(values).to(torch_dtype)
    got = np.empty(values.size, storage)
    round_from_accum(got, values, dtype)
    number = ~np.isnan(values)
    assert np.array_equal(got[number], expected.view(getattr(torch, np.dtype(storage).name)).numpy()[number])
    assert set(got[~number].tolist()) == {{"f16": 0x7E00, "bf16": 0x7FC0}.get(dtype, 0x7F)}


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("widen", [kernels.reduce_to_accum, native.reduce_to_accum], ids=["twin", "native"])
def test_reading_is_that_of_torch(dtype: str, widen: Callable[[Any, Any, str], None]) -> None:
    torch_dtype, storage = SMALL[dtype]
    stored = np.arange(np.iinfo(storage).max + 1, dtype=storage)
    expected = torch.from_numpy(stored).view(torch_dtype).float().numpy()
    got = np.empty(stored.size, np.float32)
    widen(got, [stored], dtype)
    number = ~np.isnan(expected)
    assert np.array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))
    assert set(got[~number].view(np.uint32).tolist()) == {0x7FC00000}


def test_overflow_saturates_or_becomes_infinite() -> None:
    values = np.array([448, 464, 500, 1e6, np.inf, -np.inf], np.float32)
    out = np.empty(values.size, np.uint8)
    native.round_from_accum(out, values, "f8e4m3")
    assert out.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE]
    values = np.array([57344, np.nextafter(np.float32(61440), np.float32(0)), 61440, -1e6, np.inf], np.float32)
    out = np.empty(values.size, np.uint8)
    native.round_from_accum(out, values, "f8e5m2")
    assert out.tolist() == [0x7B, 0x7B, 0x7C, 0xFC, 0x7C]


@pytest.mark.parametrize("module", [kernels, native], ids=["twin", "native"])
def test_refuses_what_does_not_fit(module: Any) -> None:
    four, three = np.zeros(4, np.float32), np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"inputs\[1\] holds 3 elements, not the 4"):
        module.reduce(four, [four, three], "f32")
    with pytest.raises(ValueError, match="must not be empty"):
        module.reduce(four, [], "f32")
    with pytest.raises(ValueError, match="'f128' is not one of"):
        module.reduce(four, [four], "f128")
    with pytest.raises(ValueError, match="not a multiple of the 4"):
        module.reduce(bytearray(5), [bytes(5)], "f32")
    with pytest.raises(ValueError, match="writable"):
        module.reduce(bytes(4), [bytes(4)], "f32")
    with pytest.raises(ValueError, match="contiguous"):
        module.reduce(four[::2], [four[:2]], "f32")
    with pytest.raises(ValueError, match="holds 3 elements"):
        module.round_from_accum(np.zeros(4, np.uint16), three, "bf16")
    with pytest.raises(ValueError, match="'xor' is not one of"):
        module.reduce(four, [four], "f32", "xor")
    with pytest.raises(ValueError, match="cannot be divided by 0"):
        module.round_from_accum(four, four, "f32", 0)
    with pytest.raises(ValueError, match="outs must not be empty"):
        module.reduce_many([], [four], "f32")
    with pytest.raises(ValueError, match=r"outs\[1\] holds 3 elements, not the 4"):
        module.reduce_many([four, three], [four], "f32")
    with pytest.raises(ValueError, match="out holds 12 bytes, not the 16"):
        module.crc32c_copy(three, four)
    with pytest.raises(ValueError, match="at least one element"):
        module.quantize_fp8_blocks(bytearray(4), np.zeros(1, np.float32), four, 0)
    with pytest.raises(ValueError, match="codes holds 5"):
        module.quantize_fp8_blocks(bytearray(5), np.zeros(1, np.float32), four)
    with pytest.raises(ValueError, match="scales holds"):
        module.dequantize_fp8_blocks(four, bytearray(4), np.zeros(1, np.float32), 3)
    with pytest.raises(TypeError):
        module.reduce(four, [None], "f32")
    with pytest.raises(TypeError):
        module.crc32c(5)


def test_fp8_blocks_keep_what_is_small_beside_what_is_large() -> None:
    """Relative error of each element within e4m3's half step, whatever the size of its block's numbers."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal(1000).astype(np.float32) * np.repeat(np.array([1e-30, 1e-6, 1, 1e30], np.float32), 250)
    codes, scales, back = np.empty(1000, np.uint8), np.empty(20, np.float32), np.empty(1000, np.float32)
    native.quantize_fp8_blocks(codes, scales, values, 50)
    native.dequantize_fp8_blocks(back, codes, scales, 50)
    amax = np.repeat(np.abs(values.reshape(20, 50)).max(axis=1), 50)
    assert np.all(np.abs(back - values) <= np.maximum(np.abs(values) / 16, amax / 448 / 1024) * 1.0001)
    values[3] = np.inf
    native.quantize_fp8_blocks(codes, scales, values, 50)
    native.dequantize_fp8_blocks(back, codes, scales, 50)
    assert np.isnan(back[:50]).all()
    assert np.isfinite(back[50:]).all()


def test_native_refuses_partial_overlap_and_unknown_isa() -> None:
    data = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="overlaps another output"):
        native.reduce_many([data[:4], data[1:5]], [np.zeros(4, np.float32)], "f32")
    with pytest.raises(ValueError, match="overlap"):
        native.quantize_fp8_blocks(data.view(np.uint8)[:8], np.zeros(1, np.float32), data)
    with pytest.raises(ValueError, match="overlaps"):
        native.crc32c_copy(data[1:5], data[:4])
    with pytest.raises(ValueError, match="overlaps"):
        native.reduce(data[1:5], [data[:4]], "f32")
    with pytest.raises(ValueError, match="cannot run"):
        native.set_isa("mmx")
    assert native.active_isa() in native.isa_names()
    assert native.isa_names()[-1] == "portable"


@pytest.mark.parametrize("crc32c", [kernels.crc32c, native.crc32c, native.crc32c_portable])
def test_crc32c_known_answers(crc32c: Callable[..., int]) -> None:
    """RFC 3720, appendix B.4, and the check value of the catalogue of parametrised CRCs."""
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
