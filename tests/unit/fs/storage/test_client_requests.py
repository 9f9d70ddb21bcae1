"""What counts on a connection of a user, before a native node and a real socket."""

from __future__ import annotations

import socket
import time

from tests.support.fs.clusters.data_links import connected

from fireflyer.fs.core.capability import Capability, Rights, derive_key, sign
from fireflyer.fs.core.chain.connection_capabilities import MAX_FILE_CAPABILITIES, MAX_RANGE_CAPABILITIES
from fireflyer.fs.schema import data
from fireflyer.fs.service.storage.client_requests import ClientRequests
from fireflyer.fs.service.storage.connections import DataConnection
from fireflyer.identity.secrets import Secret
from fireflyer.native import ChunkNode

SECRET = Secret(b"s" * 32)
FILES = 10
READ_WRITE = Rights.READ | Rights.WRITE


class Bench:
    """A storage process's end of one connection."""

    def __init__(self) -> None:
        self.node = ChunkNode(io_threads=1, job_threads=1, buffer_bytes=1 << 20)
        self.mine, theirs = connected(False)
        self.link = DataConnection(self.node.connect(theirs.detach(), reads=True), "user", "ann")
        self.asks = ClientRequests(
            self.node, SECRET, post=lambda _: None, find=lambda _: None, verify_soon=lambda *_: None
        )  # fmt: skip
        self.asks.use_keys((1,))

    def present(self, client: int, place: int, rights: Rights = READ_WRITE, files: int = FILES) -> None:
        first = place * FILES
        capability = Capability(1, "ann", client, first, first + files - 1, rights, int(time.time()) + 3000)
        token = sign(capability, derive_key(SECRET.reveal(), 1))
        self.asks.asked(self.link, data.DataRequest(1, data.Present(token)), 0)

    def counting(self) -> list[tuple[int, int]]:
        return [(one.client, one.first_file // FILES) for one in self.link.capabilities]

    def close(self) -> None:
        self.mine.shutdown(socket.SHUT_RDWR)
        self.mine.close()
        self.node.close()


def test_the_rights_of_another_session_take_the_places_of_those_of_the_one_before() -> None:
    bench = Bench()
    places = range(MAX_RANGE_CAPABILITIES)
    for client in (7, 8, 9):
        for place in places:
            bench.present(client, place)
        assert bench.counting() == [(client, place) for place in places]
    bench.present(9, MAX_RANGE_CAPABILITIES)
    assert len(list(bench.link.capabilities)) == MAX_RANGE_CAPABILITIES
    bench.close()


def test_reading_and_writing_the_same_files_are_two_rights() -> None:
    bench = Bench()
    bench.present(7, 1, Rights.READ)
    bench.present(7, 1, Rights.WRITE)
    assert [one.rights for one in bench.link.capabilities] == [Rights.READ, Rights.WRITE]
    bench.close()


def test_of_single_files_there_is_always_room_and_the_oldest_goes() -> None:
    bench = Bench()
    for place in range(MAX_FILE_CAPABILITIES):
        bench.present(7, place, files=1)
    bench.present(7, 0, files=1)  # the first again: now the second is the oldest
    bench.present(7, MAX_FILE_CAPABILITIES, files=1)

    def may_write(place: int, client: int = 7) -> bool:
        return bench.link.capabilities.allows(place * FILES, Rights.WRITE, client, time.time())

    assert [may_write(place) for place in (0, 1, 2, MAX_FILE_CAPABILITIES)] == [True, False, True, True]
    assert not may_write(2, client=8)
    assert not bench.link.capabilities.allows(2 * FILES + 1, Rights.READ, None, time.time())
    assert len(list(bench.link.capabilities)) == MAX_FILE_CAPABILITIES
    bench.close()
