"""Where a job's nodes are: this machine, or others that are reached by ssh."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Protocol

import msgspec

from fireflyer.cluster.schema.hosts import HostNetwork, NodeOrders
from fireflyer.cluster.schema.wire import SupervisorConfig, supervisor_command
from fireflyer.identity.secrets import Secret
from fireflyer.runtime.processes.guard_command import GuardCommand

__all__ = ["HERE", "Machine", "Ssh", "Starter", "ThisMachine", "remote_command"]

HERE = "127.0.0.1"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the job, as its launcher knows it after the checks."""

    number: int
    name: str
    address: str
    """At which the job's other machines reach it."""
    launcher: str
    """Address of the launcher's machine, as this one reaches it."""
    directory: str
    """Of this job's files there: the run directory, where the machine shares it."""
    shared: bool
    """Whether it shares the run directory, and that of --log-dir."""
    chosen: bool = False
    """The address is that of --interface or --subnet."""
    interface: str = ""
    """Which has that address then."""
    more_networks: tuple[HostNetwork, ...] = ()
    """Others that are used beside it."""

    @property
    def addresses(self) -> str:
        """As FF_ADDRESS: that of each network."""
        return ",".join((self.address, *(one.address for one in self.more_networks)))

    @property
    def interfaces(self) -> str:
        """Of each network, as gloo and NCCL want them."""
        return ",".join((self.interface, *(one.interface for one in self.more_networks)))


class Starter(Protocol):
    """How the guard of a node is started."""

    remote: bool

    def command(self, machine: Machine, config: SupervisorConfig, token: str) -> GuardCommand: ...


class ThisMachine:
    """Its guards end with the launcher; with a lease, also when that hangs."""

    remote = False

    def __init__(self, *, lease_s: float = 0, first_lease_s: float = 0) -> None:
        self._lease_s = lease_s
        self._first_lease_s = first_lease_s

    def command(self, _machine: Machine, config: SupervisorConfig, _token: str) -> GuardCommand:
        return GuardCommand.here(supervisor_command(config), lease_s=self._lease_s, first_lease_s=self._first_lease_s)


class Ssh:
    """By a command such as `ssh -o BatchMode=yes`, which takes the name of a host and a command for its shell. The
    guard ends when the connection does, at the latest with its lease."""

    remote = True

    def __init__(
        self, shell: Sequence[str], python: str, *, workdir: str, secret: Secret, environment: dict[str, str],
        first_lease_ns: int,
    ) -> None:  # fmt: skip
        self._shell, self._python = tuple(shell), python
        self._workdir = workdir
        self._secret = secret
        self._environment = environment
        self._first_lease_ns = first_lease_ns

    def command(self, machine: Machine, config: SupervisorConfig, token: str) -> GuardCommand:
        orders = NodeOrders(
            config=config,
            secret=b"" if machine.shared else self._secret.reveal(),
            directory=machine.directory,
            workdir=self._workdir,
            token=token,
            environment=self._environment,
            first_lease_ns=self._first_lease_ns,
        )
        argv = (*self._shell, machine.name, remote_command(self._python, "node"))
        return GuardCommand(argv, msgspec.json.encode(orders) + b"\n", remote=True)


def remote_command(python: str, what: str) -> str:
    """For the shell of the other machine; it becomes the program, so that signals and the end reach it."""
    return "exec " + shlex.join([python, "-P", "-m", "fireflyer.cluster.supervisor.remote", what])
