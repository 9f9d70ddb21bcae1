"""Requests to the meta service, as the client numbers them and looks at them before they are sent.

Those that change something have numbers (`RequestNumbers`). A message is checked as a whole where it is read, and one
wrong request would fail all that are sent with it. So who is told that a message was bad finds by `refusal` which of
its requests it was, and sends the others again: nothing was done.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fireflyer.base.decoding import msgpack_decoder
from fireflyer.fs.schema.errors import FileError, file_error
from fireflyer.fs.schema.meta import MAX_NUMBERS, MAX_UNDER_WAY, MAX_VALUE_BYTES, Call, SetXattr

__all__ = ["RequestNumbers", "refusal"]

_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgpack_decoder(Call).decode


@dataclass(slots=True)
class RequestNumbers:
    """One more with each request, at most `MAX_UNDER_WAY` not answered, and the last one less than `MAX_NUMBERS` after
    the first that is not, so that one that takes long does not stop all others."""

    next: int = 1
    done_below: int = 1
    """All below have been answered."""
    _done: set[int] = field(default_factory=set)
    """From `done_below` on."""

    @property
    def free(self) -> bool:
        under_way = self.next - self.done_below - len(self._done)
        return under_way < MAX_UNDER_WAY and self.next < self.done_below + MAX_NUMBERS

    def take(self) -> int:
        """Call it only while `free`."""
        self.next += 1
        return self.next - 1

    def done(self, number: int) -> None:
        """Answered, or given up and never to be sent again."""
        if number >= self.done_below:
            self._done.add(number)
        while self.done_below in self._done:
            self._done.discard(self.done_below)
            self.done_below += 1


def refusal(call: Call) -> FileError | None:
    """What the service would say of a request that cannot be read there; None: it can be sent."""
    request = call.request
    if isinstance(request, SetXattr) and len(request.value) > MAX_VALUE_BYTES:
        return file_error(errno.E2BIG, f"an extended attribute has at most {MAX_VALUE_BYTES} bytes")
    try:
        _DECODE(_ENCODE(call))
    except (msgspec.ValidationError, OverflowError) as error:  # the latter of a number that the wire has no room for
        return file_error(errno.EINVAL, f"{type(request).__name__}: {error}")
    return None
