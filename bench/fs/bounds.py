"""What the machine can do without a file system, measured by C programs and plain system calls."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import time
from typing import NamedTuple

from bench.natives import program
from fireflyer.base.units import MIB

__all__ = ["Rate", "disk", "echo", "echo_delays_s", "random_file", "stream"]

REQUEST_BYTES = 40
"""Of one read on the wire; the frame's header is shared by all of a batch."""
REPLY_BYTES = 24 + 40 + 4
"""Of one 4 KiB read beside its data: header, reply, one checksum."""


class Rate(NamedTuple):
    per_s: float
    processor_s: float = 0.0
    """For one operation, at all ends."""


def _sockets(*arguments: str) -> list[float]:
    command = [program("fs", "sockets"), *arguments]
    return [float(word) for word in subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()]


def random_file(directory: str) -> str:
    """The path of a new file of 1 MiB to be sent."""
    path = os.path.join(directory, "stream")
    with open(path, "wb") as file:
        file.write(os.urandom(MIB))
    return path


def stream(path: str, size_bytes: int, depth: int, duration_s: float) -> Rate:
    """Pieces per second over one connection of loopback: sendfile from the page cache at one end, recv at the other."""
    bytes_per_s, processor_s = _sockets("stream", path, str(size_bytes), str(depth), str(duration_s))
    return Rate(bytes_per_s / size_bytes, processor_s)


def echo(data_bytes: int, depth: int, duration_s: float, servers: int, *, each: bool = False) -> Rate:
    """Requests and replies of the sizes of ours, by bare epoll servers that answer all that have come in one call, or
    `each` in a call of its own."""
    sizes = (str(REQUEST_BYTES), str(REPLY_BYTES + data_bytes))
    return Rate(*_sockets("echo", *sizes, str(depth), str(duration_s), str(servers), "each" if each else "all"))


def echo_delays_s(data_bytes: int, count: int) -> list[float]:
    return _sockets("delay", str(24 + REQUEST_BYTES), str(REPLY_BYTES + data_bytes), str(count))


def disk(directory: str, tasks: int, duration_s: float) -> Rate:
    """1 MiB writes a second, in place, each followed by fdatasync, so many at once on files of their own."""
    data = os.urandom(MIB)
    end_s = time.perf_counter() + duration_s

    def write(number: int) -> int:
        fd = os.open(os.path.join(directory, f"bound-{number}"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, 8 * MIB)
            count = 0
            while time.perf_counter() < end_s:
                os.pwrite(fd, data, count % 8 * MIB)
                os.fdatasync(fd)
                count += 1
            return count
        finally:
            os.close(fd)

    began_s = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(tasks) as pool:
        written = sum(pool.map(write, range(tasks)))
    return Rate(written / (time.perf_counter() - began_s))
