"""The synchronous client: shared by threads, closed cleanly, silent at interpreter exit, honest after a fork."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvloop
from tests.support.network.rpc_service import ADD, FAIL, HANG, Add, Name, Number, Service
from tests.support.patience import allowed_s

from fireflyer.base.errors import Aborted, NotFound, PermissionDenied, Timeout, Unreachable, UsageError
from fireflyer.base.units import MS, SECOND
from fireflyer.identity.secrets import new_secret, save_secret
from fireflyer.runtime.rpc import Accepts, BlockingRpcClient, NodeCredential, RpcServer, blocking


class Running:
    """A service on a loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.service, self.server = asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(10)

    async def _start(self) -> tuple[Service, RpcServer]:
        service = Service()
        server = RpcServer(Accepts(service.secret))
        service.register(server)
        service.address = await server.start("127.0.0.1", 0)
        return service, server

    def until_hanging(self, count: int) -> None:
        asyncio.run_coroutine_threadsafe(self.service.until_hanging(count), self.loop).result(10)

    def until_ended(self, count: int) -> None:
        asyncio.run_coroutine_threadsafe(self.service.until_ended(count), self.loop).result(10)

    def connect(self) -> BlockingRpcClient:
        return BlockingRpcClient.connect(self.service.address, NodeCredential(self.service.secret, "r"), 10 * SECOND)

    def stop_serving(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(10)

    def close(self) -> None:
        self.stop_serving()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def running() -> Iterator[Running]:
    service = Running()
    yield service
    service.close()


def test_calls_from_many_threads_share_one_connection(running: Running) -> None:
    with running.connect() as client, ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda n: client.call(ADD, Add(n, n), 10 * SECOND).value, range(200)))
        assert sums == [2 * n for n in range(200)]
        assert running.server.connections == 1
        with pytest.raises(NotFound):
            client.call(FAIL, Name("not_found"), SECOND)
        with pytest.raises(Timeout, match=r"did not answer|not done"):
            client.call(HANG, Name("late"), 50 * MS)


def test_closing_ends_calls_of_other_threads_and_is_idempotent(running: Running) -> None:
    client = running.connect()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, HANG, Name("a"), 60 * SECOND)
        running.until_hanging(1)
        client.close()
        with pytest.raises(Aborted):
            call.result(10)
    client.close()
    running.until_ended(1)
    with pytest.raises(Aborted, match="was closed"):
        client.call(ADD, Add(1, 1), SECOND)
    with pytest.raises(Aborted, match="was closed"):
        client.notify(ADD, Add(1, 1))


def test_queued_notifications_are_sent_before_the_connection_closes(running: Running) -> None:
    client = running.connect()
    for number in range(50):
        client.notify(HANG, Name(str(number)))
    client.close()
    running.until_ended(50)
    assert sorted(running.service.ended, key=int) == [str(number) for number in range(50)]


def test_a_lost_server_is_unreachable_for_calls_and_notifications(running: Running) -> None:
    client = running.connect()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, HANG, Name("a"), 60 * SECOND)
        running.until_hanging(1)
        running.stop_serving()
        with pytest.raises(Unreachable, match=str(client.address)):
            call.result(10)
    assert isinstance(client.lost, Unreachable)
    with pytest.raises(Unreachable, match=r"test\.add"):
        client.notify(ADD, Add(1, 1))
    client.close()


def test_a_thread_that_does_not_get_to_run_is_a_timeout(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "_GRACE_S", 0.05)
    client = running.connect()
    release = threading.Event()
    client._loop.call_soon_threadsafe(release.wait, 30)
    with pytest.raises(Timeout, match="was this process stopped"):
        client.call(ADD, Add(1, 1), 50 * MS)
    release.set()
    assert client.call(ADD, Add(1, 1), 10 * SECOND) == Number(2)
    client.close()


def test_a_refused_connection_leaves_no_thread_behind(running: Running) -> None:
    before = threading.active_count()
    with pytest.raises(PermissionDenied):
        BlockingRpcClient.connect(running.service.address, NodeCredential(new_secret(), "x"), 10 * SECOND)
    assert threading.active_count() == before


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_to_connect_again(running: Running) -> None:
    client = running.connect()
    with client._lock:  # as another thread might during the fork
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            code = 1
            try:
                client.call(ADD, Add(1, 1), SECOND)
            except UsageError as error:
                code = 42 if "made before a fork" in str(error) else 2
                client.close()
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert client.call(ADD, Add(1, 1), SECOND) == Number(2)
    client.close()


_PROGRAM = """
import sys, threading
from fireflyer.base.units import SECOND
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.rpc import BlockingRpcClient, NodeCredential
from fireflyer.runtime.store import StoreClient
from tests.support.network.rpc_service import ADD, HANG, Add, Name
client = BlockingRpcClient.connect(sys.argv[1], NodeCredential(load_secret(sys.argv[2]), "r"), 10 * SECOND)
assert client.call(ADD, Add(20, 22), 10 * SECOND).value == 42
def hang():
    try:
        client.call(HANG, Name("a"), 60 * SECOND)
    except Exception:
        pass
threading.Thread(target=hang, daemon=True).start()
client.notify(HANG, Name("b"))
print("done")
"""


@pytest.mark.processes
def test_a_program_that_just_ends_ends_silently(running: Running, tmp_path: Path) -> None:
    secret = str(tmp_path / "secret")
    save_secret(running.service.secret, secret)
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", _PROGRAM, str(running.service.address), secret]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=allowed_s(60), check=False, cwd=root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
