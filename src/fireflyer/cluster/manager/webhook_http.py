"""One POST to a URL that a user chose: to public addresses alone, and to those that the operator lists.

The name is resolved here, every address that it has is checked, and the connection goes to one of those that were
checked: a name that resolves to something else a moment later gains nothing. No redirect is followed, no proxy is used,
nothing of the answer is kept but its status, and it all ends after `LIMIT_S`.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import h11

from fireflyer.base.errors import FireflyerError, Unreachable, UsageError
from fireflyer.cluster.schema.webhooks import MAX_URL_CHARS

__all__ = ["LIMIT_S", "Networks", "Target", "check_address", "parse_target", "post_to"]

LIMIT_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 64 << 10
_READ_BYTES: Final = 16 << 10
_SCHEMES: Final = {"http": 80, "https": 443}
_NAMES: Final = ThreadPoolExecutor(32, "webhook names")
"""Of their own: a name server that does not answer holds a thread for longer than `LIMIT_S`, and whoever names it would
take all those that the manager has for its other work."""
_TRANSLATED: Final = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48")))
"""NAT64: an address of IPv4 is inside."""
_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Networks = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]


class Target(NamedTuple):
    secure: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _SCHEMES["https" if self.secure else "http"] else f"{host}:{self.port}"


def parse_target(url: str, networks: Networks) -> Target:
    """Raises `UsageError`, also for an address that is not allowed."""
    shown = url[:200]
    if len(url) > MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"the URL {shown!r} must be printable ASCII of at most {MAX_URL_CHARS} characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise UsageError(f"{shown!r} is no URL; write it as https://hooks.example.com/path") from None
    if parts.scheme not in _SCHEMES or not host or port == 0:
        raise UsageError(f"{shown!r} is no URL of HTTP; write it as https://hooks.example.com/path")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise UsageError("the URL of a webhook has no user, password or fragment; put a secret into its path")
    secure = parts.scheme == "https"
    if not secure and not networks:
        raise UsageError(
            f"webhooks are sent over HTTPS, so not to {shown}; operators may list networks where HTTP is used"
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    target = Target(secure, host, port or _SCHEMES[parts.scheme], path)
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return target
    check_address(literal, target, networks)
    return target


def check_address(address: _IpAddress, target: Target, networks: Networks) -> None:
    """Raises `UsageError`."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is not None:
            check_address(inner, target, networks)
            if address.ipv4_mapped is not None:
                return
    if any(address in network for network in networks if network.version == address.version):
        return
    reserved = address.is_multicast or address.is_reserved or address.is_unspecified
    translated = any(address in network for network in _TRANSLATED if network.version == address.version)
    if not address.is_global or reserved or translated:
        raise UsageError(
            f"{target.host[:200]} has the address {address}, which is not public; webhooks are sent there only where "
            "`webhook_networks` in the manager's configuration lists it"
        )
    if not target.secure:
        raise UsageError(f"webhooks are sent to {target.host[:200]} over HTTPS alone; write https://")


async def post_to(url: str, headers: Mapping[str, str], body: bytes, networks: Networks) -> int:
    """The status of the answer. Raises `UsageError` where the URL is refused, `Unreachable`."""
    target = parse_target(url, networks)
    try:
        async with asyncio.timeout(LIMIT_S):
            address = await _resolved(target, networks)
            return await _post(target, address, headers, body)
    except FireflyerError:  # before the others, of which they are kinds
        raise
    except TimeoutError:
        raise Unreachable(f"no answer within {LIMIT_S:.0f} s") from None
    except ssl.SSLError as error:
        raise Unreachable(f"TLS failed: {error.reason or 'the certificate is refused'}") from None
    except (h11.RemoteProtocolError, ValueError):
        raise Unreachable("the answer is not HTTP") from None
    except OSError as error:
        raise Unreachable(f"cannot connect: {error.strerror or type(error).__name__}") from None


async def _resolved(target: Target, networks: Networks) -> str:
    """An address of it; all that it has are allowed."""
    loop = asyncio.get_running_loop()
    ask = functools.partial(socket.getaddrinfo, target.host, target.port, type=socket.SOCK_STREAM)
    try:
        found = await loop.run_in_executor(_NAMES, ask)
    except OSError:
        raise Unreachable(f"the name {target.host[:200]} cannot be resolved") from None
    addresses = [str(one[4][0]) for one in found]
    for address in addresses:
        check_address(ipaddress.ip_address(address.partition("%")[0]), target, networks)
    if not addresses:
        raise Unreachable(f"the name {target.host[:200]} has no address")
    return addresses[0]


@functools.cache
def _tls() -> ssl.SSLContext:
    """Reading all authorities takes some 50 ms of the manager's loop, so it is done once."""
    return ssl.create_default_context()


async def _post(target: Target, address: str, headers: Mapping[str, str], body: bytes) -> int:
    context = _tls() if target.secure else None
    reader, writer = await asyncio.open_connection(
        address, target.port, ssl=context, server_hostname=target.host if target.secure else None
    )
    try:
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_ANSWER_BYTES)
        sent = [("Host", target.authority), ("Content-Length", str(len(body))), ("Connection", "close")]
        request = h11.Request(method="POST", target=target.path, headers=[*sent, *headers.items()])
        writer.write((http.send(request) or b"") + (http.send(h11.Data(data=body)) or b""))
        writer.write(http.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        received = 0
        while True:
            event = http.next_event()
            if isinstance(event, h11.Response):
                return event.status_code
            if event is h11.NEED_DATA:
                data = await reader.read(_READ_BYTES)
                received += len(data)
                if received > MAX_ANSWER_BYTES:
                    raise Unreachable("the answer is too long")
                http.receive_data(data)
            elif not isinstance(event, h11.InformationalResponse):
                raise Unreachable("the connection ended without an answer")
    finally:
        writer.transport.abort()
