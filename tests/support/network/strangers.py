"""Who comes to every port of some processes without the secret, and says altered hellos; and what that costs them."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.fuzz.mutations import hostile

__all__ = ["Cost", "Place", "cost_of", "places_of", "strangers"]

OPEN_AT_ONCE = 200
"""More than are half-open at a listener for one source, so the oldest of them are closed by it."""
_LISTENING = "00010000"


class Place(NamedTuple):
    """Where something listens: a TCP port of the loopback address, or the name of an abstract Unix socket."""

    port: int
    name: str


class Cost(NamedTuple):
    descriptors: int
    resident_bytes: int


def places_of(pids: Iterable[int]) -> list[Place]:
    """Everything that these processes listen at."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed since it was listed
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(Place(int(words[1].rpartition(":")[2], 16), ""))
    for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]:
        words = line.split()
        listening = words[3] == _LISTENING  # what was accepted has the name of the listener, too
        if listening and len(words) > 7 and words[6] in inodes and words[7].startswith("@fireflyer-"):
            found.add(Place(0, words[7][1:]))
    return sorted(found)


def cost_of(pid: int) -> Cost:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return Cost(len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE"))


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
    sock = socket.socket(socket.AF_INET if place.port else socket.AF_UNIX)
    sock.settimeout(20)
    try:
        sock.connect(("127.0.0.1", place.port) if place.port else f"\0{place.name}")
        return sock
    except OSError:
        sock.close()
        return None
