"""The process that all machines end with: `python -m tests.support.machines.supervisor ORDER CHANNEL OWNER`.

It is the first process of a process namespace, with network, mounts and IPC of its own, and starts one process for each
machine, which moves into namespaces of the machine and forks that one's first process (its init). When the supervisor
ends, the kernel kills everything that is in its process namespace, and those of the machines are in it; with the last
process the mounts and interfaces go. It ends when

- the test closes its end of CHANNEL, a socket, or its process OWNER, a pidfd, has ended;
- the program `unshare`, which started it, has ended (parent-death signal);
- somebody kills it.

To start: bridges, keys and files; for each machine a process in new namespaces; its cables; then the machine makes its
root, its addresses and its sshd, and says on the channel that it is ready. The kernel tells the test who said so.
Standard library only; nothing here waits for time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import Final, NoReturn

from tests.support.machines import filesystem, plan, sshd
from tests.support.machines.kernel import ISOLATED, die_with_parent, mount, unshare
from tests.support.machines.plan import Order

__all__ = ["main"]

_SETTINGS: Final = {"net/ipv6/conf/all/accept_dad": "0", "net/ipv6/conf/default/accept_dad": "0"}


def main() -> None:
    order = Order.from_json(sys.argv[1])
    channel, owner = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # of a terminal; the test says when to end
    try:
        _start(order, channel)
    except Exception as error:
        _say(channel, error=f"{type(error).__name__}: {error}")
        raise
    _say(channel, ready="")
    _watch(channel, owner)


def _start(order: Order, channel: socket.socket) -> None:
    mount("tmpfs", order.base, "tmpfs", options="mode=700")
    mount("proc", "/proc", "proc")
    _ip(plan.bridge_lines(order))
    _prepare_files(order)
    started = {name: _start_machine(order, name, channel) for name in order.names}
    _ip(line for name, (pid, _) in started.items() for line in plan.cable_lines(order, name, pid))
    for _, go in started.values():
        os.write(go, b".")
        os.close(go)


def _watch(channel: socket.socket, owner: int) -> None:
    """Until the test has ended, reaping meanwhile."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    for fd in (channel.fileno(), owner, wake_read):
        poll.register(fd, select.POLLIN)
    _reap()
    while [fd for fd, _ in poll.poll()] == [wake_read]:
        os.read(wake_read, 4096)
        _reap()


def _prepare_files(order: Order) -> None:
    """Below `order.base` for each machine: `NAME/etc`, `NAME/home` and the keys in them."""
    passwd, group = (_read(f"/etc/{name}") for name in ("passwd", "group"))
    etc = plan.accounts(passwd, group) | {"hosts": plan.hosts_file(order), "resolv.conf": ""}
    for name in order.names:
        os.makedirs(f"{order.base}/{name}/etc/ssh")
        os.makedirs(f"{order.base}/{name}/home/.ssh")
        for file, text in etc.items():
            _write(f"{order.base}/{name}/etc/{file}", text)
        _write(f"{order.base}/{name}/etc/hostname", f"{name}\n")
    keys = _make_keys(order)
    known = plan.known_hosts(order, {name: host for name, (host, _) in keys.items()})
    authorized = "".join(user + "\n" for _, user in keys.values())
    for name in order.names:
        ssh = f"{order.base}/{name}/etc/ssh"
        _write(f"{ssh}/sshd_config", plan.sshd_config())
        _write(f"{ssh}/ssh_known_hosts", known)
        _write(f"{ssh}/ssh_config", "")
        _write(f"{order.base}/{name}/home/.ssh/authorized_keys", authorized)


def _make_keys(order: Order) -> dict[str, tuple[str, str]]:
    """Public keys of each machine: of its sshd, of its users."""
    files = {
        name: (f"{order.base}/{name}/etc/ssh/ssh_host_ed25519_key", f"{order.base}/{name}/home/.ssh/id_ed25519")
        for name in order.names
    }
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", ""]
    running = [subprocess.Popen([*command, "-C", name, "-f", file]) for name, both in files.items() for file in both]
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError("ssh-keygen failed; see what it wrote")
    return {name: (_read(f"{host}.pub").strip(), _read(f"{user}.pub").strip()) for name, (host, user) in files.items()}


def _start_machine(order: Order, name: str, channel: socket.socket) -> tuple[int, int]:
    """A process in the machine's namespaces, and a pipe to write to when its cables are there."""
    go_read, go_write = os.pipe()
    moved_read, moved_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go_write)
            unshare(ISOLATED)
            os.close(moved_write)
            first = os.fork()
            if first == 0:
                _run_machine(order, name, channel, go_read)
            channel.close()
            os.waitpid(first, 0)
        except BaseException as error:
            _say(channel, error=f"machine {name}: {type(error).__name__}: {error}")
        finally:
            os._exit(1)
    os.close(go_read)
    os.close(moved_write)
    os.read(moved_read, 1)
    os.close(moved_read)
    return pid, go_write


def _run_machine(order: Order, name: str, channel: socket.socket, go: int) -> NoReturn:
    """As its first process. Reaps until it is killed."""
    die_with_parent()
    socket.sethostname(name)
    filesystem.move_into_root(order, name)
    for path, value in _SETTINGS.items():
        _write(f"/proc/sys/{path}", value)
    os.read(go, 1)
    os.close(go)
    _ip(plan.interface_lines(order, name))
    sshd.start()
    filesystem.finish_root()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    _say(channel, ready=name)
    channel.close()
    while True:
        _reap()
        signal.sigwait([signal.SIGCHLD])


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _ip(lines: Iterable[str]) -> None:
    script = "\n".join(lines) + "\n"
    done = subprocess.run(["ip", "-batch", "-"], input=script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip: {done.stderr.strip()} (in: {script})")


def _say(channel: socket.socket, **words: str) -> None:
    try:
        channel.send(json.dumps(words).encode())
    except OSError:
        pass  # the test has ended, and so will this process


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


if __name__ == "__main__":
    main()
