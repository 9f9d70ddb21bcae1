"""The native half of a storage process and of a client, over real sockets and a real directory."""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fs.clusters.data_links import (
    CHAIN,
    CHAIN_VERSION,
    FOREVER_NS,
    MESSAGE,
    READS,
    REPLY,
    Events,
    connected,
    frame,
    publish,
    put,
    received,
    sending,
)
from tests.support.jobs.launching import wait_until
from tests.support.patience import allowed_s

from fireflyer.native import ChunkError, ChunkNode, ChunkRing, ChunkTarget, crc32c

MIB = 1 << 20
TARGET = 7
CHUNK = (5, 2)


class Rig:
    """A node with one target in a directory, its events, and links to it."""

    def __init__(self, directory: Path, buffer_bytes: int, cold_reads: str = "kernel") -> None:
        self.node = ChunkNode(io_threads=2, job_threads=2, buffer_bytes=buffer_bytes, cold_reads=cold_reads)
        self.events = Events(self.node)
        self.target = self.node.open_target(TARGET, str(directory), reserve=0.0)
        self._mine: list[socket.socket] = []

    def link(self, *, reads: bool = True, trusted: bool = False, tcp: bool = False) -> tuple[int, socket.socket]:
        mine, theirs = connected(tcp)
        self._mine.append(mine)
        link = self.node.connect(theirs.detach(), reads=reads)
        if trusted:
            self.node.trust(link)
        return link, mine

    def handle(self, data: bytes) -> int:
        """Data as they come from a client."""
        link, mine = self.link()
        with sending(mine, frame(MESSAGE, b"data", data)):
            event = self.events.next("message", lambda event: event[1] == link)
        return int(event[3])

    def close(self) -> None:
        self.node.close()
        for sock in self._mine:
            sock.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, 16 * MIB)
    yield made
    made.close()


def ring_to(rig: Rig, *, trusted: bool = True) -> tuple[ChunkRing, int, int]:
    ring = ChunkRing()
    mine, theirs = connected(tcp=True)
    link = rig.node.connect(theirs.detach(), reads=True)
    if trusted:
        rig.node.trust(link)
    return ring, ring.add(mine.detach()), link


def kernel_has_rings() -> bool:
    """io_uring with all that is used of it (Linux 5.6)."""
    io_uring_setup, features_at, needed = 425, 20, 0b1011
    parameters = ctypes.create_string_buffer(120)
    fd = ctypes.CDLL(None).syscall(io_uring_setup, 4, parameters)
    if fd < 0:
        return False
    os.close(fd)
    features: int = struct.unpack_from("<I", parameters, features_at)[0]
    return features & needed == needed


def stat(target: ChunkTarget, chunk: tuple[int, int]) -> tuple[int, int]:
    found = target.find(chunk)
    assert found is not None
    assert found[0] is not None
    return found[0][:2]


@pytest.mark.parametrize("tcp", [False, True])
def test_a_message_and_its_data_come_and_go(rig: Rig, tcp: bool) -> None:
    link, mine = rig.link(tcp=tcp)
    data = os.urandom(3 * MIB + 17)
    with sending(mine, frame(MESSAGE, b"one", data) + frame(MESSAGE, b"two")):
        _, _, body, handle = rig.events.next("message")
        assert rig.events.next("message")[1:] == (link, b"two", 0)
    assert (body, rig.node.length(handle)) == (b"one", len(data))
    rig.node.send(link, b"back", handle)
    rig.node.send(link, b"and nothing")
    rig.node.release(handle)
    assert received(mine) == (MESSAGE, b"back", data)
    assert received(mine) == (MESSAGE, b"and nothing", b"")
    with pytest.raises(ValueError, match="was it released"):
        rig.node.send(link, b"x", handle)
    mine.close()
    assert rig.events.next("lost")[1] == link
    assert rig.node.stats()["buffer_bytes"] == 0


def test_one_handle_is_staged_and_sent_at_the_same_time(rig: Rig) -> None:
    link, mine = rig.link()
    data = os.urandom(2 * MIB)
    handle = rig.handle(data)
    rig.target.stage(1, CHUNK, (4, 1), None, "write", 100, len(data), crc32c(data), handle, (9, 3, 1))
    rig.node.send(link, b"put", handle)
    rig.node.release(handle)
    assert received(mine)[2] == data
    whole = bytes(100) + data
    assert rig.events.next("staged") == ("staged", TARGET, 1, 4, 1, len(whole), crc32c(whole))
    assert rig.target.find(CHUNK) == (None, (4, 1, len(whole), crc32c(whole)), False)
    assert rig.target.pending() == [CHUNK]
    rig.target.commit(CHUNK, (4, 1))
    assert rig.target.find(CHUNK) == ((4, 1, len(whole), crc32c(whole)), None, False)
    assert rig.target.completion(9, 3) == (9, 3, 1, *CHUNK, 4, 1)


def test_data_that_are_not_what_was_promised_are_refused(rig: Rig) -> None:
    handle = rig.handle(b"abcd")
    rig.target.stage(1, CHUNK, (1, 1), None, "write", 0, 4, crc32c(b"abce"), handle, None)
    assert rig.events.next("stage_failed")[2:4] == (1, "bad_data")
    rig.target.stage(2, CHUNK, (1, 1), None, "write", 0, 5, crc32c(b"abcd"), handle, None)
    assert rig.events.next("stage_failed")[2:4] == (2, "bad_data")
    rig.target.stage(3, CHUNK, (1, 2), (1, 1), "remove", 0, 0, 0, 0, None)
    assert rig.events.next("stage_failed")[2:4] == (3, "conflict")
    with pytest.raises(ChunkError) as refused:
        rig.target.commit(CHUNK, (1, 1))
    assert refused.value.args[0] == "conflict"
    assert rig.target.find(CHUNK) is None


def test_the_index_is_that_of_the_engine(rig: Rig) -> None:
    for index in range(5):
        put(rig.events, rig.target, (1, index), index + 1, bytes([index]), rig.handle(bytes([index])))
    put(rig.events, rig.target, (2, 0), 9, b"x", rig.handle(b"x"))
    rig.target.stage(1, (1, 3), (1, 50), (1, 4), "remove", 0, 0, 0, 0, None)
    rig.events.next("staged")
    assert rig.target.of_file(1, 1, 2) == [1, 2]
    assert rig.target.of_file(1, 3, 10, backwards=True) == [3, 2, 1, 0]
    assert rig.target.of_file(3, 0, 10) == []
    names = [chunk for chunk, _ in rig.target.chunks((1, 1), 10)]
    assert names == [(1, 2), (1, 3), (1, 4), (2, 0)]
    assert rig.target.chunks((1, 2), 1) == [((1, 3), None)]
    assert rig.target.find((1, 3)) == ((1, 4, 1, crc32c(b"\3")), (1, 50, -1, 0), False)
    completions = [(1, channel, 1, 1, 0, 1, 1) for channel in range(4)]
    rig.target.adopt(5, completions, True)
    assert rig.events.next("adopted") == ("adopted", TARGET, 5)
    assert rig.target.completions((1, 0), 2) == completions[1:3]
    assert rig.target.completion_count == 4
    rig.target.drop(7, (1, 3), (1, 50), (2, 1, 1, 1, 3, 0, 0))
    assert rig.events.next("dropped") == ("dropped", TARGET, 7)
    assert rig.target.completion(2, 1) == (2, 1, 1, 1, 3, 0, 0)
    rig.target.forget(1)
    assert rig.target.completions(None, 10) == [(2, 1, 1, 1, 3, 0, 0)]


def test_what_was_told_is_there_after_opening_again(tmp_path: Path) -> None:
    first = Rig(tmp_path, 16 * MIB)
    data = os.urandom(70_000)
    put(first.events, first.target, CHUNK, 1, data, first.handle(data))
    other = ChunkNode(io_threads=1, job_threads=1, buffer_bytes=MIB)
    with pytest.raises(BlockingIOError, match="another process"):
        other.open_target(TARGET, str(tmp_path))
    with pytest.raises(ValueError, match="open already"):
        first.node.open_target(TARGET, str(tmp_path))
    first.target.close()
    with pytest.raises(ValueError, match="closed"):
        first.target.find(CHUNK)
    again = other.open_target(TARGET, str(tmp_path))
    assert stat(again, CHUNK) == (1, 1)
    other.close()
    first.close()


def test_content_is_sent_from_the_disk_and_damage_is_told(rig: Rig, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    put(rig.events, rig.target, CHUNK, 1, data, rig.handle(data))
    link, mine = rig.link(trusted=True)
    rig.node.send_content(link, b"copy", TARGET, *CHUNK, 1, 1)
    assert received(mine) == (MESSAGE, b"copy", data)
    damage(tmp_path, data[:64])
    rig.node.send_content(link, b"copy", TARGET, *CHUNK, 1, 1)
    assert rig.events.next("damage") == ("damage", TARGET, *CHUNK)
    rig.node.send_content(link, b"gone", TARGET, *CHUNK, 1, 9)
    rig.target.verify(1, None, MIB)
    assert rig.events.next("verified") == ("verified", TARGET, 1, None, len(data))
    assert rig.events.none_of("damage")  # once
    found = rig.target.find(CHUNK)
    assert found is not None
    assert found[2]
    assert rig.target.chunks(None, 10) == [(CHUNK, None)]
    put(rig.events, rig.target, CHUNK, 1, data, rig.handle(data))  # the same content, as a copy gets it
    assert rig.target.chunks(None, 10) == [(CHUNK, (1, 1, len(data), crc32c(data)))]
    rig.node.send(link, b"end")
    assert received(mine) == (MESSAGE, b"end", b"")  # neither of the others was sent


def damage(directory: Path, piece: bytes) -> None:
    """Turns a bit over in the block that holds these bytes."""
    for path in directory.glob("blocks-*"):
        with path.open("r+b") as file:
            at = file.read().find(piece)
            if at >= 0:
                file.seek(at)
                file.write(bytes([piece[0] ^ 1]))
                return
    raise AssertionError("no such block")


def test_a_scrub_goes_on_where_it_ended(rig: Rig) -> None:
    for index in range(4):
        data = os.urandom(1000)
        put(rig.events, rig.target, (1, index), index + 1, data, rig.handle(data))
    rig.target.verify(1, None, 100_000)
    assert rig.events.next("verified")[3:] == ((1, 1), 2 << 16)
    rig.target.verify(2, (1, 1), 1 << 40)
    assert rig.events.next("verified")[3:] == (None, 2 << 16)


@pytest.mark.parametrize(
    "nonsense",
    [
        random.Random(1).randbytes(100),
        frame(MESSAGE, b"x", magic=1),
        frame(REPLY, bytes(40)),
        frame(9, b""),
        frame(MESSAGE, b"x" * 10)[:-1] + b"y",
        frame(MESSAGE, b"", body_bytes=(256 << 10) + 1),
        frame(READS, bytes(39)),
        frame(READS, bytes(40), b"payload"),
        frame(READS, bytes(40 * 257)),
        frame(MESSAGE, b"", payload_bytes=(64 << 20) + 1),
        frame(MESSAGE, b"", payload_bytes=(8 << 20) + 1),
    ],
    ids=[
        "noise",
        "other magic",
        "a reply",
        "a kind that is none",
        "a damaged body",
        "a long body",
        "half a read",
        "reads with a payload",
        "too many reads",
        "a long payload",
        "more than clients may send",
    ],
)
def test_nonsense_ends_its_own_link_only(rig: Rig, nonsense: bytes) -> None:
    good, sock = rig.link()
    link, mine = rig.link()
    mine.sendall(nonsense)
    assert rig.events.next("lost")[1] == link
    assert mine.recv(1) == b""
    sock.sendall(frame(MESSAGE, b"still here"))
    assert rig.events.next("message")[1:3] == (good, b"still here")


def test_reads_need_the_right_to_the_file(rig: Rig) -> None:
    data = os.urandom(100_000)
    put(rig.events, rig.target, CHUNK, 1, data, rig.handle(data))
    publish(rig.node, TARGET)
    ring, server, link = ring_to(rig, trusted=False)
    into = bytearray(len(data))

    def status() -> int:
        ring.prepare_read(server, 8, CHAIN, CHAIN_VERSION, *CHUNK, 0, len(into), into)
        ring.submit()
        (done,) = ring.wait(1, -1)
        assert done[:2] == ("read", 8)
        return int(done[2])

    assert status() == 6
    rig.node.grant(link, CHUNK[0], CHUNK[0] + 1, 1)  # long ago
    assert status() == 6
    rig.node.grant(link, 0, CHUNK[0], FOREVER_NS)
    assert status() == 6
    rig.node.grant(link, 0, CHUNK[0] + 1, FOREVER_NS)
    assert status() == 1
    assert into == data
    publish(rig.node, TARGET, fence_until_ns=1)
    assert status() == 4
    ring.close()
    without, mine = rig.link(reads=False)
    mine.sendall(frame(READS, bytes(40)))
    assert rig.events.next("lost", lambda event: event[1] == without)


def test_without_memory_a_client_waits_and_a_peer_is_dropped(rig: Rig) -> None:
    held = [rig.handle(bytes(4 * MIB)), rig.handle(bytes(4 * MIB))]  # all that clients may have
    client, slow = rig.link()
    peer, fast = rig.link(trusted=True)
    with sending(slow, frame(MESSAGE, b"waits", bytes(2 * MIB)) + frame(MESSAGE, b"behind")):
        for number in range(2):
            with sending(fast, frame(MESSAGE, b"peer", bytes(4 * MIB))):
                held.append(int(rig.events.next("message", lambda event: event[1] == peer)[3]))
            assert rig.node.stats()["dropped"] == 0, number
        with sending(fast, frame(MESSAGE, b"too much", bytes(4 * MIB)) + frame(MESSAGE, b"no data")):
            assert rig.events.next("message")[1:] == (peer, b"no data", 0)
        assert rig.node.stats()["dropped"] == 1
        for handle in held:
            rig.node.release(handle)
        assert rig.events.next("message")[1:3] == (client, b"waits")
        assert rig.events.next("message")[1:] == (client, b"behind", 0)


def test_an_owner_that_does_not_take_stops_what_comes_in(rig: Rig) -> None:
    link, mine = rig.link()
    count = 20_000
    with sending(mine, b"".join(frame(MESSAGE, struct.pack("<I", number) * 1000) for number in range(count))):
        wait_until(lambda: rig.node.stats()["messages"] >= 8192, allowed_s(30), "it takes fewer than it may")
        select.select([], [], [], 0.1)
        assert rig.node.stats()["messages"] == 8192  # it stands still
        for number in range(count):
            assert rig.events.next("message")[2][:4] == struct.pack("<I", number)
    assert rig.node.stats()["events"] == 0
    assert link == 1


def test_a_link_that_does_not_take_what_it_is_sent_ends(rig: Rig) -> None:
    link, mine = rig.link()
    body = bytes(200 << 10)
    for _ in range(400):
        rig.node.send(link, body)
    assert rig.events.next("lost") == ("lost", link, "peer does not read what is sent to it")
    rig.node.send(link, b"ignored")
    with pytest.raises(ValueError, match="exceed"):
        rig.node.send(link, bytes((256 << 10) + 1))
    mine.close()


def test_closing_under_load_leaves_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    rig = Rig(tmp_path, 16 * MIB)
    data = os.urandom(MIB)
    handle = rig.handle(data)
    socks = [rig.link()[1] for _ in range(4)]
    for version in range(1, 30):
        rig.target.stage(version, (1, version), (1, version), None, "replace", 0, len(data), crc32c(data), handle, None)
    for link in range(2, 6):
        rig.node.send(link, b"x", handle)
    for sock in socks:
        sock.sendall(frame(MESSAGE, b"half of it", bytes(MIB))[: MIB // 8])
    rig.close()
    rig.node.close()
    assert rig.node.take(10_000)
    mine, theirs = connected()
    with mine, pytest.raises(ValueError, match="closed"):
        rig.node.connect(theirs.detach(), reads=True)
    again = Rig(tmp_path, MIB)
    assert len(again.target.pending()) == 29  # what was begun was ended, in order
    again.close()
    del again, rig
    assert set(os.listdir("/proc/self/fd")) <= before
    deadline_s = time.monotonic() + 10  # a thread that was joined may be listed for a moment
    while len(os.listdir("/proc/self/task")) > threads:
        assert time.monotonic() < deadline_s


def test_a_ring_sends_from_memory_and_hears_answers(rig: Rig) -> None:
    ring, server, link = ring_to(rig)
    data = bytearray(os.urandom(5 * MIB))
    ring.prepare_message(server, b"write", data)
    assert ring.under_way == 1
    with pytest.raises(BufferError):
        data.append(1)  # held until it was sent
    ring.submit()
    while True:
        ring.wait(0, 0)
        if not rig.events.none_of("message"):
            break
        select.select([rig.node.event_fd], [ring.fd], [], 0.01)
    _, _, body, handle = rig.events.next("message")
    assert (body, rig.node.length(handle)) == (b"write", len(data))
    data.append(1)
    rig.node.send(link, b"done", handle)
    assert select.select([ring.fd], [], [], 20)[0]
    assert ring.wait(1, -1) == [("message", server, b"done", bytes(data[:-1]))]
    assert ring.under_way == 0
    assert ring.wait(1, 0) == []
    ring.close()
    with pytest.raises(ValueError, match="closed"):
        ring.submit()


def test_a_cancelled_read_touches_no_memory(rig: Rig) -> None:
    data = os.urandom(2 * MIB)
    put(rig.events, rig.target, CHUNK, 1, data, rig.handle(data))
    publish(rig.node, TARGET)
    ring, server, _ = ring_to(rig)
    into, other = bytearray(len(data)), bytearray(len(data))
    read = ring.prepare_read(server, 1, CHAIN, CHAIN_VERSION, *CHUNK, 0, len(into), into)
    ring.prepare_read(server, 2, CHAIN, CHAIN_VERSION, *CHUNK, 0, len(other), other)
    ring.submit()
    assert ring.cancel(read)
    assert not ring.cancel(read)
    into.append(0)
    done = ring.wait(2, -1)
    assert [event[:4] for event in done] == [("read", 2, 1, len(data))]
    assert other == data
    assert not any(into)
    ring.close()


def test_a_lost_server_fails_what_is_under_way(rig: Rig) -> None:
    ring, server, link = ring_to(rig)
    into = bytearray(100)
    ring.prepare_message(server, b"no answer")
    ring.prepare_read(server, 1, CHAIN, CHAIN_VERSION, *CHUNK, 0, 100, into)
    rig.node.disconnect(link)
    assert rig.events.next("lost")[1] == link
    done = ring.wait(2, -1)
    assert [event[:3] for event in done] == [("read", 1, 0), ("lost", server, "the node closed the connection")]
    assert ring.under_way == 0
    with pytest.raises(ValueError, match="connect to it again"):
        ring.prepare_message(server, b"x")
    ring.prepare_read(server, 2, CHAIN, CHAIN_VERSION, *CHUNK, 0, 100, into)
    assert select.select([ring.fd], [], [], 5)[0]
    assert ring.wait(1, -1)[0][:3] == ("read", 2, 0)
    with pytest.raises(ValueError, match="are requested"):
        ring.prepare_read(server, 2, CHAIN, CHAIN_VERSION, *CHUNK, 0, 101, into)
    with pytest.raises(ValueError, match="no server"):
        ring.prepare_message(server + 1, b"x")
    ring.close()


def test_reads_that_are_prepared_together_come_back_together(rig: Rig) -> None:
    data = os.urandom(500_000)
    put(rig.events, rig.target, CHUNK, 1, data, rig.handle(data))
    publish(rig.node, TARGET)
    ring, server, link = ring_to(rig)
    into = bytearray(300 * 1000)
    record = struct.Struct("<QQIIIIIIQ")
    file, index = CHUNK

    def packed(at: int, offset: int, length: int, chunk: int = index, to: int = server) -> bytes:
        return record.pack(file, at, to, CHAIN, CHAIN_VERSION, chunk, offset, length, 0)

    for bad in (packed(len(into), 0, 1), packed((1 << 64) - 1, 0, 2), packed(0, 0, 1, to=server + 1), b"short"):
        with pytest.raises(ValueError, match=r"fit at|no server|bytes each"):
            ring.prepare_reads(packed(0, 0, 1) + bad, into, 0)
    assert ring.under_way == 0
    offsets = [number * 1531 for number in range(300)]
    batch = b"".join(packed(number * 1000, offset, 1000) for number, offset in enumerate(offsets))
    first = ring.prepare_reads(batch + packed(0, 0, 0, chunk=index + 1), into, 5000)
    assert ring.cancel(first + 7)
    assert not ring.cancel(first + 7)
    assert not ring.cancel(first + 301)
    ring.submit()
    found: dict[int, tuple[int, ...]] = {}
    while ring.under_way:
        for kind, completions in ring.wait(1, -1):
            assert kind == "reads"
            found |= {one[0]: one[1:] for one in struct.iter_unpack("<QQQIIIIIIQ", completions)}
    assert sorted(found) == [5000 + number for number in range(301) if number != 7]
    assert found.pop(5300)[2] == 2
    assert set(found.values()) == {(1, 0, 1, 1000, 1, len(data), CHAIN_VERSION, 0, 0)}
    for number, offset in enumerate(offsets):
        expected = data[offset : offset + 1000] if number != 7 else bytes(1000)
        assert into[number * 1000 : number * 1000 + 1000] == expected
    into.append(0)
    ring.prepare_reads(packed(0, 0, 100), into, 1)
    rig.node.disconnect(link)
    rig.events.next("lost")
    done = ring.wait(2, -1)
    assert [event[0] for event in done] == ["reads", "lost"]
    ring.close()


@pytest.mark.parametrize("cold_reads", ["kernel", "threads"])
def test_a_read_of_what_is_not_in_memory_comes_from_the_disk(tmp_path: Path, cold_reads: str) -> None:
    rig = Rig(tmp_path, 16 * MIB, cold_reads)
    assert rig.node.cold_reads == (cold_reads if kernel_has_rings() else "threads")
    data = os.urandom(3 * MIB)
    put(rig.events, rig.target, CHUNK, 1, data, rig.handle(data))
    publish(rig.node, TARGET)
    ring, server, _ = ring_to(rig)
    into = bytearray(2 * MIB)
    for offset in (0, 4096, 12345):
        for path in tmp_path.glob("blocks-*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        ring.prepare_read(server, offset, CHAIN, CHAIN_VERSION, *CHUNK, offset, len(into), into)
        ring.submit()
        assert ring.wait(1, -1)[0][:4] == ("read", offset, 1, len(into))
        assert into == data[offset : offset + len(into)]
    ring.close()
    stats = rig.node.stats()
    rig.close()
    assert stats["reads"] == 3
    assert stats["fetched"] <= 3  # whether the file system says what it has in memory is its own affair


def test_there_are_two_who_fetch_cold_reads() -> None:
    with pytest.raises(ValueError, match='"kernel" or "threads"'):
        ChunkNode(io_threads=1, job_threads=1, buffer_bytes=MIB, cold_reads="disk")


def wait_disturbed(ring: ChunkRing) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    ring.wait(1, -1)


@pytest.mark.processes
def test_signals_are_handled_while_a_ring_waits(rig: Rig) -> None:
    link, mine = rig.link()
    ring = ChunkRing()
    server = ring.add(mine.detach())
    ring.prepare_message(server, b"a question")
    ring.submit()
    handled, waiting = threading.Semaphore(0), threading.get_ident()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.release())

    def disturb() -> None:
        for _ in range(50):
            signal.pthread_kill(waiting, signal.SIGUSR1)
            while not handled.acquire(timeout=0.05):  # it came just before the ring began to wait
                signal.pthread_kill(waiting, signal.SIGUSR1)
        rig.node.send(link, b"an answer")

    def refuse(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise InterruptedError

    other = threading.Thread(target=disturb)
    try:
        other.start()
        assert ring.wait(1, -1) == [("message", server, b"an answer", None)]
        other.join()
        ring.prepare_message(server, b"another one")
        ring.submit()
        signal.signal(signal.SIGALRM, refuse)
        with pytest.raises(InterruptedError):
            wait_disturbed(ring)
        rig.node.send(link, b"late")
        assert ring.wait(1, -1) == [("message", server, b"late", None)]
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    ring.close()
