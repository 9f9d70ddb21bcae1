"""Ports for processes that are told where to listen before they run.

Below the ports that the kernel gives to connections, and reserved for as long as this process lives, with the
reservation of `runtime.port_search`: neither another worker nor an outgoing connection takes one before it is used.
"""

from __future__ import annotations

import os
import socket
from typing import Final

from fireflyer.runtime.port_search import reserve_port

__all__ = ["free_port"]

_FIRST: Final = 20_000
_END: Final = 29_000
_STEP: Final = 997
"""No divisor of the number of ports: all of them are tried."""
_reserved: Final[list[socket.socket]] = []


def free_port(host: str = "127.0.0.1") -> int:
    at = os.getpid() * _STEP
    for _ in range(_END - _FIRST):
        at += _STEP
        port = _FIRST + at % (_END - _FIRST)
        reservation = reserve_port(port)
        if reservation is None:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                reservation.close()
                continue
        _reserved.append(reservation)
        return port
    raise AssertionError(f"no port of {_FIRST} to {_END} is free")
