"""`python -P -m fireflyer.cluster.supervisor.remote probe|node|supervisor`: what a launcher runs on another machine,
over ssh or as it likes. Each reads one line of JSON from its standard input.

`probe` answers the launcher's question about this machine and ends. `node` becomes the guard of one node: it owns the
ranks, and kills them when its input ends or its lease does. `supervisor FD` is run by a guard of another account: it
reads the line from a descriptor and becomes the supervisor.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import os
import platform
import shutil
import socket
import sys
import time
from itertools import starmap

import msgspec

import fireflyer
from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.hosts import (
    FACTS_MARK,
    MAX_ORDERS_BYTES,
    HostFacts,
    HostNetwork,
    HostQuestion,
    NodeOrders,
)
from fireflyer.cluster.schema.runner import TOKEN_NAME
from fireflyer.cluster.schema.wire import SupervisorConfig, supervisor_command
from fireflyer.identity.private_files import require_own_directory, write_private_file
from fireflyer.identity.secrets import Secret, save_secret
from fireflyer.runtime.address import Address
from fireflyer.runtime.devices import find_devices
from fireflyer.runtime.interfaces import own_addresses
from fireflyer.runtime.processes.guard import MARKER
from fireflyer.runtime.processes.guard_command import GuardCommand

__all__ = ["guard_program", "main", "make_private", "probe", "read_orders"]

_MAX_SCRIPT_BYTES = 64 << 20
_LOCK = "lock"
_REACH_S = 5.0
_HERE = "127.0.0.1"


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["supervisor"]:
            config, environment = _prepare(decode_json(read_orders(int(arguments[1])), NodeOrders))
            command = supervisor_command(config)
            os.execve(command[0], command, environment)  # noqa: S606
        line = read_orders(0)
        if arguments == ["probe"]:
            facts = probe(decode_json(line, HostQuestion))
            print(FACTS_MARK + msgspec.json.encode(facts).decode(), flush=True)
        else:
            argv, environment = guard_program(decode_json(line, NodeOrders))
            os.execve(argv[0], argv, environment)  # noqa: S606
    except (FireflyerError, *DECODE_ERRORS) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def read_orders(fd: int) -> bytes:
    """Up to the end of a line, and not a byte more: what follows is the guard's. Raises `UsageError`."""
    line = b""
    while not line.endswith(b"\n"):
        if len(line) > MAX_ORDERS_BYTES or not (byte := os.read(fd, 1)):
            raise UsageError("no line of orders on the standard input; a launcher starts this program, not a person")
        line += byte
    return line


def probe(question: HostQuestion) -> HostFacts:
    """What is so on this machine. Changes nothing. Raises `FireflyerError`."""
    # Brings asyncio, for which the guards that are started from here need not wait.
    from fireflyer.runtime.master_port import count_free_ports, port_is_free

    devices = find_devices(os.environ)
    choice = question.addresses
    found = own_addresses() if choice else []
    chosen = choice.choose_all(found)
    complete = len(chosen) == len(choice.each())
    (interface, address), *more = chosen if complete and chosen else [("", "")]
    connection = os.environ.get("SSH_CONNECTION", "").split()
    client = connection[0] if len(connection) == 4 else ""
    path = _script_path(question)
    return HostFacts(
        version=fireflyer.__version__,
        python=platform.python_version(),
        hostname=socket.gethostname(),
        boot_id=_text("/proc/sys/kernel/random/boot_id"),
        namespace=_link("/proc/self/ns/net"),
        uid=os.geteuid(),
        cores=devices.cores,
        gpus=devices.gpus,
        has_workdir=os.path.isdir(question.workdir),
        script_sha256=_sha256(path) if path and question.kind != "program" else "",
        has_script=path is not None,
        shares_run_dir=all(
            os.path.isfile(os.path.join(directory, question.mark))
            for directory in (question.run_dir, question.stream_dir or question.run_dir)
        ),
        client=client,
        server=connection[2] if len(connection) == 4 else "",
        time_ns=time.time_ns(),
        address=address,
        interface=interface,
        no_address=choice.fault(found) if choice and not address else "",
        more_networks=tuple(starmap(HostNetwork, more)),
        free_ports=0 if question.ports is None else count_free_ports(question.ports, question.ports_needed),
        master_port_taken=bool(question.master_port) and not port_is_free(question.master_port),
        launcher_not_reached=_not_reached(question, client),
    )


def _not_reached(question: HostQuestion, client: str) -> str:
    """What ranks on this machine will do is tried: to connect to the launcher."""
    if not question.control_port:
        return ""
    address = Address(question.control_address or client or _HERE, question.control_port)
    try:
        with socket.create_connection((address.host, address.port), _REACH_S):
            return ""
    except TimeoutError:
        return f"{address} (no answer within {_REACH_S:g} s)"
    except OSError as error:
        return f"{address} ({error.strerror or error})"


def _script_path(question: HostQuestion) -> str | None:
    if question.kind == "program":
        return shutil.which(os.path.join(question.workdir, question.script)) or shutil.which(question.script)
    if question.kind == "module":
        spec = importlib.machinery.PathFinder.find_spec(
            question.script.partition(".")[0], [question.workdir, *sys.path]
        )
        return None if spec is None else (spec.origin or "")
    path = os.path.join(question.workdir, question.script)
    return path if os.path.isfile(path) else None


def _sha256(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(_MAX_SCRIPT_BYTES)).hexdigest()
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(100).strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def guard_program(
    orders: NodeOrders, *, detached: bool = False, until: str = ""
) -> tuple[tuple[str, ...], dict[str, str]]:
    """What this process is to become, with its environment. Makes the files of the job here, and goes to its working
    directory. Raises `FireflyerError`."""
    config, environment = _prepare(orders)
    how = GuardCommand.here(
        supervisor_command(config),
        lease_s=config.lease_ns / SECOND,
        first_lease_s=orders.first_lease_ns / SECOND,
        detached=detached,
        until=until,
    )
    return how.argv, environment


def _prepare(orders: NodeOrders) -> tuple[SupervisorConfig, dict[str, str]]:
    """Makes the files of the job, goes to its working directory; the supervisor's configuration and environment."""
    config = orders.config
    if orders.secret:
        make_private(orders.directory)
        save_secret(Secret(orders.secret), config.secret_file)
    told = {}
    if orders.secret and orders.user_token:
        told["FF_TOKEN_FILE"] = os.path.join(orders.directory, TOKEN_NAME)
        write_private_file(told["FF_TOKEN_FILE"], orders.user_token.encode())
    try:
        os.chdir(orders.workdir)
    except OSError as error:
        raise translate_os_error(error, f"working directory {orders.workdir}") from error
    return config, {**os.environ, **orders.environment, **told, MARKER: orders.token}


def make_private(directory: str) -> None:
    """Nobody else may put a file there, nor a link in its place. What earlier jobs left beside it is removed; the lock
    of a job whose guard lives is held by that guard. Raises `FireflyerError`."""
    parent = os.path.dirname(directory)
    try:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        require_own_directory(parent)
        one_at_a_time = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # else a job that has made its directory, and not locked it yet, would be taken for dead
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            for name in os.listdir(parent):
                _remove_if_dead(os.path.join(parent, name))
            os.makedirs(directory, mode=0o700, exist_ok=True)
            require_own_directory(directory)
            os.set_inheritable(_locked(directory), True)
        finally:
            os.close(one_at_a_time)
    except OSError as error:
        raise translate_os_error(error, f"make {directory}") from error


def _locked(directory: str) -> int:
    """Raises `BlockingIOError` where a living guard has it."""
    fd = os.open(os.path.join(directory, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_if_dead(directory: str) -> None:
    try:
        fd = _locked(directory)
    except OSError:
        return
    shutil.rmtree(directory, ignore_errors=True)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
