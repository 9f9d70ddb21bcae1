"""Who may join a group and who may see its memory. Real sockets; ranks are threads or processes.

What holds, and against whom:

- A peer without the secret may connect to every listener of every rank: TCP ports, and Unix sockets of the abstract
  namespace, which know no permissions. It learns that something listens. What its connections may cost is in
  `fireflyer.identity.acceptor` (`HandshakeLimits`). It delays nobody and is never read beyond the handshake.
- A recorded handshake is of no use: both sides contribute 32 fresh bytes. One made for another listener, group, attempt
  or rank is refused: its purpose and names are part of the proof.
- Memory is in unnamed files (memfd): nothing in /dev/shm, nothing to unlink, gone with the last process. Only this user
  (and root) may open them through /proc, or read the memory of ranks. Where Yama restricts ptrace (scope 1) ranks allow
  every process *of this user* to attach while they have a group (PR_SET_PTRACER_ANY; docs/safety.md);
  `peer_memory=False` is for those who do not want that.
- Who holds the secret is believed to be a rank; but what it sends is bounded and checked, and ends in an error.
- Not covered: somebody on the wire between two hosts who changes frames after the handshake. Frames carry checksums, no
  proofs. That needs a tunnel.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.patience import allowed_s
from tests.support.ranks.forked import NUMPY, Forked
from tests.support.ranks.processes import ranks_running

from fireflyer.base.errors import FireflyerError, PermissionDenied, Unreachable
from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator
from fireflyer.collectives.p2p.peer_listener import ListenAddress
from fireflyer.identity.secrets import new_secret
from fireflyer.native import Arena, can_access, create_window, memory_probe
from fireflyer.runtime.sockets import authenticate_client
from fireflyer.runtime.store import LocalStore

PREFIX = "attempt-0/collectives/world/1"
NODES = [0, 0, 1]
GARBAGE = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, b"\x00\x00", b"\x04\x00" + b"\x81" * 1024, b"\x00\x05hello"]


class HeldUp(LocalStore):
    """The store of a rank that learns who the others are only when it may."""

    _may_come: threading.Event

    def __init__(self, shared: LocalStore, may_come: threading.Event) -> None:
        self.__dict__ = shared.__dict__ | {"_may_come": may_come}

    def get(self, key: str, timeout_ns: int) -> bytes:
        assert not key.endswith("/roster") or self._may_come.wait(60)
        return super().get(key, timeout_ns)


class Job:
    """A group of threads that is being made. The last rank waits until it is told to come, so that listeners are
    open."""

    def __init__(self, nodes: list[int], **options: Any) -> None:
        self.store, self.secret = LocalStore(), new_secret()
        self.last_may_come = threading.Event()
        self.may_leave = threading.Event()
        self.results: list[Any] = [None] * len(nodes)
        self._nodes = nodes
        self._options = {"timeout_ns": 10 * SECOND, "join_timeout_ns": 30 * SECOND} | options
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(len(nodes))]
        for thread in self._threads:
            thread.start()

    def _run(self, rank: int) -> None:
        last = rank == len(self._nodes) - 1
        try:
            with Communicator.create(
                rank=rank,
                world_size=len(self._nodes),
                node=self._nodes[rank],
                store=HeldUp(self.store, self.last_may_come) if last else self.store,
                secret=self.secret,
                **self._options,
            ) as comm:
                array, out = np.full(50_000, rank + 1.0), np.empty(3 * len(self._nodes))
                comm.allreduce(array)
                assert self.may_leave.wait(60)
                comm.all_to_all(out, np.full(3 * len(self._nodes), rank + 1.0))
                self.results[rank] = (array[0], out.tolist())
        except FireflyerError as error:
            self.results[rank] = error

    def address_of(self, rank: int) -> ListenAddress:
        return self._published(f"door/{rank}")

    def leader_address(self, node: int) -> ListenAddress:
        return self._published(f"node/{node}")

    def _published(self, key: str) -> ListenAddress:
        return msgspec.json.decode(self.store.get(f"{PREFIX}/{key}", 30 * SECOND), type=ListenAddress)

    def finish(self) -> list[Any]:
        self.last_may_come.set()
        self.may_leave.set()
        for thread in self._threads:
            thread.join(allowed_s(60))
            assert not thread.is_alive()
        return self.results

    def check(self) -> None:
        ranks = range(len(self._nodes))
        out = [float(rank + 1) for rank in ranks for _ in range(3)]
        assert self.finish() == [(float(sum(r + 1 for r in ranks)), out)] * len(self._nodes)


@contextmanager
def job(nodes: list[int], **options: Any) -> Iterator[Job]:
    group = Job(nodes, **options)
    try:
        yield group
    finally:
        group.finish()


def connect(address: ListenAddress, *, local: bool) -> socket.socket:
    if not local:
        return socket.create_connection((address.host, address.port), timeout=allowed_s(20))
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(f"\0{address.unix}")
    return sock


def tell(sock: socket.socket, noise: bytes) -> None:
    try:
        sock.sendall(noise)
    except OSError:
        pass  # it was turned away already


@pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])
def test_strangers_at_every_listener_neither_come_in_nor_delay_the_group(local: bool) -> None:
    """Before it has met (the listeners of leaders), and while it works (the listeners of ranks)."""
    with job(NODES) as group, ExitStack() as stack:
        strangers = []
        for noise in GARBAGE * 5:
            strangers.append(stack.enter_context(connect(group.leader_address(0), local=local)))
            tell(strangers[-1], noise)
        began = time.monotonic()
        group.last_may_come.set()
        for rank in range(len(NODES)):
            for noise in GARBAGE * 5:
                strangers.append(stack.enter_context(connect(group.address_of(rank), local=local)))
                tell(strangers[-1], noise)
        group.check()
        assert time.monotonic() - began < allowed_s(8)  # less than a silent stranger is given


@pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])
def test_another_secret_is_refused_at_every_listener(local: bool) -> None:
    with job(NODES) as group:
        kind = "window" if local else "link"
        refuses_a_wrong_secret(group.leader_address(0), kind, local=local)
        group.last_may_come.set()
        for rank in range(len(NODES)):
            refuses_a_wrong_secret(group.address_of(rank), "rank", local=local)
        group.check()


def refuses_a_wrong_secret(address: ListenAddress, kind: str, *, local: bool) -> None:
    with connect(address, local=local) as sock, pytest.raises(PermissionDenied):
        authenticate_client(sock, new_secret(), "rank 1", f"{PREFIX}/{kind}", 10 * SECOND)


def test_a_proof_is_valid_only_at_the_listener_that_it_was_made_for() -> None:
    """Of another group, another attempt, another kind; and a rank that is none, or of another node."""
    with job([0, 0]) as group:
        address = group.leader_address(0)
        for purpose in (
            "attempt-1/collectives/world/1/window",
            "attempt-0/collectives/other/1/window",
            f"{PREFIX}/rank",
        ):
            with connect(address, local=True) as sock, pytest.raises(PermissionDenied):
                authenticate_client(sock, group.secret, "rank 1", purpose, 10 * SECOND)
        for name in ("rank 0", "rank 2", "rank 7", "rank -1", "node 1", "rank 1 "):
            with connect(address, local=True) as sock:
                authenticate_client(sock, group.secret, name, f"{PREFIX}/window", 10 * SECOND)
                assert ended(sock)
        group.last_may_come.set()
        for name in ("rank 0", "rank 3", "rank 18446744073709551617", "node 1 link 0.0"):
            with connect(group.address_of(0), local=False) as sock:
                authenticate_client(sock, group.secret, name, f"{PREFIX}/rank", 10 * SECOND)
                assert ended(sock)
        group.check()


def ended(sock: socket.socket) -> bool:
    sock.settimeout(20)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_recorded_handshake_is_of_no_use() -> None:
    with job(NODES) as group:
        group.last_may_come.set()
        address = group.address_of(0)
        said = bytearray()

        class Recorded(socket.socket):
            def sendall(self, data: Any, *rest: Any) -> None:
                said.extend(data)
                super().sendall(data, *rest)

        with Recorded(socket.AF_INET) as sock:
            sock.connect((address.host, address.port))
            authenticate_client(sock, group.secret, "rank 9", f"{PREFIX}/rank", 10 * SECOND)
        assert len(said) > 64
        with connect(address, local=False) as thief:
            tell(thief, bytes(said) + b"\0" * 64)
            heard = b""
            while piece := receive(thief):
                heard += piece
        assert b"permission_denied" in heard, heard
        group.check()


def receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


# --- who holds the secret, and lies ---

RIGHT: dict[str, Any] = {"pid": 0, "address": 0, "number": 0}


def lying_rank(group: Job, body: bytes, fds: list[int], *, length: int | None = None) -> None:
    """Comes to the leader of node 0 as rank 1, and says that about its memory."""
    with connect(group.leader_address(0), local=True) as sock:
        authenticate_client(sock, group.secret, "rank 1", f"{PREFIX}/window", 10 * SECOND)
        head = struct.pack("<I", len(body) if length is None else length)
        socket.send_fds(sock, [head], fds) if fds else sock.sendall(head)
        tell(sock, body)
        ended(sock)


def pipe_end() -> int:
    reads, writes = os.pipe()
    os.close(writes)
    return reads


def unsealed() -> int:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 1 << 21)
    return fd


def encoded_probe(**changes: Any) -> bytes:
    return json.dumps([RIGHT | changes]).encode()


LIES: dict[str, tuple[bytes, Callable[[], list[int]], int | None]] = {
    "no arena": (encoded_probe(), list, None),
    "two arenas": (encoded_probe(), lambda: [Arena.create(1), Arena.create(1)], None),
    "a pipe": (encoded_probe(), lambda: [pipe_end()], None),
    "an arena that may shrink": (encoded_probe(), lambda: [unsealed()], None),
    "two ranks at once": (json.dumps([RIGHT] * 2).encode(), lambda: [Arena.create(1)], None),
    "no rank": (b"[]", lambda: [Arena.create(1)], None),
    "a pid below 0": (encoded_probe(pid=-1), lambda: [Arena.create(1)], None),
    "a pid of 33 bits": (encoded_probe(pid=2**32 + 1), lambda: [Arena.create(1)], None),
    "an address of 65 bits": (encoded_probe(address=2**64), lambda: [Arena.create(1)], None),
    "a number of 65 bits": (encoded_probe(number=2**64), lambda: [Arena.create(1)], None),
    "text": (encoded_probe(pid="me"), lambda: [Arena.create(1)], None),
    "garbage": (b"\xff" * 100, lambda: [Arena.create(1)], None),
    "four gigabytes": (b"", lambda: [Arena.create(1)], 2**32 - 1),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_about_memory_end_in_an_error_at_the_leader(lie: str) -> None:
    body, make, length = LIES[lie]
    fds = make()
    with job([0, 0], join_timeout_ns=4 * SECOND) as group:
        try:
            lying_rank(group, body, fds, length=length)
        finally:
            for fd in fds:
                os.close(fd)
        group._threads[0].join(20)
        error = group.results[0]
    assert isinstance(error, Unreachable), error
    assert "\n" not in str(error)


def test_a_leader_that_hands_over_no_window_is_refused() -> None:
    """An unsealed one, one of another size, or too few neighbours."""
    window = create_window(2, 4, 4096)
    small = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    try:
        for fds, probes in (
            ([unsealed(), window], 2),
            ([small, window], 2),
            ([window, window], 1),
            ([window, window], 3),
        ):
            assert isinstance(from_lying_leader(fds, probes), Unreachable)
            if fds[0] not in (window, small):
                os.close(fds[0])
    finally:
        os.close(window)
        os.close(small)


def from_lying_leader(window_fds: list[int], probes: int) -> BaseException | None:
    """What rank 1 makes of it."""
    from fireflyer.collectives.bootstrap import local_peers
    from fireflyer.native import Executor

    ours, theirs = socket.socketpair()
    arenas = [Arena.create(1) for _ in range(probes)]
    with ours, theirs, ExitStack() as stack:
        for fd in arenas:
            stack.callback(os.close, fd)
        local_peers.send_all(
            theirs, window_fds, [local_peers.LocalPeerInfo(local_peers.MemoryProbe(0, 0, 0), fd) for fd in arenas]
        )
        try:
            (window_fd, bell), everybody = local_peers.receive_all(ours, "rank 0", 2, stack)
            Executor(
                rank=1,
                node_of_rank=[0, 0],
                labels=["rank 0", "rank 1"],
                trees=[[-1], [-1]],
                timeout_ns=SECOND,
                window_fd=os.dup(window_fd),
                doorbell_fd=os.dup(bell),
                leader_fd=os.dup(ours.fileno()),
                local_fds=[],
                connections=[],
                routes=[],
                programs=[],
                arena=None,
                local_peers=[(0, 0, 0, os.dup(one.arena_fd)) for one in everybody],
            ).close()
        except RuntimeError as error:
            return Unreachable(str(error))
        except FireflyerError as error:
            return error
    return None


# --- memory ---


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try what another user may do")
def test_another_user_cannot_reach_the_memory_of_a_rank() -> None:
    """The abstract socket lets another user connect, and turns them away without the secret."""
    with job([0, 0]) as group:
        group.last_may_come.set()
        address = group.address_of(0)
        arguments = {"pid": os.getpid(), "probe": memory_probe(), "unix": address.unix}
        with ExitStack() as stack:
            process = Forked("tests.support.other_user", json.dumps(arguments), imports=NUMPY)
            stack.callback(process.kill)
            said = json.loads(process.communicate(timeout=allowed_s(60))[0])
        assert said["user"] != os.getuid()
        assert said["reached"] == []
        assert len(said["answer"]) < 400
        assert can_access(*memory_probe()), "else the test shows nothing"
        group.check()


@pytest.mark.processes
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_group_that_was_killed(sign: signal.Signals, tmp_path: Path) -> None:
    with ranks_running(
        tmp_path, [0, 0, 1, 1], "endless_exchange", how="all_to_all", size=1000, timeout_ns=20 * SECOND
    ) as ranks:
        pids = [event["pid"] for event in ranks.wait_for("joined").values()]
        ranks.wait_for("step")
        inodes = set().union(*(sockets_of(pid) for pid in pids))
        named = names_of(inodes)
        assert any(name.startswith("@fireflyer-") for name in named.values())
        shared = set().union(*(shared_files_of(pid) for pid in pids))
        assert any(name.startswith("/memfd:") for name in shared), "else the test shows nothing"
        assert not any(name.startswith("/dev/shm/") for name in shared)
        for rank in range(4):
            ranks.send_signal(rank, sign)
        assert all(code == -sign for code in ranks.exit_codes())
        assert names_of(inodes) == {}
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def shared_files_of(pid: int) -> set[str]:
    """What it has open or mapped in memory: /memfd:NAME (deleted), or /dev/shm/NAME, which outlives it."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()}
    opened = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since it was listed
            opened.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return {name for name in mapped | opened if name.startswith(("/memfd:", "/dev/shm/"))}


def sockets_of(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since it was listed
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def names_of(inodes: set[str]) -> dict[str, str]:
    """The Unix sockets and listening TCP sockets that exist among those inodes."""
    found = {}
    for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]:
        words = line.split()
        if words[6] in inodes and len(words) > 7:
            found[words[6]] = words[7]
    for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            found[words[9]] = words[1]
    return found
