"""Frames on an authenticated byte stream, without IO.

A frame is a four-byte big-endian payload length, the payload, and a tag: the first 16 bytes of an HMAC-SHA256 over the
frame's number in its direction (64 bits, from 0), the length and the payload. Each direction has a key of its own,
derived from the session key of the handshake. An attacker on the path can therefore not alter, inject, repeat, drop,
reorder or reflect a frame without the receiver noticing; they can read frames (use a tunnel where that matters) and
they can break the connection. The length is checked against the limit before anything is allocated.
"""

from __future__ import annotations

import hmac
from typing import Final

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.units import MIB

__all__ = ["DEFAULT_MAX_FRAME_BYTES", "HEADER_BYTES", "TAG_BYTES", "FrameOpener", "FrameSealer", "frame_keys"]

HEADER_BYTES: Final = 4
TAG_BYTES: Final = 16
DEFAULT_MAX_FRAME_BYTES: Final = 16 * MIB


def frame_keys(session_key: bytes) -> tuple[bytes, bytes]:
    """The keys for client to server and for server to client."""
    return (
        hmac.digest(session_key, b"frames client to server", "sha256"),
        hmac.digest(session_key, b"frames server to client", "sha256"),
    )


class _Tagger:
    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._number = 0

    def next_tag(self, header: bytes, payload: bytes | memoryview) -> bytes:
        tag = self._keyed.copy()
        tag.update(self._number.to_bytes(8, "big") + header)
        tag.update(payload)
        self._number += 1
        return tag.digest()[:TAG_BYTES]


class FrameSealer:
    """The sending end of one direction."""

    def __init__(self, key: bytes, max_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._tagger = _Tagger(key)
        self._max_bytes = max_bytes

    def seal(self, payload: bytes) -> tuple[bytes, bytes, bytes]:
        """Header, payload and tag, to be sent in this order before any later frame. Raises `UsageError` when the
        payload is too long; the stream stays usable."""
        if len(payload) > self._max_bytes:
            raise UsageError(
                f"a message of {len(payload)} bytes is longer than the limit of {self._max_bytes}; send it in parts"
            )
        header = len(payload).to_bytes(HEADER_BYTES, "big")
        return header, payload, self._tagger.next_tag(header, payload)


class FrameOpener:
    """The receiving end of one direction. After `DataCorruption` the stream must be closed."""

    def __init__(self, key: bytes, max_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._tagger = _Tagger(key)
        self._max_bytes = max_bytes

    def body_bytes(self, header: bytes) -> int:
        """How many bytes follow the header (payload and tag). Raises `DataCorruption` when over the limit."""
        length = int.from_bytes(header, "big")
        if len(header) != HEADER_BYTES or length > self._max_bytes:
            raise DataCorruption(f"the peer announced a frame of {length} bytes, the limit is {self._max_bytes}")
        return length + TAG_BYTES

    def open(self, header: bytes, body: bytes) -> memoryview:
        """The payload of a frame. Raises `DataCorruption` when its tag is not the one that is due."""
        view = memoryview(body)
        payload, tag = view[:-TAG_BYTES], view[-TAG_BYTES:]
        if not hmac.compare_digest(self._tagger.next_tag(header, payload), tag):
            raise DataCorruption("a frame with a wrong MAC: it was altered, repeated or lost on the way")
        return payload
