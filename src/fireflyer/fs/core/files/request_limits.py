"""Requests that no service would even read: what their errno is, told by the client itself.

A message is checked as a whole where it is read, and one wrong request would fail all that are sent with it. So who is
told that a message was bad looks here which of its requests it was, and sends the others again: nothing was done.
"""

from __future__ import annotations

import errno
from typing import Final

import msgspec

from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.meta import MAX_VALUE_BYTES, Call, SetXattr

__all__ = ["refusal"]

_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgspec.msgpack.Decoder(Call).decode


def refusal(call: Call) -> FileError | None:
    """None: it can be sent."""
    request = call.request
    if isinstance(request, SetXattr) and len(request.value) > MAX_VALUE_BYTES:
        return file_error(errno.E2BIG, f"an extended attribute has at most {MAX_VALUE_BYTES} bytes")
    try:
        _DECODE(_ENCODE(call))
    except (msgspec.ValidationError, OverflowError) as error:  # the latter of a number that the wire has no room for
        return file_error(errno.EINVAL, f"{type(request).__name__}: {error}")
    return None
