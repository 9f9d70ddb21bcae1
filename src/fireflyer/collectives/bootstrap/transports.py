"""What carries data between nodes: TCP sockets, or UCX (RDMA networks) where it was built and is installed.

UCX is a module of its own beside the extension (`_ucx.so`), loaded when a rank asks for it: a machine without UCX needs
nothing of it. All ranks must ask for the same. Rank 0 decides (`choose`): `tcp`; `ucx`, or the reason why a rank
cannot; `auto`: UCX where every rank can and every machine has an RDMA device. The control connections of the group stay
what they are, and over them the leaders of neighbouring nodes tell each other where UCX finds them, and the keys
without which UCX's messages are dropped (`exchange_worker_addresses`).
"""

from __future__ import annotations

import base64
import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import Unreachable, UsageError
from fireflyer.base.launch import TRANSPORTS
from fireflyer.base.port_range import PortRange
from fireflyer.native import Fabric, ucx_module
from fireflyer.runtime.sockets import receive_exactly

__all__ = [
    "TRANSPORTS",
    "Choice",
    "Offer",
    "Prepared",
    "check_transport",
    "choose",
    "exchange_worker_addresses",
    "make_offer",
]

MAX_MESSAGE_BYTES: Final = 64 * 1024
KEY_BYTES: Final = 16
_LENGTH: Final = struct.Struct("<I")
_RDMA_DEVICES: Final = "/sys/class/infiniband"
_MANNERS: Final = {
    "UCX_ERROR_SIGNALS": "",  # SIGSEGV and its like stay Python's
    "UCX_LOG_LEVEL": "fatal",  # it writes to stdout, and a peer's death is ours to report
}
"""What UCX's environment is where the user says nothing else."""


class Offer(msgspec.Struct, frozen=True):
    """What a rank asks for and could do."""

    transport: str = "tcp"
    problem: str | None = None
    """Why it cannot use UCX."""
    rdma: bool = False
    """Its machine has an RDMA device."""


class Choice(msgspec.Struct, frozen=True):
    """What carries the data, and why; the reason is for people."""

    transport: str = "tcp"
    reason: str = "default"


class _WorkerAddress(msgspec.Struct, frozen=True):
    address: str
    key: str
    """Which the other end's messages must begin with."""


class Prepared(NamedTuple):
    """The offer, and UCX where it could be loaded."""

    offer: Offer
    fabric: Fabric | None


def check_transport(transport: str) -> None:
    """Raises `UsageError` where there is none of this name."""
    if transport not in TRANSPORTS:
        raise UsageError(f"transport {transport!r} is not known; use one of {', '.join(TRANSPORTS)}")


def make_offer(
    transport: str,
    *,
    ports: PortRange | None = None,
    module_path: str | None = None,
    devices: str = _RDMA_DEVICES,
) -> Prepared:
    """Loads UCX unless `transport` is "tcp"; where it uses TCP, it listens on ports of the range. Raises `UsageError`
    where there is no such transport."""
    check_transport(transport)
    if transport == "tcp":
        return Prepared(Offer(), None)
    path = ucx_module() if module_path is None else module_path
    if not os.path.exists(path):
        problem = "this build has no UCX (install UCX's headers, Debian: libucx-dev, and build again)"
        return Prepared(Offer(transport, problem), None)
    settings = _MANNERS if ports is None else {**_MANNERS, "UCX_TCP_PORT_RANGE": str(ports)}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        fabric = Fabric(path)
    except RuntimeError as error:
        return Prepared(Offer(transport, " ".join(str(error).split())), None)
    return Prepared(Offer(transport, None, rdma=_has_entries(devices)), fabric)


def choose(offers: Sequence[Offer]) -> Choice:
    """What the group uses; `offers[r]` is of rank r. Raises `UsageError` naming a rank."""
    for rank, offer in enumerate(offers):
        if offer.transport != offers[0].transport:
            raise UsageError(
                f"rank {rank} asks for transport {offer.transport!r}, rank 0 for {offers[0].transport!r}; "
                "all ranks need the same"
            )
    wish = offers[0].transport
    if wish == "tcp":
        return Choice()
    unable = next(((rank, offer.problem) for rank, offer in enumerate(offers) if offer.problem is not None), None)
    if wish == "ucx":
        if unable is not None:
            raise UsageError(f"rank {unable[0]} cannot use transport 'ucx': {unable[1]}; or use 'tcp'")
        return Choice("ucx", "asked for")
    if unable is not None:
        return Choice("tcp", f"rank {unable[0]} cannot use UCX: {unable[1]}")
    without = next((rank for rank, offer in enumerate(offers) if not offer.rdma), None)
    if without is not None:
        return Choice("tcp", f"the machine of rank {without} has no RDMA device")
    return Choice("ucx", "every machine has an RDMA device")


def exchange_worker_addresses(fabric: Fabric, neighbours: Mapping[int, tuple[str, socket.socket]]) -> None:
    """Over authenticated connections to the leaders of other nodes: node -> (name for people, connection).

    Raises `Unreachable` where one breaks off or UCX finds no way to it.
    """
    address = base64.b64encode(fabric.address()).decode()
    keys = {node: secrets.token_bytes(KEY_BYTES) for node in neighbours}
    for node, (name, sock) in neighbours.items():
        body = msgspec.json.encode(_WorkerAddress(address, keys[node].hex()))
        try:
            sock.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise Unreachable(f"the connection to {name} was lost: {error}; see its log") from error
    for node, (name, sock) in neighbours.items():
        try:
            (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"{length} bytes are more than {MAX_MESSAGE_BYTES}")
            theirs = decode_json(receive_exactly(sock, length), _WorkerAddress)
            where, outgoing = base64.b64decode(theirs.address, validate=True), bytes.fromhex(theirs.key)
            problem = fabric.meet(node, where, outgoing, keys[node])
        except (*DECODE_ERRORS, OSError, EOFError, ValueError) as error:
            raise Unreachable(f"{name} sent no valid UCX worker address ({error}); see its log") from error
        if problem:
            raise Unreachable(
                f"UCX cannot reach {name}: {problem}; see UCX_TLS and UCX_NET_DEVICES, or use transport 'tcp'"
            )


def _has_entries(directory: str) -> bool:
    try:
        return bool(os.listdir(directory))
    except OSError:
        return False
