"""A manager process alone, plain HTTP to it, and an agent that says what the test wants."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec
from tests.support.patience import allowed_s

from fireflyer.base.toml_text import to_toml
from fireflyer.base.units import SECOND
from fireflyer.cluster.client import Client, Connection
from fireflyer.cluster.manager.config import PlatformConfig
from fireflyer.cluster.schema.agent import JOIN_MACHINE, JoinMachine
from fireflyer.cluster.schema.logs import APPEND_LOG, END_LOG, AppendLog, EndLog, LogAnswer, LogChunk, LogEnd
from fireflyer.cluster.schema.sync import (
    FETCH_BLOB,
    SYNC,
    BlobPiece,
    EndedRun,
    FetchBlob,
    Inventory,
    Orders,
    RunStatus,
    Sync,
)
from fireflyer.cluster.schema.tasks import Cause
from fireflyer.cluster.schema.tickets import open_launch
from fireflyer.identity import TokenStore, UserCredential, new_secret, save_secret
from fireflyer.identity.derived import derive_credential
from fireflyer.identity.handshake import token_id_of, token_key
from fireflyer.runtime.rpc import BlockingRpcClient

__all__ = ["Answered", "ManagerProcess", "ScriptedAgent"]

CLUSTER: Final = "00112233445566778899aabbccddeeff"
CALL_NS: Final = 30 * SECOND
_NOTHING: Final = 0
"""No version of orders that an agent has heard."""


class Answered(NamedTuple):
    status: int
    body: Any
    """Of JSON; None where there is none."""
    headers: dict[str, str]


class ManagerProcess:
    """`ff manager` in a directory, with users `admin` (an operator), `ada` and `bob`."""

    def __init__(self, directory: Path, *, name: str = "manager", store: str = "", **settings: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        self.directory = directory
        secret, tokens_file = directory / "secret", directory / "tokens.json"
        if not secret.exists():
            save_secret(new_secret(), str(secret))
        self.users = TokenStore(str(tokens_file))
        self.tokens: dict[str, str] = {}
        for user in ("admin", "ada", "bob"):
            if user not in self.users.users():
                self.users.create_user(user, int(time.time()))
            self.tokens[user] = self.users.issue(user, int(time.time()))
        config = PlatformConfig(
            name=name,
            cluster=CLUSTER,
            store=store or f"embedded:{directory / 'store'}",
            directory=str(directory),
            listen=settings.pop("listen", "127.0.0.1:0"),
            listen_agents=settings.pop("listen_agents", "127.0.0.1:0"),
            secret_file=str(secret),
            tokens_file=str(tokens_file),
            operators=("admin",),
            settle_ms=settings.pop("settle_ms", 20),
            user_requests_per_s=settings.pop("user_requests_per_s", 10_000),
            failed_logins_per_minute=settings.pop("failed_logins_per_minute", 10_000),
            **settings,
        )
        self.store = config.store
        self._config = directory / f"{name}.toml"
        self._config.write_text(to_toml(msgspec.to_builtins(config)))
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None
        self.url = self.agents = self.fingerprint = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, program: tuple[str, ...] = ("-m", "fireflyer")) -> None:
        """Until it serves; it may not lead yet. `program`: what Python runs as `ff`."""
        command = [sys.executable, "-P", *program, "manager", str(self._config)]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        ready = self._process.stdout.readline().split()
        assert ready[:1] == ["ready"], self.log()
        self.url, self.agents, self.fingerprint = (*ready[1:], "")[:3]

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(allowed_s(20))
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    @property
    def runs(self) -> bool:
        return self._process is not None

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    def client(self, user: str) -> Client:
        return Client(Connection(url=self.url, token=self.tokens[user], fingerprint=self.fingerprint))

    def ask(
        self,
        method: str,
        path: str,
        *,
        user: str = "",
        token: str = "",
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Answered:
        """As a program without our SDK would."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        if user or token:
            request.add_header("Authorization", f"Bearer {token or self.tokens[user]}")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=allowed_s(30)) as response:
                return _answered(response.status, response.read(), response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return _answered(error.code, error.read(), error.headers)


def _answered(status: int, data: bytes, headers: Any) -> Answered:
    found = {name.lower(): value for name, value in headers.items()}
    is_json = data and found.get("content-type", "").startswith("application/json")
    return Answered(status, json.loads(data) if is_json else None, found)


class ScriptedAgent:
    """Joins as `name` and says what it is told to say: what is on the node is `runs`."""

    def __init__(self, manager: ManagerProcess, name: str, *, addresses: tuple[str, ...] = ()) -> None:
        """`addresses`: of all managers, the one that it asks first in front; by default that of `manager`."""
        with manager.client("admin") as client:
            token = client.join_token(name)
        with BlockingRpcClient.connect(manager.agents, UserCredential(token), CALL_NS) as joining:
            admitted = joining.call(JOIN_MACHINE, JoinMachine(token_id=token_id_of(token), port=1), CALL_NS)
        credential = derive_credential(token_key(token), token_id=admitted.token_id, nonce=admitted.nonce)
        self._credential = UserCredential(credential)
        self._addresses = itertools.cycle(addresses or (manager.agents,))
        self._client: BlockingRpcClient | None = None
        self._name = name
        self.runs: dict[str, RunStatus] = {}
        self.orders = Orders(term=0, version=0)
        self._sequence = 0
        self._key = token_key(credential)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.next_manager()

    def next_manager(self) -> None:
        """The next call is of another manager, or of the same one with a new connection."""
        if self._client is not None:
            self._client.close()
        self._client = None

    def move_to(self, manager: ManagerProcess) -> None:
        self.next_manager()
        self._addresses = itertools.cycle((manager.agents,))

    def sync(self, *, hold: bool = True) -> Orders:
        """Says what is here, and hears what should be. `hold`: the manager answers when there is something new, or
        after 5 s; else at once, perhaps before it has looked at what was said. Raises `FireflyerError` where this
        manager does not answer."""
        self._sequence += 1
        inventory = Inventory(
            address="127.0.0.1", port=1, version="test", boot_id="b", hostname="h", cores=1, memory_bytes=1
        )
        said = Sync(
            incarnation=1,
            sequence=self._sequence,
            heard=self.orders.version if hold else _NOTHING,
            term=self.orders.term,
            inventory=inventory,
            runs=tuple(self.runs.values()),
        )
        self.orders = self._connected().call(SYNC, said, CALL_NS)
        return self.orders

    def appear(self, client: Client) -> None:
        """Until the node is one that commands may name: orders are answered before what was said is stored."""
        self.sync()
        while not any(node.name == self._name for node in client.nodes()):
            self.sync(hold=False)

    def run_token(self, task: int) -> str:
        """Of the user, for the run of the task that is to be started here."""
        (launch,) = (run.launch for run in self.orders.runs if run.launch is not None and run.launch.task == task)
        return open_launch(launch, self._key).token

    def _connected(self) -> BlockingRpcClient:
        if self._client is None:
            self._client = BlockingRpcClient.connect(next(self._addresses), self._credential, CALL_NS)
        return self._client

    def append_log(self, task: int, run: int, token: str, chunk: LogChunk) -> LogAnswer:
        return self._connected().call(APPEND_LOG, AppendLog(task=task, run=run, run_token=token, chunk=chunk), CALL_NS)

    def end_log(self, task: int, run: int, token: str, end: LogEnd) -> LogAnswer:
        return self._connected().call(END_LOG, EndLog(task=task, run=run, run_token=token, end=end), CALL_NS)

    def follow_starts(self) -> None:
        """What is ordered runs, and does not end by itself."""
        for order in self.orders.runs:
            if order.wanted == "run":
                self.runs[order.run_token] = RunStatus(token=order.run_token, state="running", lead=True)

    def fetch(self, asked: FetchBlob) -> BlobPiece:
        return self._connected().call(FETCH_BLOB, asked, CALL_NS)

    def follow(self, cause: Cause = Cause.SUCCEEDED) -> None:
        """What an agent does whose programs end at once: everything ordered ends with `cause`."""
        for order in self.orders.runs:
            token = order.run_token
            if order.wanted == "forget":
                self.runs.pop(token, None)
            elif order.wanted == "run" and token not in self.runs:
                self.runs[token] = RunStatus(token=token, state="running", lead=order.launch is not None)
            else:
                ended = EndedRun(cause=cause if order.wanted == "run" else Cause.SUSPENDED, exit_code=0)
                self.runs[token] = RunStatus(token=token, state="gone", lead=True, ended=ended)
