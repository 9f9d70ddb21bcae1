"""What a decoder raises for bytes that are not what they should be."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["DECODE_ERRORS"]

DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""Of `decode` of msgspec, for any bytes and any type. `RecursionError`: arrays nested a thousand deep, which fit into
one kilobyte. `UnicodeDecodeError`: text that is not UTF-8. `OverflowError`: a date or number out of range."""
