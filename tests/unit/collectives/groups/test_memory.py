"""The memory that groups of one process share, and how much of a process's addresses they take."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB, SECOND
from fireflyer.collectives import Communicator
from fireflyer.collectives.bootstrap import arena
from fireflyer.collectives.bootstrap.arena import MAX_DEFAULT_ARENA_BYTES, OwnMemory
from fireflyer.identity.secrets import new_secret
from fireflyer.native import Arena
from fireflyer.runtime.store import LocalStore

SIZE = 4096 * MIB
GROUPS = 12


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(arena, "_common", weakref.WeakSet())  # groups that other tests have left open take no part
    monkeypatch.setattr(arena, "all_memory_bytes", lambda: SIZE)


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def mappings_of_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:fireflyer-arena")


def as_two_ranks(body: Callable[[int, LocalStore], None]) -> None:
    store = LocalStore()
    failed: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            body(rank, store)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_many_groups_of_the_same_ranks_take_the_addresses_of_one() -> None:
    secret = new_secret()
    before = address_space()
    grown: list[int] = []
    mapped: list[int] = []

    def body(rank: int, store: LocalStore) -> None:
        groups = [
            Communicator.create(
                rank=rank, world_size=2, node=0, store=store, secret=secret, name=f"g{number}", timeout_ns=20 * SECOND
            )
            for number in range(GROUPS)
        ]
        array = groups[0].empty(1000)
        for comm in groups:
            array[:] = 1.0
            comm.allreduce(array)
            assert comm.registered(array)
            assert np.all(array == 2.0)
        if rank == 0:
            grown.append(address_space() - before)
            mapped.append(mappings_of_arenas())
        groups[-1].barrier()
        for comm in groups:
            comm.close()

    as_two_ranks(body)
    assert mapped[0] <= 4  # the process's own, and as its neighbours map it
    assert grown[0] < 4 * SIZE


def test_an_arena_is_shared_until_the_last_group_lets_go_of_it() -> None:
    first, second, small = OwnMemory(None), OwnMemory(None), OwnMemory(MIB)
    assert second.arena is first.arena
    assert small.arena is not first.arena
    first.release()
    first.release()
    assert not first.shared
    assert second.shared
    third = OwnMemory(None)
    assert third.arena is first.arena
    for one in (second, third):
        one.release()
    after = OwnMemory(None)
    assert after.arena is not first.arena
    array = after.arena.allocate(1000)
    array[:] = 7
    after.release()
    assert array[-1] == 7


def test_a_forked_child_has_memory_of_its_own() -> None:
    """Its parent's is not mapped in it."""
    parents = OwnMemory(None)
    child = os.fork()
    if child == 0:
        own = OwnMemory(None)
        array = own.arena.allocate(1000)
        array[:] = 1
        os._exit(0 if own.arena is not parents.arena else 1)
    assert os.waitpid(child, 0)[1] == 0
    parents.release()


def test_the_arenas_of_a_full_node_leave_half_of_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "all_memory_bytes", lambda: 16 << 40)
    large = OwnMemory(None)
    assert large.arena.bytes == MAX_DEFAULT_ARENA_BYTES
    assert 64 * MAX_DEFAULT_ARENA_BYTES <= 1 << 46
    large.release()


def test_a_size_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="arena_bytes -1 must not be negative"):
        OwnMemory(-1)
    with pytest.raises(UsageError, match="pass a smaller arena_bytes"):
        OwnMemory(1 << 62)


def test_nobody_is_suspected_where_nobody_is_to_blame() -> None:
    comm = Communicator.create(rank=0, world_size=1, node=0, store=LocalStore(), secret=new_secret())
    comm._failed((1, -1, 0, "no rank is to blame"))
    assert comm._suspects == set()
    comm._failed((1, 0, 0, "rank 0 died"))
    assert comm._suspects == {0}
    comm.close()


_MAP_FIXED_NOREPLACE = 0x100000
_REFUSED, _CHANGED = 2, 3


def put_at(address: int, size_bytes: int) -> int:
    """Maps shared memory of this process there, which must be free, and fills it. What a program gets by chance."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    got: int | None = libc.mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if got == address:
        ctypes.memset(address, 1, size_bytes)
    return got or 0


def test_a_forked_child_keeps_what_it_has_put_at_the_addresses_of_an_arena() -> None:
    """Its copies of the objects are collected: pages of arrays and the mapping are not the child's to give back."""
    size_bytes = 8 * MIB
    descriptor = Arena.create(size_bytes)
    held = [Arena(descriptor)]
    os.close(descriptor)
    array = held[0].allocate(2 * MIB)
    array[:] = 7
    begin = array.ctypes.data  # the first that is allocated
    child = os.fork()
    if not child:
        if put_at(begin, size_bytes) != begin:
            os._exit(_REFUSED)
        del array  # with its capsule, which gives its pages back
        held.clear()
        gc.collect()
        found = ctypes.string_at(begin, size_bytes)  # SIGSEGV where it was unmapped
        os._exit(0 if found == b"\1" * size_bytes else _CHANGED)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (array == 7).all()
    assert held[0].used == 2 * MIB


def test_a_forked_child_gets_no_arrays_in_the_arena_of_its_parent() -> None:
    descriptor = Arena.create(MIB)
    arena = Arena(descriptor)
    os.close(descriptor)
    child = os.fork()
    if not child:
        try:
            arena.allocate(4096)
            os._exit(_CHANGED)
        except RuntimeError as error:
            os._exit(0 if "make a group in the child" in str(error) else _REFUSED)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
