"""Listening on a free port of a range, beside other processes that look for one in the same range.

A port is *reserved* while somebody decides on it: the abstract Unix socket of its name is bound, which exists once in
each network namespace, as the port does, and ends with its process. Who listens at once needs the reservation only
meanwhile; MASTER_PORT, on which rank 0 listens a while after it was chosen, stays reserved as long as its node's
supervisor may use it. So neither another job nor another rank of the same job takes that port in between.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TypeVar

from fireflyer.base.errors import UsageError
from fireflyer.base.port_range import PortRange

__all__ = ["listen_in_range", "no_port_left", "reserve_port", "reserved_ports"]

_T = TypeVar("_T")
_NAME = "fireflyer-port-"
_SOCKETS_FILE = "/proc/net/unix"


def reserve_port(port: int) -> socket.socket | None:
    """The reservation, until it is closed; None where another process has it."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0{_NAME}{port}")
    except OSError as error:
        reservation.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return reservation


def reserved_ports() -> set[int]:
    """Those that processes on this machine have reserved now, without reserving one for a moment."""
    try:
        with open(_SOCKETS_FILE, encoding="utf-8", errors="replace") as file:
            names = [line.rsplit(None, 1)[-1] for line in file]
    except OSError:
        return set()
    shown = f"@{_NAME}"
    return {int(text) for name in names if name.startswith(shown) and (text := name[len(shown) :]).isdecimal()}


def listen_in_range(ports: PortRange | None, listen: Callable[[int], _T]) -> _T:
    """What `listen(port)` gives for the lowest port of the range that is free; without a range, for port 0. `listen`
    raises `OSError` with EADDRINUSE where the port is taken. Raises `UsageError` where all are."""
    if ports is None:
        return listen(0)
    for port in ports.ports:
        reservation = reserve_port(port)
        if reservation is None:
            continue
        with reservation:
            try:
                return listen(port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
    raise no_port_left(ports)


def no_port_left(ports: PortRange) -> UsageError:
    return UsageError(
        f"no port of {ports} (--port-range, FF_PORT_RANGE) is free: each rank needs one for each of its groups, and "
        "other jobs may use the range too; give a larger one"
    )
