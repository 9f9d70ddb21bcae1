"""Wire formats of token rows in tiles: names, and bytes of a row. `fireflyer.collectives.tokens` has the codecs,
`fireflyer.codesign.parallel` counts the bytes."""

from __future__ import annotations

from typing import Final

__all__ = ["TILE", "TILE_BYTES", "token_row_bytes"]

TILE: Final = 128
"""Values that share a scale or a range."""
TILE_BYTES: Final = {"fp8": 128 + 4, "fp8_ue8m0": 128 + 1, "e5m6": 192 + 1, "logfmt8": 128 + 8, "logfmt10": 160 + 4}
"""Bytes of the codes of a tile and of its header, in the order of the codes in
cpp/include/fireflyer/collectives/kernels/tokens.hpp."""


def token_row_bytes(width: int, codec: str) -> int:
    """Bytes of the payload of a row of `width` values. Raises `ValueError` for an unknown format, and for a width that
    is no multiple of `TILE`.

    >>> token_row_bytes(7168, "fp8")
    7392
    """
    if codec not in TILE_BYTES:
        raise ValueError(f"token format '{codec}' is not one of {' '.join(TILE_BYTES)}")
    if width <= 0 or width % TILE:
        raise ValueError(f"a row of {width} values is not made of tiles of {TILE}")
    return width // TILE * TILE_BYTES[codec]
