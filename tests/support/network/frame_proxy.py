"""A proxy that alters frames between ranks, as a rank would send them whose memory or program is corrupted.

Both kinds of frames, between leaders of nodes and between two ranks, have a header of 64 bytes whose last four are a
CRC-32C of the others (`cpp/include/fireflyer/collectives/transport/wire.hpp`, `.../p2p/wire.hpp`). On each connection
they come behind the two handshake messages of that direction.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import Final, Literal, NamedTuple, TypeAlias

from tests.support.network.tcp_proxy import End, Proxy

from fireflyer.native import crc32c

__all__ = ["FIELDS", "Alteration", "FrameProxy"]

HEADER_BYTES: Final = 64
_SEALED: Final = 60
_HANDSHAKE_MESSAGES: Final = 2
Layout: TypeAlias = Literal["lane", "message"]
_LAYOUT_OF: Final[dict[bytes, Layout]] = {b"FFC1": "lane", b"FFX1": "message"}
FIELDS: Final[dict[Layout, dict[str, tuple[int, str]]]] = {
    "lane": {
        "magic": (0, "<I"), "version": (4, "<B"), "type": (5, "<B"), "dtype": (7, "<B"), "number": (8, "<Q"),
        "chunk": (16, "<Q"), "count": (24, "<Q"), "bytes": (32, "<I"), "operation": (36, "<I"),
        "payload checksum": (44, "<I"), "header checksum": (60, "<I"),
    },
    "message": {
        "magic": (0, "<I"), "version": (4, "<B"), "type": (5, "<B"), "dtype": (6, "<B"), "number": (8, "<Q"),
        "chunk": (32, "<Q"), "count": (24, "<Q"), "bytes": (48, "<I"), "operation": (40, "<I"),
        "payload checksum": (52, "<I"), "header checksum": (60, "<I"),
    },
}  # fmt: skip
"""Where a field lies, and how."""


class Alteration(NamedTuple):
    """`field` gets `value`, or its bits are flipped where that is None; the header's checksum is right again, unless it
    is what was altered. "noise": the rest of the connection is noise."""

    field: str
    value: int | None = None


class FrameProxy(Proxy):
    def __init__(self) -> None:
        super().__init__()
        self._alteration: tuple[Alteration, Container[int], End] | None = None
        self._streams: dict[tuple[int, End], _Stream] = {}

    def alter(self, alteration: Alteration, numbers: Container[int], towards: End) -> None:
        """The next frame to `towards` that has such a field, on each of these connections."""
        self._alteration = alteration, numbers, towards

    def _altered(self, number: int, towards: End, data: bytes) -> bytes:
        stream = self._streams.setdefault((number, towards), _Stream())
        wanted = self._alteration
        if wanted is not None and number in wanted[1] and towards == wanted[2]:
            return stream.take(data, wanted[0])
        return stream.take(data, None)


class _Stream:
    """One direction of one connection. Bytes are passed on when their header is whole."""

    def __init__(self) -> None:
        self._held = b""
        self._messages = _HANDSHAKE_MESSAGES
        self._payload = 0
        self._done = False
        self._noise = False

    def take(self, data: bytes, alteration: Alteration | None) -> bytes:
        self._held += data
        out = b""
        while piece := self._piece(alteration):
            out += piece
        return out

    def _piece(self, alteration: Alteration | None) -> bytes:
        if self._noise:
            held, self._held = self._held, b""
            return b"\xa5" * len(held)
        if self._payload:
            count = min(self._payload, len(self._held))
            self._payload -= count
            return self._pop(count)
        if self._messages:
            length = 2 + int.from_bytes(self._held[:2], "big")
            if len(self._held) < length:
                return b""
            self._messages -= 1
            return self._pop(length)
        if len(self._held) < HEADER_BYTES:
            return b""
        header = bytearray(self._pop(HEADER_BYTES))
        fields = FIELDS[_LAYOUT_OF[bytes(header[:4])]]
        (self._payload,) = struct.unpack_from("<I", header, fields["bytes"][0])
        if alteration is not None and not self._done:
            self._alter(header, fields, alteration)
        return bytes(header)

    def _alter(self, header: bytearray, fields: dict[str, tuple[int, str]], alteration: Alteration) -> None:
        if alteration.field == "noise":
            self._noise = self._done = True
            return
        if alteration.field == "payload checksum" and not self._payload:
            return
        at, form = fields[alteration.field]
        (now,) = struct.unpack_from(form, header, at)
        bits = (1 << 8 * struct.calcsize(form)) - 1
        struct.pack_into(form, header, at, now ^ bits if alteration.value is None else alteration.value & bits)
        if alteration.field != "header checksum":
            struct.pack_into("<I", header, _SEALED, crc32c(bytes(header[:_SEALED])))
        self._done = True

    def _pop(self, count: int) -> bytes:
        piece, self._held = self._held[:count], self._held[count:]
        return piece
