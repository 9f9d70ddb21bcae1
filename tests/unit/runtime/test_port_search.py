"""Listeners of a job take ports of a range, beside those of other jobs in the same range."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.port_range import PortRange
from fireflyer.runtime.master_port import reserve_free_port
from fireflyer.runtime.port_search import listen_in_range, reserve_port

COUNT = 12


def listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


@pytest.fixture
def ports() -> Iterator[PortRange]:
    """A range of which all ports are free, outside of those that the kernel gives away, and of those that
    `tests.support.network.free_ports` reserves for as long as a worker lives; two workers do not get the same one."""
    with ExitStack() as stack:
        for first in range(29000, 32700, 100):
            turn = reserve_port(first + 99)
            if turn is None:
                continue
            stack.enter_context(turn)
            try:
                for port in range(first, first + COUNT):
                    listen(port).close()
            except OSError:
                continue
            yield PortRange(first, first + COUNT - 1)
            return
    raise AssertionError("no range of free ports")


@pytest.mark.parametrize(
    "text", ["", "29500", "29500-", "29599-29500", "0-5", "1-65536", "1-2-3", "a-b", "-1-5", "١-٢"]
)
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write the lowest and the highest port"):
        PortRange.parse(text)


def test_a_range_is_written_as_it_is_read() -> None:
    ports = PortRange.parse("29500-29599")
    assert str(ports) == "29500-29599"
    assert [port in ports for port in (29499, 29500, 29599, 29600)] == [False, True, True, False]
    assert len(PortRange.parse("7-7").ports) == 1


def test_the_lowest_free_port_is_taken_and_the_highest_is_for_the_master(ports: PortRange) -> None:
    with listen(ports.first), listen_in_range(ports, listen) as server:
        assert port_of(server) == ports.first + 1
        port, reservation = reserve_free_port(ports)
        with reservation:
            assert port == ports.last


def test_without_a_range_the_kernel_chooses(ports: PortRange) -> None:
    with listen_in_range(None, listen) as server:
        assert port_of(server) not in ports


def test_a_port_for_the_master_is_nobody_elses_although_nobody_listens_yet(ports: PortRange) -> None:
    low = PortRange(ports.first, ports.first + 1)
    port, reservation = reserve_free_port(low)
    with reservation:
        assert reserve_port(port) is None
        other, second = reserve_free_port(low)
        second.close()
        assert other == ports.first
        with listen_in_range(low, listen), pytest.raises(UsageError, match=f"no port of {low} "):
            listen_in_range(low, listen)
    with listen_in_range(PortRange(port, port), listen) as server:
        assert port_of(server) == port


def test_a_full_range_is_one_line_that_says_what_to_do(ports: PortRange) -> None:
    with ExitStack() as stack:
        for _ in ports.ports:
            stack.enter_context(listen_in_range(ports, listen))
        for search in (lambda: listen_in_range(ports, listen), lambda: reserve_free_port(ports)):
            with pytest.raises(UsageError) as caught:
                search()
            assert str(caught.value).startswith(f"no port of {ports} (--port-range, FF_PORT_RANGE) is free")
            assert "\n" not in str(caught.value)


def test_as_many_as_there_are_ports_find_one_at_a_time(ports: PortRange) -> None:
    """Nobody who looks for a port while others do goes without one that is left."""
    start = threading.Barrier(COUNT)
    found: list[socket.socket] = []
    failed: list[Exception] = []

    def search() -> None:
        start.wait()
        try:
            found.append(listen_in_range(ports, listen))
        except UsageError as error:
            failed.append(error)

    threads = [threading.Thread(target=search) for _ in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with ExitStack() as stack:
        for server in found:
            stack.enter_context(server)
        assert not failed
        assert sorted(map(port_of, found)) == list(ports.ports)


def test_an_error_that_is_not_about_the_port_ends_the_search(ports: PortRange) -> None:
    tried = []

    def refuse(port: int) -> socket.socket:
        tried.append(port)
        raise OSError(errno.EADDRNOTAVAIL, "no such address")

    with pytest.raises(OSError, match="no such address"):
        listen_in_range(ports, refuse)
    assert tried == [ports.first]
    with reserve_port(ports.first) as reservation:  # type: ignore[union-attr]
        assert reservation is not None, "the reservation outlived the search"
