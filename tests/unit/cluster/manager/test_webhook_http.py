"""POSTs to URLs of users: where they go, and what they cost the manager."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.support.patience import allowed_s

from fireflyer.base.errors import Unreachable, UsageError
from fireflyer.cluster.manager.webhook_http import parse_target, post_to

NETWORK = (ipaddress.ip_network("10.1.0.0/16"),)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.1.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "[::1]", "[::]", "[fe80::1]",
     "[fe80::1%25eth0]", "[fd00::1]", "[::ffff:127.0.0.1]", "[::ffff:a9fe:a9fe]", "[::127.0.0.1]", "[64:ff9b::7f00:1]",
     "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]", "[ff02::1]"],
)  # fmt: skip
def test_an_address_that_is_not_public_is_refused_in_every_form(host: str) -> None:
    with pytest.raises(UsageError, match="not public"):
        parse_target(f"https://{host}/", ())


@pytest.mark.parametrize("host", ["127.1", "0x7f.1", "2130706433", "017700000001", "localhost"])
def test_a_name_of_this_machine_is_refused_when_it_is_resolved(host: str) -> None:
    with pytest.raises(UsageError, match="not public"):
        asyncio.run(post_to(f"https://{host}/", {}, b"", NETWORK))


def test_names_that_nobody_resolves_hold_no_thread_of_the_managers_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, released = threading.Semaphore(0), threading.Event()

    def never(*_: Any, **__: Any) -> Any:
        asked.release()
        released.wait()
        raise OSError

    async def world() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        posts = [asyncio.ensure_future(post_to("https://slow.example/", {}, b"", ())) for _ in range(2)]
        with ThreadPoolExecutor(1) as waiting:
            for _ in posts:
                await loop.run_in_executor(waiting, asked.acquire)
        try:
            async with asyncio.timeout(allowed_s(5)):
                assert await asyncio.to_thread(lambda: 6) == 6
        finally:
            released.set()
            await asyncio.gather(*posts, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", never)
    asyncio.run(world())


def test_a_name_that_is_not_there_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(Unreachable, match=r"gone\.example cannot be resolved"):
        asyncio.run(post_to("https://gone.example/", {}, b"", ()))


def test_certificate_authorities_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user makes the manager send, as often as they may ask."""
    contexts: list[Any] = []

    async def connect(*_: Any, ssl: Any, **__: Any) -> Any:
        contexts.append(ssl)
        raise OSError

    async def world() -> None:
        for _ in range(2):
            with pytest.raises(Unreachable):
                await post_to("https://1.1.1.1/", {}, b"", ())

    monkeypatch.setattr(asyncio, "open_connection", connect)
    asyncio.run(world())
    assert contexts[0] is contexts[1]
    assert contexts[0].check_hostname
    assert contexts[0].verify_mode == ssl.CERT_REQUIRED
