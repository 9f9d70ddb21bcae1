"""A port on which another process will listen a little later: MASTER_PORT for rank 0, that of an agent or a manager.

Between finding a port free and its use it can be taken. It is reserved meanwhile (`port_search`), which other jobs
respect and strangers do not. Without a range of ports those from which the kernel serves outgoing connections and
`bind(0)` are avoided, which leaves programs that ask for this very number. Should one take MASTER_PORT, rank 0 fails,
the launcher finds the port held by a stranger, and the restart with another port is not counted (see `gang`).
"""

from __future__ import annotations

import asyncio
import errno
import random
import socket

from fireflyer.base.errors import FireflyerError, NotFound, UsageError
from fireflyer.base.port_range import PortRange
from fireflyer.base.units import SECOND
from fireflyer.runtime.address import parse_listen
from fireflyer.runtime.disk import translate_os_error
from fireflyer.runtime.port_search import no_port_left, reserve_port, reserved_ports

__all__ = [
    "check_port",
    "count_free_ports",
    "lasting_address",
    "port_is_free",
    "reserve_any_port",
    "reserve_free_port",
    "wait_for_port",
]

_LOWEST = 20000
_HIGHEST = 65535
_PROBES = 200
_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_RELEASE_NS = 5 * SECOND
"""A port given by the user may be held so long by what the kernel has yet to tear down."""


def port_is_free(port: int) -> bool:
    """Whether a server could listen on it on all interfaces. Raises `FireflyerError` where it may not be used."""
    for family, host in ((socket.AF_INET, ""), (socket.AF_INET6, "")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            if family == socket.AF_INET:
                raise translate_os_error(error, f"port {port}") from error
    return True


def count_free_ports(ports: PortRange, enough: int) -> int:
    """How many ports of the range a listener could have now; stops counting at `enough`."""
    found, reserved = 0, reserved_ports()
    for port in ports.ports:
        if found == enough:
            break
        try:
            found += port not in reserved and port_is_free(port)
        except FireflyerError:  # only a privileged program may use it
            continue
    return found


def check_port(port: int, *, here: bool = True) -> None:
    """Raises `UsageError` when the port that the user gave cannot be used; `here`: on this machine."""
    if not 0 <= port <= _HIGHEST:
        raise UsageError(f"--master-port {port} is out of range; choose one from 1 to 65535, or 0 for any free one")
    if here and port and not port_is_free(port):
        raise UsageError(
            f"--master-port {port} is taken by another process; choose another one, or leave it out for a free one"
        )


def reserve_any_port(rng: random.Random, advice: str) -> tuple[int, socket.socket]:
    """A port that is free now and that the kernel does not give away by itself, and its reservation, to be closed when
    it is not needed any more. Raises `NotFound` with `advice` where none of those tried is free."""
    first, last = _kernel_range()
    ports = [port for port in range(_LOWEST, _HIGHEST + 1) if not first <= port <= last]
    if len(ports) < _PROBES:
        ports = list(range(_LOWEST, _HIGHEST + 1))
    for port in rng.sample(ports, _PROBES):
        reservation = _reserve_if_free(port)
        if reservation is not None:
            return port, reservation
    raise NotFound(f"no port is free among {_PROBES} that were tried; {advice}")


def lasting_address(listen: str, rng: random.Random) -> tuple[str, socket.socket | None]:
    """Where a server listens that is to find its port free again after it was away: `listen`, with a port of
    `reserve_any_port` in the place of port 0, and the reservation, None where another process has it."""
    host, _, port = listen.rpartition(":")
    if port != "0":
        return listen, reserve_port(parse_listen(listen)[1])
    chosen, reservation = reserve_any_port(rng, "end programs on this machine that listen")
    return f"{host}:{chosen}", reservation


def reserve_free_port(ports: PortRange) -> tuple[int, socket.socket]:
    """The highest port of the range that is free, and its reservation, to be closed when it is not needed any more:
    other listeners take the lowest ones. Raises `UsageError` where none is free, and as `port_is_free` does."""
    for port in reversed(ports.ports):
        reservation = _reserve_if_free(port)
        if reservation is not None:
            return port, reservation
    raise no_port_left(ports)


def _reserve_if_free(port: int) -> socket.socket | None:
    reservation = reserve_port(port)
    if reservation is None:
        return None
    try:
        free = port_is_free(port)
    except BaseException:
        reservation.close()
        raise
    if free:
        return reservation
    reservation.close()
    return None


async def wait_for_port(port: int) -> bool:
    """Whether a port that the user gave becomes free in a short time."""
    deadline_s = asyncio.get_running_loop().time() + _RELEASE_NS / SECOND
    while not port_is_free(port):
        if asyncio.get_running_loop().time() > deadline_s:
            return False
        await asyncio.sleep(0.05)
    return True


def _kernel_range() -> tuple[int, int]:
    try:
        with open(_RANGE_FILE, encoding="ascii") as file:
            first, last = file.read().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32768, 60999
