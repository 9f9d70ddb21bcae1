"""Processes that start quickly: forks of one that has imported already what they need.

`python -m MODULE ARGUMENT` spends 0.2 s of a processor on NumPy and 2 s on torch before it does anything, and the tests
start hundreds of ranks. Here one process for each set of imports is started when first needed, and forks the others;
one that needs more than torch is itself a fork of the one that has torch. Each is a process like any other, with its
own signals, pipes and exit status, and ends as the interpreter ends.

What forks have in common and real ranks have not is undone, or stays: the places of their arrays in memory are shifted
by a random distance (a rank that took another's address for its own would be found out), chance is seeded anew; the
order of sets of strings stays the same in all of them.
"""

from __future__ import annotations

import atexit
import gc
import json
import mmap
import os
import random
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

__all__ = ["NUMPY", "TORCH", "Forked"]

REPOSITORY: Final = Path(__file__).parents[3]
NUMPY: Final = ("numpy", "numpy.random", "fireflyer.collectives", "fireflyer.runtime.store")
TORCH: Final = (
    *NUMPY,
    "torch",
    "torch._dynamo",  # which optimizers and functional collectives import when they are first used
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "fireflyer.training",
    "fireflyer.recipes.trainer.run",  # and with it what most ranks of tests of training import
    "fireflyer.collectives.torch_fsdp",
    "fireflyer.collectives.torch_group",
    "fireflyer.collectives.torch_hooks",
)
MAX_REQUEST_BYTES: Final = 128 * 1024
_STATUS: Final = "little"
_PAGE: Final = 4096


class Forked:
    """A process that runs `module` with one argument; has the methods of `subprocess.Popen` that the tests use."""

    def __init__(
        self,
        module: str,
        argument: str,
        *,
        imports: tuple[str, ...],
        env: Mapping[str, str] | None = None,
        errors: bool = False,
        stdin: int | None = None,
    ) -> None:
        """Its standard input and output are pipes; its errors too where `errors`, else they go where ours go. `stdin`:
        a descriptor in place of the first pipe; it stays open here."""
        self.returncode: int | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status = ours
        reads_in, writes_in = os.pipe()
        reads_out, writes_out = os.pipe()
        reads_err, writes_err = os.pipe() if errors else (-1, os.dup(2))
        self.stdin: IO[str] = os.fdopen(writes_in, "w")
        self.stdout: IO[str] = os.fdopen(reads_out)
        self.stderr: IO[str] | None = os.fdopen(reads_err) if errors else None
        given = (theirs.fileno(), reads_in if stdin is None else stdin, writes_out, writes_err)
        try:
            _server(imports).ask({"module": module, "argument": argument, "env": dict(env or os.environ)}, given)
        finally:
            theirs.close()
            for fd in (reads_in, writes_out, writes_err):
                os.close(fd)
        self.pid = int.from_bytes(ours.recv(8), _STATUS)
        assert self.pid > 0, f"the process that forks {module} has ended; see its errors above"
        self._pidfd = _open_pid(self.pid)

    def poll(self) -> int | None:
        return self._result(0)

    def wait(self, timeout: float | None = None) -> int:
        result = self._result(timeout)
        if result is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return result

    def _result(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if not poll.poll(None if timeout_s is None else timeout_s * 1000):
                return None
            self.returncode = int.from_bytes(self._status.recv(8), _STATUS, signed=True)
            self._status.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None and self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # it has just ended

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it printed, after it has ended."""
        if not self.stdin.closed:
            self.stdin.close()
        texts = {"out": "", "err": ""}

        def read(name: str, file: IO[str]) -> None:
            texts[name] = file.read()
            file.close()

        files = {"out": self.stdout, "err": self.stderr}
        threads = [
            threading.Thread(target=read, args=(name, file), daemon=True)
            for name, file in files.items()
            if file is not None and not file.closed
        ]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join()
        return texts["out"], texts["err"]


def _open_pid(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1  # it has ended already


class _Server:
    """Our end of a process that forks."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # a thread would not be forked
        self._process: subprocess.Popen[bytes] | Forked
        with theirs:
            if len(imports) > len(TORCH) and imports[: len(TORCH)] == TORCH:
                argument = " ".join(("0", *imports[len(TORCH) :]))
                self._process = Forked(__name__, argument, imports=TORCH, env=environment, stdin=theirs.fileno())
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, f"{theirs.fileno()} {' '.join(imports)}"],
                    cwd=REPOSITORY,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], fds: tuple[int, ...]) -> None:
        data = json.dumps(request).encode()
        assert len(data) <= MAX_REQUEST_BYTES
        with self._lock:
            socket.send_fds(self._control, [data], list(fds))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


_servers: dict[tuple[str, ...], _Server] = {}
_servers_lock = threading.RLock()


def _server(imports: tuple[str, ...]) -> _Server:
    with _servers_lock:
        if imports not in _servers:
            _servers[imports] = _Server(imports)
        return _servers[imports]


# --- in the process that forks ---


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """None when nobody asks any more; in a child, what it was asked to run."""
    waker, wakes = os.pipe()
    for fd in (waker, wakes):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control.fileno(), waker], [], [])
        if waker in ready:
            os.read(waker, 4096)
            _reap(children)
        if control.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 4)
        if not data:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return None
        status = socket.socket(fileno=fds[0])
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sock in (control, status, *children.values()):
                sock.close()
            os.close(waker)
            os.close(wakes)
            _become(fds[1:])
            return json.loads(data)  # type: ignore[no-any-return]
        for fd in fds[1:]:
            os.close(fd)
        children[pid] = status
        status.send(pid.to_bytes(8, _STATUS))


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        pid, wait_status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with children.pop(pid) as status:
            try:
                status.send(os.waitstatus_to_exitcode(wait_status).to_bytes(8, _STATUS, signed=True))
            except BrokenPipeError:
                pass  # nobody wants to know


def _become(fds: list[int]) -> None:
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    random.seed()
    _kept.append(mmap.mmap(-1, _PAGE * (1 + secrets.randbelow(1 << 14)), prot=mmap.PROT_READ))
    _kept.append(bytearray(secrets.randbelow(1 << 16)))


_kept: list[object] = []


def main() -> None:
    fd, *imports = sys.argv[1].split()
    for name in imports:
        import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a module starts threads when it is imported: forks would lack them"
    gc.collect()
    gc.freeze()  # else every child, when it ends, looks at all objects and so copies all their pages
    request = _serve(socket.socket(fileno=int(fd)))
    if request is not None:
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = [request["module"], request["argument"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
