"""Manager processes, and storage nodes that are played before them by the real machine and the real connections."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
from tests.support.patience import allowed_s

from fireflyer.accounts.managing import UsersClient
from fireflyer.base.toml_text import to_toml
from fireflyer.base.units import SECOND
from fireflyer.fs.control import ControlClient
from fireflyer.fs.core.chain.node_membership import (
    Effect,
    End,
    Event,
    ManagerReply,
    NodeMembership,
    ProcessIdentity,
    SendToManager,
    TakeRouting,
    Tick,
)
from fireflyer.fs.service.manager.config import ManagerConfig
from fireflyer.fs.service.meta.config import MetaSettings
from fireflyer.identity import NodeCredential, Secret, UserCredential, new_secret, save_secret

__all__ = ["FakeNode", "ManagerProcess", "Site", "seconds_since"]

LIMIT_S = 60.0


class Site:
    """A node secret and a store, as all managers of a cluster have them."""

    def __init__(self, directory: Path, store: str) -> None:
        self.directory = directory
        self.store = store
        self.secret: Secret = new_secret()
        self.secret_file = str(directory / "secret")
        save_secret(self.secret, self.secret_file)

    @property
    def service(self) -> NodeCredential:
        return NodeCredential(self.secret, "test")

    async def user(self, manager: ManagerProcess, name: str) -> UserCredential:
        """A new one."""
        async with UsersClient([manager.address], self.service) as users:
            await users.create_user(name)
            return UserCredential(await users.issue(name))

    def manager(
        self,
        name: str,
        *,
        listen: str = "127.0.0.1:0",
        cluster: str = "test",
        lease_ms: int = 400,
        serve_files: bool = False,
    ) -> str:
        """A configuration's path."""
        config = ManagerConfig(
            name=name,
            cluster=cluster,
            store=self.store,
            listen=listen,
            secret_file=self.secret_file,
            failure_timeout_ms=2400,
            lease_ms=lease_ms,
            serve_files=serve_files,
            files=MetaSettings(trusted_root=True),
        )
        path = self.directory / f"{name}.toml"
        path.write_text(to_toml(msgspec.to_builtins(config)))
        return str(path)


class ManagerProcess:
    """Killed at the end of the block at the latest.

    `start`, `kill` and `end` block until it is so: where something else goes on in the event loop, as heartbeats of
    played nodes do, they are called with `asyncio.to_thread`."""

    def __init__(self, config: str, *arguments: str) -> None:
        """`arguments`: in the place of `manager`."""
        self._config = config
        self._arguments = arguments or ("manager",)
        self.address = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()

    def start(self) -> None:
        """Returns when it listens."""
        command = [sys.executable, "-P", "-m", "fireflyer", "fs", *self._arguments, self._config]
        log = open(f"{self._config}.log", "ab")  # noqa: SIM115
        with log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("ready "), Path(f"{self._config}.log").read_text()
        self.address = line.split()[1]
        config = Path(self._config)
        config.write_text(config.read_text().replace("127.0.0.1:0", self.address))  # where it starts again

    def kill(self) -> None:
        process = self._take()
        process.kill()
        process.wait(allowed_s(LIMIT_S))

    def end(self) -> int:
        process = self._take()
        process.send_signal(signal.SIGTERM)
        return process.wait(allowed_s(LIMIT_S))

    def _take(self) -> subprocess.Popen[str]:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        process.stdout.close()
        return process


class FakeNode:
    """Registers and keeps its fence open, as a storage process does; it has no data."""

    def __init__(self, node: int, targets: tuple[int, ...], managers: list[str], site: Site) -> None:
        identity = ProcessIdentity(node, f"nonce-{os.urandom(8).hex()}", f"127.0.0.1:{node}", "machine", "boot", "test")
        self.membership = NodeMembership(identity, dict.fromkeys(targets, True), managers)
        self.told: list[ManagerReply] = []
        self.changes = 0
        """How often it was given routing."""
        self.ended = False
        self._changed = asyncio.Condition()
        self._control = ControlClient(NodeCredential(site.secret, f"node {node}"), self._on_told)
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def wait(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(allowed_s(LIMIT_S)), self._changed:
            await self._changed.wait_for(true)

    def serves(self, target: int) -> bool:
        return self.membership.serves(time.monotonic_ns(), target)

    async def close(self) -> None:
        self._ticking.cancel()
        await asyncio.wait([self._ticking])
        await self._control.close()

    async def _tick(self) -> None:
        while True:
            self._feed(Tick())
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(2.4 / 16)

    def _on_told(self, told: ManagerReply) -> None:
        self.told.append(told)
        self._feed(told)

    def _feed(self, event: Event) -> None:
        for effect in self.membership.handle(time.monotonic_ns(), event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendToManager():
                self._control.ask(effect)
            case TakeRouting():
                self.changes += 1
            case End():
                self.ended = True
            case _:
                pass


def seconds_since(began_ns: int) -> float:
    return (time.monotonic_ns() - began_ns) / SECOND
