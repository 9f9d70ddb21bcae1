"""What a decoder raises for bytes that are not what they should be, and JSON that another rank has published."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from fireflyer.base.errors import UsageError

__all__ = ["DECODE_ERRORS", "decode_published"]

_T = TypeVar("_T")

DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""Of `decode` of msgspec, for any bytes and any type. `RecursionError`: arrays nested a thousand deep, which fit into
one kilobyte. `UnicodeDecodeError`: text that is not UTF-8. `OverflowError`: a date or number out of range."""


def decode_published(data: bytes, kind: type[_T], publisher: str) -> _T:
    """The JSON that `publisher` ("rank 3") has put into the rendezvous store, or has sent. Raises `UsageError`, which
    names it, for bytes that are something else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except DECODE_ERRORS as error:
        raise UsageError(
            f"{publisher} published data that cannot be decoded ({error}); do all ranks run the same version?"
        ) from None
