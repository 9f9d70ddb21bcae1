"""A platform of real processes: `ff up` in a directory of the test, and clients of several users."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from tests.support.patience import allowed_s

from fireflyer.base.errors import TransientError
from fireflyer.cluster.client import Client, Connection, read_connection
from fireflyer.cluster.core.platform.views import TaskAnswer
from fireflyer.cluster.local.layout import PlatformLayout
from fireflyer.cluster.schema.tasks import FINISHED, Program, TaskSpec
from fireflyer.runtime.processes.run_lock import END_NOW

__all__ = ["RunningPlatform", "task_of", "wait_for"]

START_S: Final = 60.0
LOOK_S: Final = 0.05


def wait_for(true: Callable[[], bool], what: str, *, limit_s: float = 30.0, pause_s: float = LOOK_S) -> None:
    """`pause_s`: between two looks."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < allowed_s(limit_s), f"{what} did not come true"
        time.sleep(pause_s)


def task_of(script: Path, name: str, *args: str, nodes: int = 1, priority: int = 10, **fields: object) -> TaskSpec:
    """A task of one rank on each node."""
    program = Program(script=str(script), args=args, workdir=str(script.parent))
    return TaskSpec(name=name, program=program, least_nodes=nodes, most_nodes=nodes, priority=priority, **fields)  # type: ignore[arg-type]


class RunningPlatform:
    """`ff up` in the foreground, ended with the block."""

    def __init__(
        self,
        directory: Path,
        *,
        nodes: int = 2,
        zones: int = 1,
        users: tuple[str, ...] = (),
        file: Path | None = None,
        storage: int = 0,
    ) -> None:
        """`file`: that says all but the directory and `storage`, the processes of a file system beside it."""
        self.directory = directory
        self.layout = PlatformLayout(str(directory))
        self._command = [sys.executable, "-P", "-m", "fireflyer", "up", "--dir", str(directory)]
        self._command += [f"--storage={storage}"]
        self._command += [f"--nodes={nodes}", f"--zones={zones}"] if file is None else [str(file)]
        self._users = users
        self._clients: list[Client] = []
        self._process: subprocess.Popen[str] | None = None
        self.tokens: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.start()
        admin = self.client()
        for user in self._users:
            admin.create_user(user)
            self.tokens[user] = admin.issue_token(user).token
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self.end()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            line = self._process.stdout.readline()
            assert line, f"ff up ended: {said}{self._logs()}"
            said += line

    def end(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(END_NOW)
        try:
            self._process.wait(allowed_s(START_S))
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def _logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in sorted(self.directory.glob("*/log")))

    def client(self, user: str = "") -> Client:
        """Of one of the users; by default of the administrator."""
        connection = read_connection(self.layout.connection_file)
        if user:
            connection = Connection(url=connection.url, token=self.tokens[user], fingerprint=connection.fingerprint)
        client = Client(connection)
        self._clients.append(client)
        return client

    def until(
        self, client: Client, task: int, true: Callable[[TaskAnswer], bool], what: str, *, limit_s: float = 60.0
    ) -> TaskAnswer:
        found: list[TaskAnswer] = []

        def look() -> bool:
            try:
                found[:] = [client.task(task)]
            except TransientError:
                return False
            assert true(found[0]) or found[0].task.state is not FINISHED, (what, found[0], self._logs())
            return true(found[0])

        wait_for(look, f"{what}: {found}", limit_s=limit_s)
        return found[0]

    def finished(self, client: Client, task: int, *, limit_s: float = 90.0) -> TaskAnswer:
        return self.until(client, task, lambda answer: answer.task.state is FINISHED, "the end", limit_s=limit_s)
