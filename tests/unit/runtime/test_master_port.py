"""Ports for MASTER_PORT: free, and not from where the kernel takes its own."""

from __future__ import annotations

import random
import socket

import pytest
from tests.support.loops import on_loop

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.runtime import master_port
from fireflyer.runtime.address import parse_listen
from fireflyer.runtime.master_port import (
    check_port,
    lasting_address,
    port_is_free,
    reserve_any_port,
    wait_for_port,
)


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::1")]
)
def test_a_listener_on_any_interface_takes_a_port(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip("no such address family here")
        server.listen()
        port = server.getsockname()[1]
        assert not port_is_free(port)
        with pytest.raises(UsageError, match=f"--master-port {port} is taken"):
            check_port(port)
    assert port_is_free(port)


def test_a_port_that_served_before_is_free_at_once() -> None:
    """What is left of closed connections (TIME_WAIT) does not take it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            accepted.close()
    assert port_is_free(port)


def test_chosen_ports_are_free_and_outside_of_the_kernels_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_port, "_kernel_range", lambda: (32768, 60999))
    ports = {any_port(seed) for seed in range(50)}
    assert len(ports) > 45
    assert all(20000 <= port < 32768 or 60999 < port <= 65535 for port in ports)


def test_the_whole_range_is_used_where_the_kernel_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_port, "_kernel_range", lambda: (1024, 65535))
    assert any_port(1) >= 20000


def test_two_do_not_get_the_same_port() -> None:
    first, reservation = reserve_any_port(random.Random(1), "wait")
    with reservation:
        assert any_port(1) != first
    assert any_port(1) == first


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_a_server_that_comes_back_has_a_port_that_the_kernel_does_not_give_away(
    listen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_port, "_kernel_range", lambda: (32768, 60999))
    address, reservation = lasting_address(listen, random.Random(1))
    assert reservation is not None
    with reservation:
        host, port = parse_listen(address)
        assert host == parse_listen(listen)[0]
        assert not 32768 <= port <= 60999
        assert lasting_address(address, random.Random(1)) == (address, None), "it is reserved"
    again, reservation = lasting_address(address, random.Random(1))
    assert again == address
    assert reservation is not None
    reservation.close()


def test_no_free_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_port, "port_is_free", lambda port: False)
    with pytest.raises(NotFound, match="no port is free among 200 that were tried; choose another"):
        reserve_any_port(random.Random(1), "choose another")


@on_loop
async def test_a_port_in_use_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, False, True]
    monkeypatch.setattr(master_port, "port_is_free", lambda port: answers.pop(0))
    assert await wait_for_port(4711)
    monkeypatch.setattr(master_port, "_RELEASE_NS", 0)
    monkeypatch.setattr(master_port, "port_is_free", lambda port: False)
    assert not await wait_for_port(4711)


def any_port(seed: int) -> int:
    port, reservation = reserve_any_port(random.Random(seed), "wait")
    reservation.close()
    return port


@pytest.mark.parametrize("port", [-1, 65536])
def test_no_port_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match="is out of range"):
        check_port(port)
