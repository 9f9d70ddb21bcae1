"""Webhooks of a real manager: what a receiver is sent, signed, across a manager that is killed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import wait_for

from fireflyer.base.errors import UsageError
from fireflyer.cluster.schema.tasks import Program, TaskSpec

pytestmark = pytest.mark.processes


class Receiver:
    """Keeps what it is sent; answers with `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.heard: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.heard.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(receiver.status)
                self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def types(self) -> list[str]:
        return [json.loads(body)["type"] for _, body in self.heard]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def test_a_task_tells_a_receiver_signed_and_a_killed_manager_loses_nothing(tmp_path: Path, receiver: Receiver) -> None:
    with ManagerProcess(tmp_path / "manager", webhook_networks=("127.0.0.1/32",)) as manager:
        wait_for(lambda: manager.ask("GET", "/api/v1/health").status == 200, "it leads")
        with manager.client("ada") as ada, ScriptedAgent(manager, "gpu-1") as agent:
            with pytest.raises(UsageError, match="webhook_networks"):
                ada.add_webhook("https://169.254.169.254/latest")
            made = ada.add_webhook(receiver.url)
            (task,) = ada.submit(TaskSpec(name="train", program=Program(script="train.py")), key="train")
            wait_for(lambda: any(run.launch for run in agent.sync().runs), "it is to start")
            agent.follow_starts()
            agent.sync()
            wait_for(lambda: receiver.types() == ["task.started"], "the start is told")
            headers, body = receiver.heard[0]
            secret = base64.b64decode(made.secret.removeprefix("whsec_"))
            words = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
            expected = base64.b64encode(hmac.new(secret, words, hashlib.sha256).digest()).decode()
            assert headers["webhook-signature"] == f"v1,{expected}"
            assert json.loads(body)["data"] == {"user": "ada", "task": task, "name": "train", "run": 0}

            receiver.status = 302
            agent.follow()
            agent.sync()
            wait_for(lambda: "redirects are not followed" in ada.webhooks()[0].last, "the end is told in vain")
            assert ada.webhooks()[0].pending == 1
        manager.end(signal.SIGKILL)
        receiver.status = 200
        manager.start()
        wait_for(lambda: manager.ask("GET", "/api/v1/health").status == 200, "it leads again")
        wait_for(lambda: len(receiver.heard) >= 3, "the end is told again")
        ends = {headers["webhook-id"] for headers, body in receiver.heard[1:]}
        assert len(ends) == 1
        assert set(receiver.types()[1:]) == {"task.ended"}
        with manager.client("ada") as ada:
            wait_for(lambda: ada.webhooks()[0].pending == 0, "it is recorded")
            assert ada.webhooks()[0].delivered == 2
        stored = b"".join(file.read_bytes() for file in (tmp_path / "manager").rglob("*") if file.is_file())
        assert secret not in stored
