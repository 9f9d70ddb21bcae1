"""Wire formats of tokens: bytes, errors, and the formula of LogFMT."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.collectives.dispatching import travelled

from fireflyer import native
from fireflyer.base.errors import UsageError
from fireflyer.collectives import kernels
from fireflyer.collectives.compression import Compression
from fireflyer.collectives.tokens import TOKEN_CODECS, TileCodec, token_codec

Floats = npt.NDArray[np.float32]
TABLE = {"fp8": 0.0257, "fp8_ue8m0": 0.0266, "logfmt8": 0.0142, "logfmt10": 0.0035, "e5m6": 0.0041}
"""Error of tiles of Gaussian bf16 values, norm by norm. That of E5M6 is ours: half of the values are ties."""


def gaussian(rows: int = 64, width: int = 1024) -> Floats:
    return np.random.default_rng(5).standard_normal((rows, width)).astype(np.float32)


def rounded(values: Floats) -> Floats:
    """To bf16."""
    return np.asarray(kernels.decode(kernels.encode(values.reshape(-1), "bf16"), "bf16")).reshape(values.shape)


def error(found: npt.NDArray[Any], values: Floats) -> float:
    return float(np.linalg.norm(found - values) / np.linalg.norm(values))


def test_the_bytes_of_a_token_are_the_published_ones() -> None:
    sizes = {name: token_codec(name).row_bytes(7168) for name in TOKEN_CODECS}
    assert sizes == {
        "bf16": 14336,
        "f32": 28672,
        "f64": 57344,
        "fp8": 7392,
        "fp8_ue8m0": 7224,
        "e5m6": 10808,
        "logfmt8": 7616,
        "logfmt10": 9184,
    }


@pytest.mark.parametrize("codec", TABLE)
def test_the_relative_error_of_gaussian_tiles_is_that_of_the_table(codec: str) -> None:
    values = rounded(gaussian())
    assert error(travelled(values, codec), values) == pytest.approx(TABLE[codec], rel=0.05)


def test_bf16_alone_loses_the_17_hundredths_of_a_percent_of_the_table() -> None:
    values = gaussian()
    assert error(travelled(values, "bf16"), values) == pytest.approx(0.0017, rel=0.05)
    assert np.array_equal(travelled(rounded(values), "bf16"), rounded(values))


@pytest.mark.parametrize("codec", ["f32", "f64"])
def test_exact_formats_change_nothing(codec: str) -> None:
    values = gaussian()
    assert np.array_equal(travelled(values, codec), values)
    wide = values.astype(np.float64) / 3
    if codec == "f64":
        assert np.array_equal(travelled(wide, codec, "f8"), wide)


def test_fp8_has_the_codes_that_blocks_of_gradients_have_but_where_a_product_rounds_otherwise() -> None:
    values = rounded(gaussian(4, 256))
    codes, scales, decoded = np.empty(1024, np.uint8), np.empty(8, np.float32), np.empty(1024, np.float32)
    native.quantize_fp8_blocks(codes, scales, values)
    native.dequantize_fp8_blocks(decoded, codes, scales)
    assert np.mean(travelled(values, "fp8").reshape(-1) == decoded) > 0.99


@pytest.mark.parametrize("bits", [8, 10])
def test_a_logfmt_code_is_the_one_nearest_to_the_value_itself(bits: int) -> None:
    values = rounded(gaussian(8, 128))
    values[3, ::5] = 0  # does not count for the minimum
    found = travelled(values, f"logfmt{bits}")
    for row, decoded in zip(values.astype(np.float64), found, strict=True):
        logarithms = np.log2(np.abs(row[row != 0]))
        least, steps = logarithms.min(), 2 ** (bits - 1) - 2
        step = (logarithms.max() - least) / steps
        grid = np.concatenate([[0.0], 2 ** (least + np.arange(steps + 1) * step)])
        nearest = grid[np.abs(np.abs(row)[:, None] - grid).argmin(axis=1)] * np.sign(row)
        agree = np.isclose(decoded, nearest, rtol=1e-5, atol=0)
        # Values next to the middle of two codes: float32 may decide otherwise. A code for zero is never the nearest.
        assert agree.mean() > 0.99
        assert np.all(np.abs(decoded - nearest) <= np.abs(nearest) * (2**step - 1) * 1.01)


def test_zeros_do_not_spoil_a_logfmt_tile() -> None:
    values = gaussian(16, 128)
    with_zeros = values.copy()
    with_zeros[:, :5] = 0
    found = travelled(with_zeros, "logfmt8")
    assert np.all(found[:, :5] == 0)
    assert error(found[:, 5:], values[:, 5:]) < 0.017


def test_a_logfmt_tile_of_equal_magnitudes_is_exact() -> None:
    values = np.where(np.arange(128) % 3 == 0, -1.5, 1.5).astype(np.float32)[None]
    assert np.allclose(travelled(values, "logfmt8"), values, rtol=3e-6)


@pytest.mark.parametrize("codec", ["fp8", "fp8_ue8m0", "e5m6", "logfmt8", "logfmt10"])
class TestTiles:
    def test_a_width_that_is_no_multiple_of_a_tile_is_refused(self, codec: str) -> None:
        for width in (0, 100, 129):
            with pytest.raises(UsageError, match=rf"a row of {width} values is not made of tiles of 128; pad the rows"):
                token_codec(codec).row_bytes(width)

    def test_a_nan_or_an_infinity_makes_its_tile_nan_and_no_other(self, codec: str) -> None:
        values = gaussian(2, 256)
        values[0, 3], values[1, 200] = np.nan, -np.inf
        found = travelled(values, codec)
        expected = np.zeros((2, 256), bool)
        expected[0, :128] = expected[1, 128:] = True
        assert np.array_equal(np.isnan(found), expected)

    def test_zeros_stay_zeros(self, codec: str) -> None:
        assert not travelled(np.zeros((3, 128), np.float32), codec).any()

    def test_gradients_may_travel_in_it(self, codec: str) -> None:
        one = TileCodec(codec)
        Compression(one)
        payload, found = np.empty(one.payload_bytes(256), np.uint8), np.empty(256, np.float32)
        values = gaussian(1, 256)
        one.encode(values[0], payload)
        one.decode(payload, found)
        assert np.array_equal(found[None], travelled(values, codec))

    def test_all_types_of_values_decode_to_the_same(self, codec: str) -> None:
        values = gaussian(2, 128)
        single = travelled(values, codec)
        assert np.array_equal(travelled(values.astype(np.float64), codec, "f8"), single)
        small = kernels.encode(values.reshape(-1), "bf16").reshape(values.shape)
        assert np.array_equal(travelled(small, codec), single)
        expected = kernels.encode(single.astype(np.float32).reshape(-1), "bf16").reshape(values.shape)
        assert np.array_equal(travelled(small, codec, "u2"), expected)


def test_unknown_names_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match="token codec 'fp4' is not known; use one of bf16"):
        token_codec("fp4")
    with pytest.raises(UsageError, match=r"the payload of fp8 has shape \(2, 100\), not \(2, 132\)"):
        token_codec("fp8").encode_rows(np.zeros((2, 128), np.float32), np.zeros((2, 100), np.uint8))
    with pytest.raises(UsageError, match="not 2 dimensions of int32"):
        token_codec("bf16").encode_rows(np.zeros((2, 128), np.int32), np.zeros((2, 256), np.uint8))


def test_the_native_functions_refuse_buffers_that_do_not_fit() -> None:
    values, payload = np.zeros((2, 128), np.uint16), np.zeros((2, 132), np.uint8)
    for width, codec, message in (
        (100, "fp8", "not made of tiles"),
        (0, "fp8", "not made of tiles"),
        (384, "fp8", "values holds 256 elements, not rows of 384"),
        (128, "logfmt8", "payload holds 264 bytes, not the 272 of 2 rows"),
        (128, "fp9", "token format 'fp9' is not one of"),
    ):
        with pytest.raises(ValueError, match=message):
            native.encode_token_rows(payload, values, width, codec)
    with pytest.raises(ValueError, match="decoded as f32 or bf16, not as f16"):
        native.decode_token_rows(values, payload, 128, "fp8", "f16")
    with pytest.raises(ValueError, match="values overlaps payload"):
        native.encode_token_rows(values.view(np.uint8).reshape(-1)[:132], values[:1], 128, "fp8")
