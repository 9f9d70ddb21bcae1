"""`python -P -m fireflyer.cluster.agent.start RECORD`: becomes a guard, which no agent is a parent of.

The agent runs it with `Starting` and its payload on standard input, the file for the guard's words as standard output
and that for its log as standard error; other descriptors that it has (the lock by which others see that the guard
lives) go to the guard. It leaves its parent, writes to the file RECORD which process it is, and becomes the guard: so
an agent that is killed meanwhile loses nothing.

Where an account is named the guard stays root's, and only what it starts is the account's: the account can neither end
its guard nor alter what the guard says. Nothing that a user wrote is looked at before the change of the account: the
payload goes on in a descriptor, and the environment is a new one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final, Literal

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import FireflyerError, PermissionDenied, Unreachable, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Account
from fireflyer.cluster.schema.hosts import FACTS_MARK, HostFacts, HostQuestion, NodeOrders
from fireflyer.cluster.supervisor.remote import guard_program, read_orders
from fireflyer.identity.private_files import write_private_file
from fireflyer.runtime.processes import become_account
from fireflyer.runtime.processes.guard import MARKER
from fireflyer.runtime.processes.guard_command import GuardCommand
from fireflyer.runtime.processes.identity import identity_of

__all__ = ["Starting", "as_account", "main", "probe_as", "starting_bytes"]

_MAX_PAYLOAD_BYTES: Final = 16 << 20
_PROBE_S: Final = 30.0
_MAX_ANSWER_BYTES: Final = 256 << 10
_MAX_SHOWN: Final = 1000


class Starting(msgspec.Struct, frozen=True, kw_only=True):
    """What the guard is to start: the supervisor of a node, with `NodeOrders` as JSON, or the launcher of a run, with
    `RunnerOrders`."""

    program: Literal["node", "runner"]
    account: Account | None = None
    until: str = ""
    """File with the end of the lease of the node; empty: there is none."""
    payload: bytes = b""


def starting_bytes(starting: Starting) -> bytes:
    """As the starter reads it."""
    head = msgspec.structs.replace(starting, payload=b"")
    return msgspec.json.encode(head) + b"\n" + starting.payload


def main(arguments: list[str]) -> int:
    """Does not return in the guard."""
    try:
        (record,) = arguments
        starting = decode_json(read_orders(0), Starting)
        payload = _read_payload()
        if os.fork():
            return 0
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        argv, environment = _program(starting, payload)
        identity = identity_of(os.getpid())
        if identity is None:
            raise UsageError("/proc does not show this process; mount it")
        write_private_file(record, msgspec.json.encode(identity))
        os.execve(argv[0], argv, environment)  # noqa: S606
    except (FireflyerError, OSError, *DECODE_ERRORS) as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


def _read_payload() -> bytes:
    with open(0, "rb", closefd=False) as file:
        payload = file.read(_MAX_PAYLOAD_BYTES + 1)
    if len(payload) > _MAX_PAYLOAD_BYTES:
        raise UsageError(f"orders have more than {_MAX_PAYLOAD_BYTES} bytes")
    return payload


def _program(starting: Starting, payload: bytes) -> tuple[tuple[str, ...], dict[str, str]]:
    """The guard, with its environment."""
    account = starting.account
    if starting.program == "node":
        orders = decode_json(payload, NodeOrders)
        if account is None:
            return guard_program(orders, detached=True, until=starting.until)
        command = [sys.executable, "-P", "-m", "fireflyer.cluster.supervisor.remote", "supervisor"]
        lease_s, first_s = orders.config.lease_ns / SECOND, orders.first_lease_ns / SECOND
    else:
        command, lease_s, first_s = [sys.executable, "-P", "-m", "fireflyer.cluster.runner"], 0, 0
    given = str(_kept_in_memory(payload))
    command = [*command, given] if account is None else as_account(account, [*command, given], given)
    guard = GuardCommand.here(
        command,
        lease_s=lease_s,
        first_lease_s=first_s,
        detached=True,
        until=starting.until,
        forward=starting.program == "runner",
    )
    names = os.environ if account is None else (MARKER, "PATH", "LANG", "TZ", "FIREFLYER_FS")
    return guard.argv, {name: os.environ[name] for name in names if name in os.environ}


def as_account(account: Account, command: list[str], kept: str = "") -> list[str]:
    """The command, after this process of root has become the account. `kept`: descriptors, separated by commas."""
    become = [sys.executable, "-I", "-S", become_account.__file__]
    return [*become, msgspec.json.encode(account).decode(), kept or "-", *command]


def probe_as(account: Account, question: HostQuestion) -> HostFacts:
    """What the account sees on this machine. Raises `FireflyerError`."""
    command = as_account(account, [sys.executable, "-P", "-m", "fireflyer.cluster.supervisor.remote", "probe"])
    asked = msgspec.json.encode(question) + b"\n"
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=_PROBE_S, check=False, env={}, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"account {account.name} cannot be asked there: {error}") from None
    for line in done.stdout[:_MAX_ANSWER_BYTES].decode(errors="replace").splitlines():
        if line.startswith(FACTS_MARK):
            try:
                return decode_json(line[len(FACTS_MARK) :], HostFacts)
            except DECODE_ERRORS:
                break
    last = done.stderr[-_MAX_SHOWN:].decode(errors="replace").strip().splitlines()[-1:]
    raise PermissionDenied(f"account {account.name} cannot run Fire-Flyer there: {' '.join(last) or 'it said nothing'}")


def _kept_in_memory(data: bytes) -> int:
    """A descriptor that what is executed inherits: nothing is on disk, and nothing in arguments."""
    fd = os.memfd_create("orders", 0)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
