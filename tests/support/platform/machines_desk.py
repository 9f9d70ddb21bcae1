"""A platform on several machines: managers over one PostgreSQL, agents, and commands that users type there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec
from tests.support.machines.machines import USER, WORK, Machine, MachineProcess
from tests.support.network.namespaces import enter_namespace

from fireflyer.base.toml_text import to_toml
from fireflyer.cluster.manager.config import PlatformConfig

__all__ = ["AGENTS_PORT", "MANAGER_HOME", "PORT", "Agent", "Caller", "Desk", "Manager"]

T = TypeVar("T")
PORT: Final = 9440
AGENTS_PORT: Final = 9441
MANAGER_HOME: Final = "/root/manager"
ACCOUNTS_DIR: Final = "/run/fireflyer/runs"


class Manager:
    """`ff manager` on a machine, with files in a directory of that machine alone. `settings` are of its TOML file;
    those that have defaults here are for a manager that is started quickly and takes over soon."""

    def __init__(self, machine: Machine, secret: bytes, **settings: Any) -> None:
        self.machine = machine
        self.url = self.agents = self.fingerprint = ""
        self._process: MachineProcess | None = None
        machine.path(MANAGER_HOME).mkdir(mode=0o700)
        self.write("secret", secret)
        given: dict[str, Any] = {
            "name": machine.name,
            "directory": MANAGER_HOME,
            "secret_file": f"{MANAGER_HOME}/secret",
            "listen": f"{machine.address}:{PORT}",
            "listen_agents": f"{machine.address}:{AGENTS_PORT}",
            "settle_ms": 1000,
            "user_requests_per_s": 10_000,
            "failed_logins_per_minute": 10_000,
        }
        config = PlatformConfig(**(given | settings))
        self.config_file = self.write("platform.toml", to_toml(msgspec.to_builtins(config)).encode())

    def write(self, name: str, data: bytes) -> str:
        """A private file of the manager; its path there."""
        path = self.machine.path(f"{MANAGER_HOME}/{name}")
        path.write_bytes(data)
        path.chmod(0o600)
        return f"{MANAGER_HOME}/{name}"

    def new_administrator(self, name: str) -> str:
        """Their token."""
        done = self.machine.run(["ff", "manager", "--new-admin", name, self.config_file], check=True)
        return done.stdout.strip()

    def start(self) -> None:
        """Until it serves; it may not lead yet."""
        with open(self.machine.path(f"{MANAGER_HOME}/log"), "a") as log:
            self._process = self.machine.start(["ff", "manager", self.config_file], stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        ready = self._process.stdout.readline().split()
        assert ready[:1] == ["ready"], self.log()
        self.url, self.agents, self.fingerprint = (*ready[1:], "")[:3]

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def log(self) -> str:
        return self.machine.path(f"{MANAGER_HOME}/log").read_text()[-6000:]


class Agent:
    """`ff agent` of root on a machine, which starts ranks as the account of their user."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def join(self, token: str, agents: str) -> None:
        self.machine.run(["ff", "agent", "join", agents], given=f"{token}\n", check=True)

    def start(self) -> None:
        with open(self.machine.path(f"{WORK}/agent.log"), "a") as log:
            process = self.machine.start(
                ["ff", "agent", "run", "--accounts-dir", ACCOUNTS_DIR], stdout=subprocess.PIPE, stderr=log
            )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready"), self.log()

    def log(self) -> str:
        return self.machine.path(f"{WORK}/agent.log").read_text()[-6000:]


class Desk:
    """Commands that a user types on a machine."""

    def __init__(self, machine: Machine, user: str = USER) -> None:
        self.machine = machine
        self.user = user

    def try_ff(self, *words: str, given: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return self.machine.run(["ff", *words], user=self.user, given=given, env=env)

    def ff(self, *words: str, given: str = "", **env: str) -> str:
        done = self.try_ff(*words, given=given, **env)
        assert done.returncode == 0, f"ff {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def refused(self, *words: str, given: str = "", **env: str) -> str:
        """The one line that says why."""
        done = self.try_ff(*words, given=given, **env)
        assert done.returncode != 0, done.stdout
        (line,) = done.stderr.splitlines()
        return line

    def submit(self, *words: str, directory: str) -> int:
        done = self.machine.run(["ff", "submit", *words], user=self.user, cwd=directory)
        assert done.returncode == 0, f"ff submit: {done.stdout}{done.stderr}"
        return int(done.stdout.split()[-1])


class Caller:
    """Calls functions of the test with the network of a machine, one after the other: a look takes no new process."""

    def __init__(self, machine: Machine) -> None:
        namespace = f"/proc/{machine.first}/ns/net"
        self._thread = ThreadPoolExecutor(1, initializer=lambda: enter_namespace(namespace))

    def close(self) -> None:
        self._thread.shutdown()

    def call(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result()
