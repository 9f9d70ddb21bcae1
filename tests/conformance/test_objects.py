"""What everything that keeps blobs must do: a directory, fsspec's URLs, and the one of the simulations."""

from __future__ import annotations

import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.objects.memory import MemoryObjects

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.objects import DirectoryObjects, Objects, UrlObjects, open_objects
from fireflyer.fs.tools import connections
from fireflyer.fs.tools.trees import LocalTree

HOUR_NS = 3600 * SECOND
DATA = b"some bytes"
BLOB = hash_of(DATA)


class Clock:
    now_ns = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        return self.now_ns


_numbers = itertools.count()
MAKERS: dict[str, Callable[[Path, Clock], Objects]] = {
    "directory": lambda path, clock: DirectoryObjects(str(path / "objects"), wall_ns=clock),
    "cache": lambda path, clock: DirectoryObjects(str(path / "objects"), wall_ns=clock, durable=False),
    "file url": lambda path, clock: UrlObjects(f"file://{path}/objects", wall_ns=clock),
    "memory url": lambda path, clock: UrlObjects(f"memory://objects-{next(_numbers)}", wall_ns=clock),
    "ff url": lambda path, clock: UrlObjects(
        "ff:///objects", options={"target": "ff://here:1", "skip_instance_cache": True}, wall_ns=clock
    ),
    "simulation": lambda path, clock: MemoryObjects(clock),
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=MAKERS)
def objects(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Objects]:
    """Of our own file system: over a directory, in the place of a cluster."""
    (tmp_path / "cluster").mkdir()
    monkeypatch.setattr(connections, "_connect", lambda *_: LocalTree(str(tmp_path / "cluster")))
    yield MAKERS[request.param](tmp_path, clock)
    connections._shared.clear()


def put(objects: Objects, data: bytes) -> str:
    objects.put(hash_of(data), len(data), [data])
    return hash_of(data)


def names(objects: Objects) -> list[str]:
    return sorted(one.blob for one in objects.list())


def test_what_was_put_is_got_in_pieces_of_a_bounded_size(objects: Objects) -> None:
    data = os.urandom(3_000_000)
    assert objects.put(hash_of(data), len(data), [data[:7], memoryview(data)[7:]])
    pieces = list(objects.get(hash_of(data)))
    assert b"".join(pieces) == data
    if not isinstance(objects, MemoryObjects):
        assert max(map(len, pieces)) <= 1 << 20


def test_the_empty_blob_is_a_blob(objects: Objects) -> None:
    empty = put(objects, b"")
    assert b"".join(objects.get(empty)) == b""
    assert objects.stat(empty).size_bytes == 0


def test_a_blob_that_is_there_is_not_asked_for_again(objects: Objects) -> None:
    put(objects, DATA)

    asked = iter([DATA])
    assert not objects.put(BLOB, len(DATA), asked)
    assert next(asked) == DATA


@pytest.mark.parametrize("data", [b"other byte", b"short", b"some bytes and more"])
def test_bytes_with_another_hash_or_length_are_refused_and_leave_nothing(objects: Objects, data: bytes) -> None:
    with pytest.raises(UsageError):
        objects.put(BLOB, len(DATA), [data])
    assert names(objects) == []
    assert objects.renew([BLOB]) == [False]


def test_a_sender_that_fails_leaves_nothing(objects: Objects, tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield DATA[:3]
        raise ConnectionResetError("the client is gone")

    with pytest.raises(Exception, match=r"gone|reset"):
        objects.put(BLOB, len(DATA), pieces())
    assert names(objects) == []
    parts = tmp_path / "objects" / "parts"
    assert not parts.exists() or not list(parts.iterdir())


def test_renewing_says_what_is_there_and_gives_it_the_time_of_now(objects: Objects, clock: Clock) -> None:
    put(objects, DATA)
    clock.now_ns += HOUR_NS
    assert objects.renew([BLOB, "0" * 64]) == [True, False]
    assert objects.stat(BLOB).renewed_ns == clock.now_ns


def test_putting_again_renews(objects: Objects, clock: Clock) -> None:
    put(objects, DATA)
    clock.now_ns += HOUR_NS
    put(objects, DATA)
    assert objects.stat(BLOB).renewed_ns == clock.now_ns


def test_only_what_was_renewed_before_is_deleted(objects: Objects, clock: Clock) -> None:
    old = put(objects, b"old")
    clock.now_ns += HOUR_NS
    new = put(objects, b"new")
    assert objects.delete([old, new, "0" * 64], clock.now_ns) == [old]
    assert names(objects) == [new]


def test_what_is_not_there_is_said(objects: Objects) -> None:
    for call in (objects.stat, objects.get):
        with pytest.raises(NotFound):
            call(BLOB)
    objects.discard(BLOB)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n", ""])
def test_what_is_no_hash_is_no_path(tmp_path: Path, clock: Clock, name: str) -> None:
    for kind in ("directory", "file url"):
        objects = MAKERS[kind](tmp_path / kind.replace(" ", ""), clock)
        for call in (objects.stat, objects.get, objects.discard):
            with pytest.raises(UsageError):
                call(name)
        with pytest.raises(UsageError):
            objects.put(name, 1, [b"x"])


@pytest.mark.parametrize("kind", ["directory", "file url"])
def test_corrupt_bytes_are_found_before_the_last_piece_is_given(tmp_path: Path, clock: Clock, kind: str) -> None:
    objects = MAKERS[kind](tmp_path, clock)
    data = os.urandom(2_000_000)
    blob = put(objects, data)
    path = tmp_path / "objects" / blob[:2] / blob
    path.chmod(0o600)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    pieces = objects.get(blob)
    assert len(next(pieces)) < len(data)
    with pytest.raises(DataCorruption):
        list(pieces)
    objects.discard(blob)
    assert objects.put(blob, len(data), [data])


def test_a_blob_whose_bytes_were_lost_with_power_is_put_again(tmp_path: Path, clock: Clock) -> None:
    objects = DirectoryObjects(str(tmp_path / "objects"), wall_ns=clock)
    put(objects, DATA)
    path = Path(objects.path_of(BLOB))
    path.chmod(0o600)
    path.write_bytes(b"")
    assert objects.put(BLOB, len(DATA), [DATA])
    assert b"".join(objects.get(BLOB)) == DATA


def test_a_directory_of_blobs_is_private(tmp_path: Path) -> None:
    objects = open_objects(str(tmp_path / "objects"))
    put(objects, DATA)
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in [tmp_path / "objects", *tmp_path.rglob("*/*")]}
    assert modes == {0}


def test_a_file_system_that_sets_no_times_asks_for_old_blobs_again(tmp_path: Path, clock: Clock) -> None:
    objects = UrlObjects(f"memory://objects-{next(_numbers)}", wall_ns=clock, asked_again_ns=HOUR_NS)
    objects._touched = lambda path: False  # type: ignore[method-assign]
    real_ns = objects.stat(put(objects, DATA)).renewed_ns
    clock.now_ns = real_ns + HOUR_NS // 2
    assert objects.renew([BLOB]) == [True]
    clock.now_ns = real_ns + 2 * HOUR_NS
    assert objects.renew([BLOB]) == [False]
    assert objects.put(BLOB, len(DATA), [DATA])


def test_a_path_that_is_not_absolute_and_an_unknown_scheme_are_refused() -> None:
    for where in ("objects", "no-such-scheme://x"):
        with pytest.raises(UsageError):
            open_objects(where)


def test_a_renewal_and_a_removal_never_pass_each_other(tmp_path: Path) -> None:
    """What `renew` has said to be there stays, however the two fall together."""
    clock = Clock()
    objects = DirectoryObjects(str(tmp_path / "objects"), wall_ns=clock, durable=False)
    for number in range(60):
        blob = put(objects, str(number).encode())
        before_ns = clock.now_ns + 1
        clock.now_ns += 2
        told: list[bool] = []
        renewing = threading.Thread(target=lambda: told.extend(objects.renew([blob])))  # noqa: B023
        renewing.start()
        deleted = objects.delete([blob], before_ns)
        renewing.join()
        assert told == [not deleted]
        assert (blob in names(objects)) == told[0]
