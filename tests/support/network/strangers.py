"""Who comes to every port of some processes without the secret, and says altered hellos; and what that costs them.

`python -m tests.support.network.strangers PLACES COUNT SEED` is `strangers` in the network in which it is started.
"""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import json
import os
import random
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.fuzz.mutations import hostile
from tests.support.fuzz.parsers import PARSERS

__all__ = ["Cost", "Place", "cost_of", "hellos", "places_of", "strangers"]

OPEN_AT_ONCE = 200
"""More than are half-open at a listener for one source, so the oldest of them are closed by it."""
_LISTENING = "00010000"


class Place(NamedTuple):
    """Where something listens: a TCP port of an address, or the name of an abstract Unix socket."""

    port: int
    name: str
    host: str = "127.0.0.1"


class Cost(NamedTuple):
    descriptors: int
    resident_bytes: int


def places_of(pids: Iterable[int], *, proc: str = "/proc", net: str = "/proc/net") -> list[Place]:
    """Everything that these processes listen at. `proc`, `net`: those of a machine of a test."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"{proc}/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed since it was listed
                    inodes.add(os.readlink(f"{proc}/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"{net}/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                packed, _, port = words[1].partition(":")
                found.add(Place(int(port, 16), "", _host(packed)))
    for line in Path(f"{net}/unix").read_text(encoding="utf-8").splitlines()[1:]:
        words = line.split()
        listening = words[3] == _LISTENING  # what was accepted has the name of the listener, too
        if listening and len(words) > 7 and words[6] in inodes and words[7].startswith("@fireflyer-"):
            found.add(Place(0, words[7][1:]))
    return sorted(found)


def _host(packed: str) -> str:
    """An address of /proc/net/tcp, whose words are in the order of the processor; of all addresses the first."""
    words = [bytes.fromhex(packed[at : at + 8])[::-1] for at in range(0, len(packed), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return "127.0.0.1" if address.is_unspecified else str(address)


def cost_of(pid: int, *, proc: str = "/proc") -> Cost:
    pages = int(Path(f"{proc}/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return Cost(len(os.listdir(f"{proc}/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE"))


def hellos() -> list[bytes]:
    """What is said to a listener first, and frames of what follows."""
    return [sample for name in ("handshake, accepting", "frames") for sample in PARSERS[name].samples]


def strangers(places: Sequence[Place], samples: Sequence[bytes], *, count: int, seed: int) -> int:
    """So many come, to one place after the other; most stay for a while. How many were connected."""
    rng, staying, connected = random.Random(seed), collections.deque[socket.socket](), 0
    for number in range(count):
        sock = _connected(places[number % len(places)])
        if sock is None:
            continue
        connected += 1
        with contextlib.suppress(OSError):
            sock.send(hostile(rng, samples), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        staying.append(sock)
        if len(staying) > OPEN_AT_ONCE or rng.random() < 0.2:
            staying.popleft().close()
    for sock in staying:
        sock.close()
    return connected


def _connected(place: Place) -> socket.socket | None:
    internet = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    sock = socket.socket(internet if place.port else socket.AF_UNIX)
    sock.settimeout(20)
    try:
        sock.connect((place.host, place.port) if place.port else f"\0{place.name}")
        return sock
    except OSError:
        sock.close()
        return None


def _main() -> None:
    places = [Place(*place) for place in json.loads(sys.argv[1])]
    print(strangers(places, hellos(), count=int(sys.argv[2]), seed=int(sys.argv[3])))


if __name__ == "__main__":
    _main()
