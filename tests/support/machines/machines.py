"""Several machines on this one: a job on several nodes is tested with real hostnames, sshd, links and file systems.

    with Machines(["a", "b", "c"], shared=[directory]) as machines:
        done = machines["a"].run(["ssh", "b", "hostname"])
        machines.cut("b")

Each machine has namespaces of its own for processes, network, mounts, IPC and hostname, and an sshd. Private are /tmp,
/dev/shm, /run, /var/tmp, the homes of root and of an unprivileged user, and /machine-work, where tests run; the rest of
the host, Python and this repository with it, is there read-only; `shared` directories are the same in all. A machine
reaches the others and nothing else. `plan` says which addresses and files there are.

All of it ends with the test's process, however that ends: see `supervisor`. Root is needed: `missing()`.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import pytest
from tests.support.machines import plan
from tests.support.machines.plan import HOME, USER, WORK, Order
from tests.support.machines.processes import living
from tests.support.machines.sshd import LOG as SSHD_LOG
from tests.support.machines.sshd import PROGRAM as SSHD
from tests.support.patience import allowed_s

__all__ = ["USER", "WORK", "Machine", "MachineProcess", "Machines", "missing", "needs_machines"]

_START_S: Final = 30.0
_END_S: Final = 30.0
_ROOT: Final = Path(__file__).parents[3]
_PYTHON: Final = (sys.executable, "-E", "-s", "-S", "-m")
_TOOLS: Final = ("ip", "bridge", "unshare", "nsenter", "ssh", "ssh-keygen", SSHD)
_BASES: Final = ("/srv", "/mnt", "/media", "/opt")
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MOST_WORDS_BYTES: Final = 1 << 16
_Stream = int | IO[str] | None


@functools.cache
def missing() -> str:
    """Why there can be no machines here, in a line; empty where there can be."""
    if os.geteuid() != 0:
        return "only root makes machines of namespaces"
    tools = [os.path.basename(name) for name in _TOOLS if shutil.which(name, path=_SYSTEM_PATH) is None]
    if tools:
        return f"no machines: {', '.join(tools)} not found (packages iproute2, util-linux, openssh-server)"
    tries = (
        "mount -t tmpfs none /tmp && mount --bind /usr /tmp && ip link add ffa type veth && ip link add ffb type bridge"
    )
    command = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "sh", "-c", tries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no machines: {done.stderr.strip()[-200:]} (CAP_SYS_ADMIN and IPv6 are needed)" if done.returncode else ""


_MISSING: Final = missing()
needs_machines: Final = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)


class MachineProcess(subprocess.Popen[str]):
    """A process in a machine. Signals and the exit code are those of the command; `pid` is that of a process outside,
    which is its parent, `pid_inside` what the machine calls it."""

    pid_inside: int


class Machine:
    """One of `Machines`. Methods raise `OSError` where a command cannot be started."""

    def __init__(self, order: Order, name: str, first: int) -> None:
        self.name = name
        self.first = first
        """Its first process, as this process calls it."""
        self._place = order.place(name)
        self._networks = order.networks
        self._started: list[MachineProcess] = []

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def address6(self) -> str:
        return self.addresses6[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """IPv4, one for each network."""
        return tuple(plan.address(self._place, network) for network in range(self._networks))

    @property
    def addresses6(self) -> tuple[str, ...]:
        return tuple(plan.address6(self._place, network) for network in range(self._networks))

    def path(self, inside: str) -> Path:
        """Where this process finds an absolute path of the machine, while the machine runs."""
        return Path(f"/proc/{self.first}/root{inside}")

    def environment(self, user: str = "root") -> dict[str, str]:
        """What a login has, and first in PATH the directory of the Python that runs the tests."""
        path = f"{os.path.dirname(sys.executable)}:{_SYSTEM_PATH}"
        home = {"root": "/root", USER: HOME}[user]
        return {"PATH": path, "HOME": home, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "LANG": "C.UTF-8"}

    def start(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] = WORK,
        env: Mapping[str, str] | None = None,
        user: str = "root",
        stdin: _Stream = subprocess.DEVNULL,
        stdout: _Stream = None,
        stderr: _Stream = None,
    ) -> MachineProcess:
        """Returns when the command runs. `env` is added to `environment`. It is killed at the end, at a reset, and when
        the returned process is."""
        status, written = os.pipe()
        entry = [*_PYTHON, "tests.support.machines.entry", str(self.first), user, os.fspath(cwd), str(written)]
        try:
            process = MachineProcess(
                [*entry, *command],
                cwd=_ROOT,
                env=self.environment(user) | dict(env or {}),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                text=True,
                pass_fds=(written,),
            )
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(written)
        self._started.append(process)
        with open(status, encoding="utf-8") as file:
            said = file.read().splitlines()
        if not said or not said[-1].startswith("started "):
            self._end(process)
            _, number, text = said[-1].split(" ", 2) if said else ("", "5", "it was killed before it ran")
            raise OSError(int(number), f"{command[0]} on machine {self.name}: {text}")
        process.pid_inside = int(said[-1].split()[1])
        return process

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] = WORK,
        env: Mapping[str, str] | None = None,
        user: str = "root",
        given: str = "",
        timeout_s: float = 60.0,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Both outputs as text; `given` is what its standard input holds. The limit grows with the load; raises
        `subprocess.TimeoutExpired` after it, having killed the command. `check`: raises `AssertionError` with its
        outputs when it fails."""
        process = self.start(
            command,
            cwd=cwd,
            env=env,
            user=user,
            stdin=subprocess.PIPE if given else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, error = process.communicate(given or None, timeout=allowed_s(timeout_s))
        finally:
            self._end(process)
        done = subprocess.CompletedProcess(list(command), process.returncode, out, error)
        assert not check or done.returncode == 0, f"{self.name}: {command}: {done.returncode}\n{out}{error}"
        return done

    def processes(self) -> list[tuple[int, list[str]]]:
        """All living ones but the machine's first and those of sshd, by the numbers that the machine gives them."""
        found = living(str(self.path("/proc")))
        sshd = os.path.realpath(SSHD)
        return [(one.pid, one.argv) for one in found if one.pid != 1 and one.program != sshd]

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """`pid` as the machine calls it. Raises `ProcessLookupError`."""
        try:
            fd = os.open(self.path(f"/proc/{pid}"), os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError as error:
            raise ProcessLookupError(f"no process {pid} on machine {self.name}") from error
        try:
            signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)

    def sshd_log(self) -> str:
        return self.path(SSHD_LOG).read_text(encoding="utf-8", errors="replace")

    def end_started(self) -> None:
        """Kills what `start` has started and reaps it."""
        for process in list(self._started):
            self._end(process)

    def _end(self, process: MachineProcess) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        self._started.remove(process)


class Machines(Mapping[str, Machine]):
    """The machines by name. A context manager; `reset` makes them as good as new between tests."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        shared: Sequence[str | os.PathLike[str]] = (),
        private: Sequence[str] = (),
        nics: int = 1,
    ) -> None:
        """`shared`: directories that all machines see as they are. `private`: more directories of the host in whose
        place each machine has an empty one. `nics`: networks, and interfaces of each machine. Raises `ValueError`."""
        shared_paths = tuple(os.path.realpath(path) for path in shared)
        lacking = [path for path in (*shared_paths, *private) if not os.path.isdir(path)]
        if lacking:
            raise ValueError(f"{lacking[0]}: directories to be shared or private must exist")
        visible = _outermost([str(_ROOT), os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)])
        needed = (*shared_paths, *visible, *private)
        bases = [one for one in _BASES if os.path.isdir(one) and not any(_lies_in(path, one) for path in needed)]
        if not bases:
            raise ValueError(f"one of {', '.join(_BASES)} must exist and hold none of {', '.join(needed)}")
        self._order = Order(tuple(names), nics, bases[0], visible, shared_paths, tuple(private))
        self._order.check()
        hidden = [path for path in visible if any(_lies_in(path, one) for one in self._order.private_modes)]
        self._order = self._order._replace(visible=tuple(hidden))
        self._machines: dict[str, Machine] = {}
        self.supervisor = 0
        self._cut: set[tuple[str, str, int]] = set()

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._order.names)

    def __len__(self) -> int:
        return len(self._order.names)

    def __enter__(self) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        owner = os.pidfd_open(os.getpid())
        self._channel = ours
        isolated = ["unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        program = [*_PYTHON, "tests.support.machines.supervisor", self._order.to_json()]
        self._process = subprocess.Popen(
            [*isolated, *program, str(theirs.fileno()), str(owner)],
            cwd=_ROOT,
            env={"PATH": _SYSTEM_PATH, "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), owner),
        )
        theirs.close()
        os.close(owner)
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Returns when all processes of the machines have ended."""
        for machine in self._machines.values():
            machine.end_started()
        self._machines = {}
        self._channel.close()
        try:
            self._process.wait(allowed_s(_END_S))
        finally:
            self._process.kill()
            self._process.wait()

    def cut(self, name: str, from_: str | None = None, *, nic: int | None = None) -> None:
        """From now on nothing that a machine sends arrives anywhere, and nothing arrives there; `from_`: only between
        these two; `nic`: only on this network. No program is told: no RST, no ICMP, interfaces stay up."""
        self._change(name, from_, nic, reachable=False)

    def heal(self, name: str, from_: str | None = None, *, nic: int | None = None) -> None:
        """Takes back the `cut` with the same arguments."""
        self._change(name, from_, nic, reachable=True)

    def reset(self) -> None:
        """Heals all links, kills all processes but sshd, unmounts, empties private directories (shared ones stay)."""
        for name, other, nic in list(self._cut):
            self.heal(name, other or None, nic=nic)
        for machine in self.values():
            machine.end_started()
        program = [*_PYTHON, "tests.support.machines.reset", *self._order.private_modes]
        running = {name: machine.start(program, cwd=_ROOT) for name, machine in self.items()}
        codes = {name: process.wait(allowed_s(_END_S)) for name, process in running.items()}
        for machine in self.values():
            machine.end_started()
        if any(codes.values()):
            raise RuntimeError(f"reset failed (exit codes: {codes}); see what it wrote")

    def _change(self, name: str, other: str | None, nic: int | None, *, reachable: bool) -> None:
        for network in range(self._order.networks) if nic is None else (nic,):
            if other is None:
                state = 3 if reachable else 0  # forwarding, disabled
                line = f"link set dev {plan.port(self._order.place(name), network)} state {state}"
                _run_in_network(self.supervisor, ["bridge", *line.split()])
            else:
                for one, peer in ((name, other), (other, name)):
                    lines = "\n".join(plan.neighbour_lines(self._order, peer, network, reachable=reachable))
                    _run_in_network(self[one].first, ["ip", "-batch", "-"], lines + "\n")
            key = (name, other or "", network)
            self._cut.discard(key) if reachable else self._cut.add(key)

    def _await_ready(self) -> None:
        """Who says so is told by the kernel."""
        deadline_s = time.monotonic() + allowed_s(_START_S)
        found: dict[str, int] = {}
        while len(found) < len(self._order.names) + 1:
            if not select.select([self._channel], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise TimeoutError(f"of machines {list(self._order.names)} only {sorted(found)} are ready")
            room = socket.CMSG_SPACE(struct.calcsize("3i"))
            words, ancillary, _, _ = self._channel.recvmsg(_MOST_WORDS_BYTES, room)
            said = json.loads(words) if words else {"error": "the supervisor has ended; see what it wrote"}
            if "error" in said:
                raise RuntimeError(f"machines did not start: {said['error']}")
            found[said["ready"]] = struct.unpack("3i", ancillary[0][2])[0]
        self.supervisor = found[""]
        self._machines = {name: Machine(self._order, name, found[name]) for name in self._order.names}


def _run_in_network(pid: int, command: Sequence[str], script: str = "") -> None:
    entered = ["nsenter", f"--net=/proc/{pid}/ns/net", *command]
    done = subprocess.run(entered, input=script, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()} {script}")


def _lies_in(path: str, directory: str) -> bool:
    return os.path.commonpath([path, directory]) == directory


def _outermost(paths: Sequence[str]) -> tuple[str, ...]:
    """Without repetitions and what lies in another one."""
    return tuple(path for path in sorted(set(paths)) if not any(path != one and _lies_in(path, one) for one in paths))
