"""A platform whose engine is a Slurm cluster of `tests.support.machines.slurm`: the manager is on the first machine,
and so is a client that does what the test asks for, since nobody else reaches it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from tests.support.machines.machines import Machine, MachineProcess, Machines
from tests.support.machines.slurm import JOBCOMP
from tests.support.patience import allowed_s

from fireflyer.base.toml_text import to_toml
from fireflyer.cluster.core.platform.commands import Command
from fireflyer.cluster.core.platform.views import NodeView, TaskAnswer
from fireflyer.cluster.manager.config import PlatformConfig, SlurmConfig
from fireflyer.cluster.schema.tasks import FINISHED, TaskSpec
from fireflyer.identity import TokenStore, new_secret, save_secret

__all__ = ["SlurmPlatform"]

PORT: Final = 9440
_CLIENT: Final = """\
import secrets
import sys
import msgspec
from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.client import Client, Connection
from fireflyer.cluster.core.platform.commands import Command
from fireflyer.cluster.schema.tasks import TaskSpec

client = Client(Connection(url=sys.argv[1], token=sys.argv[2]))
for line in sys.stdin:
    kind, body = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
    try:
        if kind == "submit":
            answer = client.submit(msgspec.json.decode(body, type=TaskSpec), key=secrets.token_hex(8))
        elif kind == "task":
            answer = client.task(msgspec.json.decode(body, type=int))
        elif kind == "nodes":
            answer = list(client.nodes())
        else:
            answer = client.command(msgspec.json.decode(body, type=Command))
        print(msgspec.json.encode(["ok", answer]).decode(), flush=True)
    except FireflyerError as error:
        print(msgspec.json.encode([error.code, str(error)]).decode(), flush=True)
"""


class SlurmPlatform:
    """`ff manager` with `engine = "slurm"`; `directory` is shared by the machines."""

    def __init__(self, machines: Machines, directory: Path, **slurm: Any) -> None:
        self.machine: Machine = next(iter(machines.values()))
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        save_secret(new_secret(), str(directory / "secret"))
        users = TokenStore(str(directory / "tokens.json"))
        users.create_user("admin", int(time.time()))
        self.token = users.issue("admin", int(time.time()))
        self.kill_after_sbatch = directory / "kill-after-sbatch"
        """While this file is there, the next `sbatch` kills the manager as soon as Slurm has the job."""
        self._write_commands(directory / "bin")
        self.url = f"http://127.0.0.1:{PORT}"
        config = PlatformConfig(
            name="manager",
            cluster="00112233445566778899aabbccddeeff",
            store=f"embedded:{directory / 'store'}",
            directory=str(directory),
            listen=f"127.0.0.1:{PORT}",
            listen_agents=f"{self.machine.address}:{PORT + 1}",
            secret_file=str(directory / "secret"),
            tokens_file=str(directory / "tokens.json"),
            operators=("admin",),
            lease_ms=2000,
            settle_ms=20,
            user_requests_per_s=10_000,
            failed_logins_per_minute=10_000,
            engine="slurm",
            slurm=SlurmConfig(
                **{
                    "own_user": True,
                    "poll_ms": 500,
                    "output": f"{directory}/job-%j.log",
                    "path": str(directory / "bin"),
                    "command_timeout_ms": 4000,
                    "jobcomp": JOBCOMP,
                    **slurm,
                }
            ),
        )
        self._config = directory / "platform.toml"
        self._config.write_text(to_toml(msgspec.to_builtins(config)))
        self._manager: MachineProcess | None = None
        self._client: MachineProcess | None = None

    def _write_commands(self, where: Path) -> None:
        where.mkdir()
        for name in ("squeue", "sinfo", "scancel", "scontrol"):
            (where / name).symlink_to(f"/usr/bin/{name}")
        wrapper = where / "sbatch"
        kill = self.kill_after_sbatch
        wrapper.write_text(
            f'#!/bin/sh\n/usr/bin/sbatch "$@" || exit\nif rm {kill} 2>/dev/null; then kill -9 $PPID; fi\n'
        )
        wrapper.chmod(0o755)

    def wait_killed(self) -> None:
        assert self._manager is not None
        self._manager.wait(allowed_s(30))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGTERM)

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "fireflyer", "manager", str(self._config)]
        with open(self.directory / "manager.log", "a") as log:
            self._manager = self.machine.start(command, stdout=subprocess.PIPE, stderr=log)
        assert self._manager.stdout is not None
        assert self._manager.stdout.readline().startswith("ready"), self.log()
        command = [sys.executable, "-P", "-c", _CLIENT, self.url, self.token]
        self._client = self.machine.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end(self, number: signal.Signals) -> None:
        for process in (self._client, self._manager):
            if process is None:
                continue
            process.send_signal(signal.SIGKILL if process is self._client else number)
            process.wait(allowed_s(30))
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._client = self._manager = None

    def log(self) -> str:
        logs = [self.directory / "manager.log", *sorted(self.directory.glob("job-*.log"))]
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in logs if path.exists())

    # --- what a user does ---

    def _ask(self, kind: str, body: Any) -> Any:
        assert self._client is not None
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        deadline_s = time.monotonic() + allowed_s(60)
        code, answer = "busy", None
        while code in ("busy", "unreachable") and time.monotonic() < deadline_s:
            self._client.stdin.write(msgspec.json.encode([kind, body]).decode() + "\n")
            self._client.stdin.flush()
            line = self._client.stdout.readline()
            assert line, self.log()
            code, answer = json.loads(line)
        assert code == "ok", f"{code}: {answer}\n{self.log()}"
        return answer

    def submit(self, spec: TaskSpec) -> int:
        (task,) = self._ask("submit", spec)
        return int(task)

    def command(self, command: Command) -> None:
        self._ask("command", command)

    def task(self, task: int) -> TaskAnswer:
        return msgspec.convert(self._ask("task", task), TaskAnswer)

    def nodes(self) -> dict[str, NodeView]:
        return {node.name: node for node in msgspec.convert(self._ask("nodes", None), list[NodeView])}

    def until(self, task: int, true: Callable[[TaskAnswer], bool], what: str, limit_s: float = 30.0) -> TaskAnswer:
        deadline_s = time.monotonic() + allowed_s(limit_s)
        while not true(answer := self.task(task)):
            assert answer.task.state is not FINISHED, (what, answer, self.log())
            assert time.monotonic() < deadline_s, (what, answer, self.log())
            time.sleep(0.1)
        return answer

    def finished(self, task: int) -> TaskAnswer:
        return self.until(task, lambda answer: answer.task.state is FINISHED, "the end")
