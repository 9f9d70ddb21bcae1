"""Network addresses as people write them and as sockets want them."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from fireflyer.base.errors import UsageError

__all__ = ["Address", "is_loopback", "own_address_towards", "parse_listen"]


class Address(NamedTuple):
    """A host name or IP address and a TCP port; `str()` gives `host:port`, `[host]:port` for IPv6."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in `"host:port"` or `"[ipv6]:port"`. Raises `UsageError`."""
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            colon = ""
        if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536:
            raise UsageError(f"address {text!r} is not understood; write it like 10.0.0.1:7000 or [fd00::1]:7000")
        return cls(host, int(port))


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port to listen at, as `Address.parse`; port 0 is allowed: any free one."""
    host, _, port = text.rpartition(":")
    return (Address.parse(f"{host}:1").host, 0) if port == "0" else Address.parse(text)


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine: an address of the loopback interface, or `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def own_address_towards(host: str, port: int) -> str:
    """The address of this machine from which packets to that one leave. Sends nothing. Raises `OSError`."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
