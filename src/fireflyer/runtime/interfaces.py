"""The addresses of this machine's network interfaces, from the kernel: rtnetlink(7), RTM_GETADDR."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Final

from fireflyer.base.os_errors import translate_os_error

__all__ = ["own_addresses"]

_GET_ADDRESSES: Final = 22
_NEW_ADDRESS: Final = 20
_ERROR: Final = 2
_DONE: Final = 3
_REQUEST_DUMP: Final = 0x301
_TENTATIVE: Final = 0x40
"""IPv6 that is being checked for duplicates, or was found to be one: not usable."""
_DUPLICATE: Final = 0x08
_ADDRESS, _LOCAL, _FLAGS = 1, 2, 8
"""Attributes. Of a point-to-point interface the first is that of the other end."""
_HEAD: Final = struct.Struct("=IHHII")
_BODY: Final = struct.Struct("=BBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")
_MAX_ANSWER_BYTES: Final = 1 << 16


def own_addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 or IPv6 address), loopback included, in the kernel's order. Raises `FireflyerError`."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as kernel:
            body = _BODY.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
            kernel.sendto(_HEAD.pack(_HEAD.size + len(body), _GET_ADDRESSES, _REQUEST_DUMP, 1, 0) + body, (0, 0))
            found: list[tuple[str, str]] = []
            while True:
                for kind, message in _messages(kernel.recv(_MAX_ANSWER_BYTES)):
                    if kind in (_DONE, _ERROR):
                        return found
                    if kind == _NEW_ADDRESS:
                        found += _read(message)
    except OSError as error:
        raise translate_os_error(error, "ask the kernel for network addresses") from error


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEAD.size:
        length, kind, _, _, _ = _HEAD.unpack_from(data)
        if not _HEAD.size <= length <= len(data):
            return
        yield kind, data[_HEAD.size : length]
        data = data[_aligned(length) :]


def _read(message: bytes) -> Iterator[tuple[str, str]]:
    _, _, flags, _, index = _BODY.unpack_from(message)
    attributes: dict[int, bytes] = {}
    rest = message[_BODY.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if not _ATTRIBUTE.size <= length <= len(rest):
            break
        attributes[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[_aligned(length) :]
    if _FLAGS in attributes:
        (flags,) = struct.unpack("=I", attributes[_FLAGS])
    packed = attributes.get(_LOCAL, attributes.get(_ADDRESS, b""))
    if len(packed) in (4, 16) and not flags & (_TENTATIVE | _DUPLICATE):
        try:
            yield socket.if_indextoname(index), str(ipaddress.ip_address(packed))
        except OSError:
            return  # the interface is gone since


def _aligned(length: int) -> int:
    return (length + 3) & ~3
