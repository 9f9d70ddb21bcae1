"""Descriptors of a group: none is left where there are too few, and none is closed twice where a process forks."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
from tests.support.collectives.thread_ranks import together
from tests.support.descriptors import only_free, open_descriptors

from fireflyer.base.errors import Busy, FireflyerError, UsageError
from fireflyer.collectives import Communicator, communicator, make_plan
from fireflyer.collectives.bootstrap import local_peers
from fireflyer.collectives.bootstrap.arena import OwnMemory
from fireflyer.collectives.bootstrap.local_peers import LocalPeer, LocalPeerInfo, MemoryProbe
from fireflyer.collectives.bootstrap.rendezvous import GroupResources
from fireflyer.collectives.p2p.exchange import RankExchange
from fireflyer.collectives.p2p.peer_listener import PeerListener
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.store import LocalStore

MANY = 64


@contextmanager
def one_descriptor() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def resources(fd: int) -> GroupResources:
    """What the leader of one of two nodes has, where each descriptor is `fd`: seven of them."""
    plan = make_plan([0, 0, 1])
    names = ("rank 0", "rank 1", "rank 2")
    connections = ((0, 1, 0, fd), (1, 1, 0, fd), (2, 1, 0, -1))
    return GroupResources(
        plan, names, names, fd, fd, -1, ((1, fd),), connections, (LocalPeer(MemoryProbe(0, 0, 0), fd, ""),) * 2
    )


def test_equipment_is_duplicated_whole_or_not_at_all() -> None:
    with one_descriptor() as fd:
        before = open_descriptors()
        for free in range(7):
            with only_free(free), pytest.raises(Busy, match="ulimit -n") as caught:
                resources(fd).duplicate()
            assert "\n" not in str(caught.value)
            assert open_descriptors() == before
        with only_free(7):
            copies = resources(fd).duplicate()
        mine = [copies.window_fd, copies.doorbell_fd, *(fd for _, fd in copies.local_fds)]
        mine += [fd for _, _, _, fd in copies.connections if fd >= 0] + [one.arena_fd for one in copies.local_peers]
        assert open_descriptors() == before | set(mine)
        assert len(set(mine)) == 7
        assert copies.leader_fd == copies.connections[2][3] == -1
        for copy in mine:
            os.close(copy)


@pytest.mark.parametrize("free", [0, 1, 2])
def test_listeners_that_cannot_be_made_leave_nothing_open(free: int) -> None:
    before = open_descriptors()
    with only_free(free), pytest.raises(Busy, match="ulimit -n"):
        PeerListener(rank=0, world_size=2, host="127.0.0.1", secret=new_secret(), prefix="group")
    assert open_descriptors() == before


def refusal_with(free: int) -> str | None:
    """Of a group of one rank, where only so many descriptors are left."""
    try:
        with only_free(free):
            Communicator.create(rank=0, world_size=1, node=0, store=LocalStore(), secret=new_secret()).close()
    except FireflyerError as error:
        return str(error)
    return None


def test_a_group_for_which_there_are_too_few_descriptors_is_told_so_and_leaves_nothing_open() -> None:
    assert refusal_with(MANY) is None  # what is opened once is open from now on
    before = open_descriptors()
    refusals = [refusal_with(free) for free in range(16)]
    assert open_descriptors() == before
    told = [refusal for refusal in refusals if refusal is not None]
    assert 5 < len(told) < 16
    assert refusals[: len(told)] == told
    assert all("ulimit -n" in refusal and "\n" not in refusal for refusal in told), told


def test_an_arena_that_does_not_fit_is_told() -> None:
    with pytest.raises(UsageError, match=r"cannot map an arena of 140737488355328 bytes: .*pass a smaller arena_bytes"):
        OwnMemory(2**47)


def test_listeners_that_are_closed_own_no_number_any_more() -> None:
    listener = PeerListener(rank=0, world_size=2, host="127.0.0.1", secret=new_secret(), prefix="group")
    listener.close()
    others = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(MANY)]
    listener.abandon()
    for fd in others:
        os.close(fd)


def test_a_fork_while_a_group_is_being_closed_closes_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has closed its descriptors, and is still known as open: the parent has other files of these numbers."""
    statuses: list[int] = []
    leave = RankExchange.close

    def fork_in_between(self: RankExchange) -> None:
        leave(self)
        if self.rank != 0:
            return
        others = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(MANY)]
        pid = os.fork()
        if pid == 0:
            os._exit(_complaints_of_child(others))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        for fd in others:
            os.close(fd)

    monkeypatch.setattr(RankExchange, "close", fork_in_between)
    together([0, 0, 1], lambda comm: None)
    assert statuses == [0]


def test_a_fork_while_a_group_is_formed_keeps_no_connection_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    decide = local_peers.decide

    def fork_first(others: Mapping[str, socket.socket], own: LocalPeerInfo, peers: Sequence[LocalPeerInfo]) -> bool:
        found = [sock.fileno() for sock in others.values()]
        pid = os.fork()
        if pid == 0:
            os._exit(sum(is_open(fd) for fd in found))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return decide(others, own, peers)

    monkeypatch.setattr(local_peers, "decide", fork_first)
    assert together([0, 0, 0], lambda comm: comm.world_size) == [3] * 3
    assert statuses == [0]


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _complaints_of_child(others: list[int]) -> int:
    """How many of the descriptors are not open, or 200 if a communicator would be destroyed here."""
    if not communicator._abandoned:
        return 200
    return sum(not is_open(fd) for fd in others)


def test_the_child_of_a_fork_may_close_what_it_cannot_use() -> None:
    """... also where another thread was busy with it: locks of the parent's threads are never given back."""
    statuses: list[int] = []
    done = threading.Event()

    def body(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 1:
            assert done.wait(30)
            return
        with comm._lock:
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)  # the end of one that waits
                comm.__exit__(KeyError, KeyError(), None)
                comm.close()
                os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        done.set()

    assert together([0, 0], body) == [None, None]
    assert statuses == [0]
