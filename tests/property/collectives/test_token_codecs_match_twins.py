"""The native codecs of tokens equal their NumPy twins bit for bit, on every instruction set."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.collectives.test_kernels_match_twins import instruction_set

from fireflyer import native
from fireflyer.base.token_formats import TILE, TILE_BYTES, token_row_bytes
from fireflyer.collectives.tokens import twins

Words = npt.NDArray[np.uint16]
NON_FINITE = 0x7F80
"""Magnitudes from here on are infinity and NaNs."""


def tiles_of_every_kind(seed: int, tiles: int) -> Words:
    """Magnitudes of one of many ranges in each tile, and in some of them zeros, subnormals, infinities or NaNs."""
    rng = np.random.default_rng(seed)
    low = rng.integers(0, NON_FINITE, (tiles, 1))
    high = rng.integers(low, NON_FINITE, (tiles, 1)) + 1
    values = rng.integers(low, high, (tiles, TILE)) | (rng.integers(0, 2, (tiles, TILE)) << 15)
    for special, share in (
        (0, 0.3),
        (0x8000, 0.1),
        (1, 0.2),
        (0x807F, 0.1),
        (0x0080, 0.1),
        (0x7F80, 0.05),
        (0x7FC1, 0.05),
    ):
        chosen = rng.random((tiles, 1)) < share
        values[chosen & (rng.random(values.shape) < 0.1)] = special
    return values.astype(np.uint16)


def instruction_sets() -> Iterator[str]:
    for isa in native.isa_names():
        with instruction_set(isa):
            yield isa


def assert_equal_to_the_twin(values: Words, codec: str) -> None:
    width = values.shape[1]
    expected = np.empty((len(values), token_row_bytes(width, codec)), np.uint8)
    twins.encode_token_rows(expected, values, width, codec)
    for isa in instruction_sets():
        payload = np.empty_like(expected)
        native.encode_token_rows(payload, values, width, codec)
        assert np.array_equal(payload, expected), isa
    assert_decodes_as_the_twin(expected, width, codec)


def assert_decodes_as_the_twin(payload: npt.NDArray[np.uint8], width: int, codec: str) -> None:
    for dtype, kind in (("f32", np.uint32), ("bf16", np.uint16)):
        expected = np.empty((len(payload), width), kind)
        twins.decode_token_rows(expected, payload, width, codec, dtype)
        for isa in instruction_sets():
            decoded = np.empty_like(expected)
            native.decode_token_rows(decoded, payload, width, codec, dtype)
            assert np.array_equal(decoded, expected), (isa, dtype)


@pytest.mark.parametrize("codec", TILE_BYTES)
def test_every_bf16_pattern_is_coded_as_the_twin_says(codec: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    assert_equal_to_the_twin(patterns.reshape(-1, TILE), codec)
    # ... each beside a one, and among its equals
    some = patterns[::7]
    pairs = np.full((some.size, TILE), 0x3F80, np.uint16)
    pairs[:, ::2] = some[:, None]
    assert_equal_to_the_twin(pairs, codec)


@given(
    codec=st.sampled_from(list(TILE_BYTES)),
    rows=st.integers(0, 9),
    tiles=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_tiles_of_every_kind_are_coded_as_the_twin_says(codec: str, rows: int, tiles: int, seed: int) -> None:
    assert_equal_to_the_twin(tiles_of_every_kind(seed, rows * tiles).reshape(rows, tiles * TILE), codec)


@given(codec=st.sampled_from(list(TILE_BYTES)), tiles=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_bytes_that_no_encoder_wrote_are_decoded_as_the_twin_says(codec: str, tiles: int, seed: int) -> None:
    width = tiles * TILE
    rng = np.random.default_rng(seed)
    payload = rng.integers(0, 256, (4, token_row_bytes(width, codec)), dtype=np.uint8)
    payload[1][rng.random(payload.shape[1]) < 0.7] = rng.choice([0, 0x7F, 0x80, 0xFF])
    assert_decodes_as_the_twin(payload, width, codec)
