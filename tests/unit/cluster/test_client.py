"""Which manager a client asks, and which requests it repeats."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import ssl
import threading
from collections.abc import Iterator

import pytest

from fireflyer.base.errors import NotFound, TransientError, Unreachable
from fireflyer.cluster.client import Client, Connection, ManagerAddress
from fireflyer.cluster.core.platform.commands import StopTask
from fireflyer.cluster.schema.api import LEADER_HEADER
from fireflyer.cluster.schema.tasks import Program, TaskSpec

SPEC = TaskSpec(name="train", program=Program(script="train.py"))
SUBMITTED = b'{"tasks":[7],"repeated":false}'


class Manager(http.server.ThreadingHTTPServer):
    """`does`: `leads`, `follows`, or `breaks` the connection once it has the request; `stalls`: names itself as the one
    to ask, twice, and leads then. GET is answered as of a route that a manager does not have."""

    daemon_threads = True

    def __init__(self, does: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.does = does
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Manager
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(self.path.rpartition("/")[2])
        if self.server.does == "breaks":
            self.close_connection = True
            return
        stalls = self.server.does == "stalls" and len(self.server.asked) <= 2
        leads = self.server.does in ("leads", "stalls") and not stalls
        body = SUBMITTED if leads else b'{"code":"busy","message":"this manager does not lead"}'
        self.send_response(201 if leads else 503)
        if not leads:
            self.send_header(LEADER_HEADER, self.server.url if stalls else "")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        body = b'{"code":"not_found","message":"Not Found"}'
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def managers(*does: str) -> Iterator[tuple[list[Manager], Client]]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Manager(one)) for one in does]
        for server in servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
        others = tuple(ManagerAddress(url=server.url) for server in servers[1:])
        yield servers, stack.enter_context(Client(Connection(url=servers[0].url, token="t", others=others)))


def test_a_client_goes_on_with_the_manager_that_leads_and_stays_there() -> None:
    with managers("follows", "follows", "leads") as (servers, client):
        assert client.submit(SPEC, key="a") == (7,)
        assert client.submit(SPEC, key="b") == (7,)
        assert [len(server.asked) for server in servers] == [1, 1, 2]


def test_a_manager_that_cannot_be_reached_is_passed_over() -> None:
    with Manager("leads") as gone:
        url = gone.url
    with managers("leads") as (servers, _):
        connection = Connection(url=url, token="t", others=(ManagerAddress(url=servers[0].url),))
        with Client(connection) as client:
            assert client.submit(SPEC, key="a") == (7,)


def test_a_submission_is_repeated_by_its_key_and_a_command_of_unknown_outcome_is_not() -> None:
    with managers("breaks", "leads") as (servers, client):
        assert client.submit(SPEC, key="a") == (7,)
        assert servers[1].asked == ["tasks"]
    with managers("breaks", "leads") as (servers, client):
        with pytest.raises(Unreachable):
            client.command(StopTask(1))
        assert (servers[0].asked, servers[1].asked) == (["commands"], [])


def test_a_manager_that_is_alone_and_was_held_up_for_a_moment_is_asked_again() -> None:
    with managers("stalls") as (servers, client):
        assert client.submit(SPEC, key="a") == (7,)
        assert len(servers[0].asked) == 3


def test_a_client_of_one_manager_says_at_once_that_it_does_not_lead() -> None:
    with managers("follows") as (servers, client):
        with pytest.raises(TransientError, match="does not lead"):
            client.submit(SPEC, key="a")
        assert len(servers[0].asked) == 1


def test_a_manager_of_an_older_release_that_is_asked_for_reasons_is_said_to_be_one() -> None:
    with managers("leads") as (_, client), pytest.raises(NotFound, match=r"of an older release.*ff show TASK"):
        client.reasons([1, 2])


@pytest.mark.parametrize("method", ["request", "getresponse"])
def test_a_command_after_ctrl_c_in_a_request_is_carried_out(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that which stops an interactive task: the answer that was awaited is not taken for its own."""
    meant = getattr(http.client.HTTPConnection, method)

    def interrupted(*arguments: object, **named: object) -> None:
        if method == "request":
            meant(*arguments, **named)
        raise KeyboardInterrupt

    with managers("leads") as (servers, client):
        assert client.submit(SPEC, key="a") == (7,)
        with monkeypatch.context() as patch:
            patch.setattr(http.client.HTTPConnection, method, interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.submit(SPEC, key="b")
        assert client.submit(SPEC, key="c") == (7,)
        assert servers[0].asked[-1] == "tasks"


def test_no_request_goes_over_a_connection_whose_tls_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    with Manager("leads") as server:
        connection = Connection(url=server.url.replace("http:", "https:"), token="t", fingerprint="0" * 64)
        with Client(connection) as client:

            def wrap(*_: object, **__: object) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(ssl.SSLContext, "wrap_socket", wrap)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    client.submit(SPEC, key="a")
        assert server.asked == []
