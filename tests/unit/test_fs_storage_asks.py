"""What counts on a connection of a user, before a native node and a real socket."""

from __future__ import annotations

import socket
import time

from tests.support.data_links import connected

from fireflyer.fs.core.capability import Capability, Rights, derive_key, sign
from fireflyer.fs.schema import data
from fireflyer.fs.service.storage_asks import MAX_CAPABILITIES, StorageAsks
from fireflyer.fs.service.storage_links import Link
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
        self.link = Link(self.node.connect(theirs.detach(), reads=True), "user", "ann")
        self.asks = StorageAsks(
            self.node, SECRET, post=lambda _: None, find=lambda _: None, doubt=lambda *_: None
        )  # fmt: skip
        self.asks.use_keys((1,))

    def present(self, client: int, place: int, rights: Rights = READ_WRITE) -> None:
        first = place * FILES
        capability = Capability(1, "ann", client, first, first + FILES - 1, rights, int(time.time()) + 3000)
        token = sign(capability, derive_key(SECRET.reveal(), 1))
        self.asks.asked(self.link, data.Ask(1, data.Present(token)), 0)

    def counting(self) -> list[tuple[int, int]]:
        return [(one.client, one.first_file // FILES) for one in self.link.capabilities]

    def close(self) -> None:
        self.mine.shutdown(socket.SHUT_RDWR)
        self.mine.close()
        self.node.close()


def test_the_rights_of_another_session_take_the_places_of_those_of_the_one_before() -> None:
    bench = Bench()
    places = range(MAX_CAPABILITIES)
    for client in (7, 8, 9):
        for place in places:
            bench.present(client, place)
        assert bench.counting() == [(client, place) for place in places]
    bench.present(9, MAX_CAPABILITIES)
    assert len(bench.link.capabilities) == MAX_CAPABILITIES
    bench.close()


def test_reading_and_writing_the_same_files_are_two_rights() -> None:
    bench = Bench()
    bench.present(7, 1, Rights.READ)
    bench.present(7, 1, Rights.WRITE)
    assert [one.rights for one in bench.link.capabilities] == [Rights.READ, Rights.WRITE]
    bench.close()
