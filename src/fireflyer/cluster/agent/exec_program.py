"""Becomes a command beside a rank of a run, or carries one connection to a port of the run. A program of its own.

    python -I -S exec_program.py FD

The descriptor FD has the orders as JSON. It runs below a guard, as the account of the run, and looks for the rank's
process then, not before: what it can see is what the account may. It takes that process's environment and working
directory. A port is connected only if a process of the run listens there: other programs of the node have ports on
127.0.0.1, too.

Standard library only. Exit codes: 126 and 127 as a shell has them, 125 where there is no such rank or port.
"""

import contextlib
import fcntl
import json
import os
import pwd
import socket
import sys
import termios
import threading
import time

__all__ = ["addresses_of", "find_rank", "listening_inodes", "main"]

NOT_THERE = 125
_MARKER = "FF_JOB_TOKEN"
_OURS = ("FF_JOB_TOKEN", "FF_LEASE_FD")
_MAX_ENVIRON_BYTES = 4 << 20
_PATIENCE_S = 10.0
_LOOK_S = 0.05
_LISTEN = "0A"
_ALL_V6 = "0" * 32
_V4 = ("0100007F", "00000000", "0000000000000000FFFF00000100007F")
_V6 = ("00000000000000000000000001000000", _ALL_V6)
"""Local addresses of /proc/net/tcp and tcp6 that are reached from this node."""


def _environ(pid: str) -> dict[str, str]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        data = file.read(_MAX_ENVIRON_BYTES)
    pairs = (one.partition(b"=") for one in data.split(b"\0") if b"=" in one)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _of_run(token: str) -> list[tuple[int, dict[str, str]]]:
    """Processes of this account that belong to the run."""
    found = []
    for pid in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if pid.isdigit() and int(pid) != os.getpid() and os.stat(f"/proc/{pid}").st_uid == os.getuid():
                environ = _environ(pid)
                mark = environ.get(_MARKER, "")
                if mark == token or mark.startswith(f"{token}."):
                    found.append((int(pid), environ))
    return found


def find_rank(token: str, rank: int | None) -> tuple[int, dict[str, str]] | None:
    """The process of the rank, or of the lowest one here. A rank leads a session of its own; what it started, and other
    exec sessions, have its variables as well."""
    ranks = []
    for pid, environ in _of_run(token):
        number = environ.get("RANK", "")
        if not number.isdigit() or environ.get(_MARKER, "").startswith(f"{token}.exec."):
            continue
        with contextlib.suppress(OSError):
            if os.getsid(pid) == pid and (rank is None or int(number) == rank):
                ranks.append((int(number), pid, environ))
    return min(ranks, key=lambda one: one[:2])[1:] if ranks else None


def _waited_for_rank(token: str, rank: int | None) -> tuple[int, dict[str, str]] | None:
    """A task is said to run a moment before its ranks do."""
    until_s = time.monotonic() + _PATIENCE_S
    while (found := find_rank(token, rank)) is None and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    return found


def listening_inodes(port: int) -> dict[str, set[str]]:
    """Address of this node -> sockets of which one gets what connects there. A socket of `::` gets what comes by IPv4
    only where no other one is for that; it may also be for IPv6 alone."""
    found: dict[str, set[str]] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                address, _, number = fields[1].partition(":")
                if fields[3] == _LISTEN and int(number, 16) == port:
                    found.setdefault(address, set()).add(fields[9])
    v4 = set().union(*(found.get(address, ()) for address in _V4))
    v6 = set().union(*(found.get(address, ()) for address in _V6))
    return {"127.0.0.1": v4 or found.get(_ALL_V6, set()), "::1": v6}


def addresses_of(token: str, port: int) -> list[str]:
    """Where processes of the run listen on the port, and nobody else."""
    inodes = listening_inodes(port)
    if not any(inodes.values()):
        return []
    ours = set()
    for pid, _ in _of_run(token):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if target.startswith("socket:["):
                        ours.add(target[8:-1])
    return [address for address, sockets in inodes.items() if sockets and sockets <= ours]


def _say(text: str) -> int:
    os.write(2, f"error: {text}\n".encode(errors="replace"))
    return NOT_THERE


def _connect(orders: dict) -> int:  # type: ignore[type-arg]
    port = int(orders["port"])
    addresses = addresses_of(orders["token"], port)
    if not addresses:
        return _say(f"no process of the task listens on port {port} of 127.0.0.1 on this node")
    peer, why = None, ""
    for address in addresses:
        try:
            peer = socket.create_connection((address, port), timeout=10)
            break
        except OSError as error:
            why = str(error)
    if peer is None:
        return _say(f"port {port} cannot be reached: {why}")
    peer.settimeout(None)

    def send() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(0, 65536):
                peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    with contextlib.suppress(OSError):
        while data := peer.recv(65536):
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]
    os._exit(0)


def _execute(orders: dict) -> int:  # type: ignore[type-arg]
    rank = orders["rank"]
    found = _waited_for_rank(orders["token"], rank)
    if found is None:
        which = "no rank" if rank is None else f"rank {rank} does not run"
        return _say(f"{which} {'runs ' if rank is None else ''}on this node now; name another, or try again")
    pid, environ = found
    environ = {name: value for name, value in environ.items() if name not in _OURS}
    environ |= {name: os.environ[name] for name in _OURS[:1] if name in os.environ}
    if orders["terminal"]:
        environ["TERM"] = orders["term"] or "dumb"
    try:
        os.chdir(f"/proc/{pid}/cwd")
        environ["PWD"] = os.getcwd()
    except OSError as error:
        return _say(f"the working directory of the rank cannot be entered: {error}")
    argv = orders["argv"] or [_shell(environ)]
    try:
        os.execvpe(argv[0], argv, environ)  # noqa: S606
    except OSError as error:
        os.write(2, f"error: {argv[0]}: {error.strerror}\n".encode(errors="replace"))
        return 127 if isinstance(error, FileNotFoundError) else 126


def _shell(environ: dict[str, str]) -> str:
    try:
        own = pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        own = ""
    for shell in (own, environ.get("SHELL", ""), "/bin/bash", "/bin/sh"):
        if shell and os.access(shell, os.X_OK) and not shell.endswith(("/nologin", "/false")):
            return shell
    return "/bin/sh"


def main(arguments: list[str]) -> int:
    """Returns only when it cannot be done, or with a connection's end."""
    with open(int(arguments[0]), "rb") as file:
        orders = json.load(file)
    os.setsid()
    for number, fd in enumerate(orders["fds"]):
        os.dup2(fd, number)
    for fd in set(orders["fds"]):
        if fd > 2:
            os.close(fd)
    if orders["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    return _connect(orders) if orders["port"] else _execute(orders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
