"""A snapshot on a node: verified, complete or not there, each run with files of its own, within the cache's size."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.objects.memory import make_tree, read_tree
from tests.support.patience import allowed_s

from fireflyer.base.errors import DataCorruption, Exists, NoSpace, Unreachable, UsageError
from fireflyer.cluster.core.objects.blobs import StoredBlob, hash_of
from fireflyer.cluster.core.objects.collection import choose_evicted
from fireflyer.cluster.core.objects.manifest import FileEntry, Manifest, encode_manifest
from fireflyer.cluster.objects import NodeCache, files_by_blob, open_pieces, take_snapshot

FILES = {"train.py": "print()", "sub/a": "a" * 100, "sub/same": "a" * 100, "link": "-> sub/a", "none/": "", "empty": ""}


class Source:
    """The manager: what it was asked for, and a place for faults."""

    def __init__(self, root: Path) -> None:
        manifest = take_snapshot(str(root))
        data = encode_manifest(manifest)
        self.snapshot = hash_of(data)
        self.blobs = {blob: b"".join(open_pieces(str(root), one.path)) for blob, one in files_by_blob(manifest).items()}
        self.blobs[self.snapshot] = data
        self.asked: list[str] = []
        self.before: Callable[[str], None] = lambda _blob: None

    def __call__(self, blob: str, _size_bytes: int) -> Iterator[bytes]:
        self.asked.append(blob)
        self.before(blob)
        yield self.blobs[blob]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(make_tree(tmp_path / "work", FILES))


@pytest.fixture
def cache(tmp_path: Path) -> NodeCache:
    return NodeCache(str(tmp_path / "cache"))


def test_what_was_submitted_is_on_the_node_with_its_modes(tmp_path: Path, cache: NodeCache) -> None:
    root = make_tree(tmp_path / "work", FILES)
    (root / "train.py").chmod(0o755)
    (root / "sub").chmod(0o750)
    source = Source(root)
    cache.materialise(source.snapshot, str(tmp_path / "run"), source)
    assert read_tree(tmp_path / "run") == FILES
    assert (tmp_path / "run" / "train.py").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "run" / "sub").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_later_run_fetches_nothing(tmp_path: Path, cache: NodeCache, source: Source) -> None:
    cache.materialise(source.snapshot, str(tmp_path / "one"), source)
    assert sorted(source.asked) == sorted(source.blobs), "each blob once"
    source.asked.clear()
    NodeCache(str(tmp_path / "cache")).materialise(source.snapshot, str(tmp_path / "two"), source)
    assert source.asked == []


def test_what_a_run_writes_into_its_files_no_other_run_sees(tmp_path: Path, cache: NodeCache, source: Source) -> None:
    cache.materialise(source.snapshot, str(tmp_path / "one"), source)
    with (tmp_path / "one" / "train.py").open("r+") as file:
        file.write("ruined")
    cache.materialise(source.snapshot, str(tmp_path / "two"), source)
    assert read_tree(tmp_path / "two") == FILES


def test_a_blob_that_is_corrupt_in_the_cache_is_fetched_again(tmp_path: Path, cache: NodeCache, source: Source) -> None:
    cache.materialise(source.snapshot, str(tmp_path / "one"), source)
    for blob in source.blobs:
        path = Path(cache._blobs.path_of(blob))
        path.chmod(0o600)
        path.write_bytes(b"?" * path.stat().st_size)
    cache.materialise(source.snapshot, str(tmp_path / "two"), source)
    assert read_tree(tmp_path / "two") == FILES


@pytest.mark.parametrize("which", ["manifest", "file"])
def test_a_source_that_gives_other_bytes_makes_nothing(
    tmp_path: Path, cache: NodeCache, source: Source, which: str
) -> None:
    blob = source.snapshot if which == "manifest" else hash_of(b"print()")
    source.blobs[blob] = b"?" * len(source.blobs[blob])
    with pytest.raises(DataCorruption):
        cache.materialise(source.snapshot, str(tmp_path / "run"), source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "work"]


def test_a_source_that_never_ends_is_not_read_for_ever(tmp_path: Path, cache: NodeCache, source: Source) -> None:
    def endless(_blob: str, _size_bytes: int) -> Iterator[bytes]:
        while True:
            yield bytes(1 << 20)

    with pytest.raises(DataCorruption, match="longer than"):
        cache.materialise(source.snapshot, str(tmp_path / "run"), endless)


def test_a_hostile_manifest_makes_nothing(tmp_path: Path, cache: NodeCache) -> None:
    data = encode_manifest(Manifest(1, (FileEntry("../evil", 0o644, 1, hash_of(b"x")),)))
    with pytest.raises(UsageError, match=r"'\.\.'"):
        cache.materialise(hash_of(data), str(tmp_path / "run"), lambda _blob, _size: [data])
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "run").exists()


def test_a_source_that_fails_makes_nothing_and_the_next_one_goes_on_there(
    tmp_path: Path, cache: NodeCache, source: Source
) -> None:
    def cut_off(blob: str) -> None:
        if len(source.asked) == 3:
            raise Unreachable("the manager is not reached")

    source.before = cut_off
    with pytest.raises(Unreachable):
        cache.materialise(source.snapshot, str(tmp_path / "run"), source)
    assert not (tmp_path / "run").exists()
    first = source.asked[:2]
    source.asked, source.before = [], lambda _blob: None
    cache.materialise(source.snapshot, str(tmp_path / "run"), source)
    assert not set(first) & set(source.asked)


def test_a_directory_that_exists_is_left_alone(tmp_path: Path, cache: NodeCache, source: Source) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(Exists):
        cache.materialise(source.snapshot, str(tmp_path / "run"), source)
    (tmp_path / "dangling").symlink_to("nothing")
    with pytest.raises(Exists):
        cache.materialise(source.snapshot, str(tmp_path / "dangling"), source)


def test_several_at_a_time_fetch_each_blob_once(tmp_path: Path, source: Source) -> None:
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            cache = NodeCache(str(tmp_path / "cache"))
            cache.materialise(source.snapshot, str(tmp_path / f"run{number}"), source)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(allowed_s(30))
    assert not errors
    assert all(read_tree(tmp_path / f"run{number}") == FILES for number in range(6))
    files = [blob for blob in source.asked if blob != source.snapshot]
    assert sorted(files) == sorted(set(files))


def test_the_least_recently_used_blobs_leave_and_what_is_in_use_stays(tmp_path: Path) -> None:
    sources = [Source(make_tree(tmp_path / f"work{n}", {"big": str(n) * 4000})) for n in range(3)]
    cache = NodeCache(str(tmp_path / "cache"), max_bytes=9000)
    for number, source in enumerate(sources[:2]):
        cache.materialise(source.snapshot, str(tmp_path / f"run{number}"), source)
    sources[0].asked.clear()
    cache.materialise(sources[0].snapshot, str(tmp_path / "again"), sources[0])
    assert not sources[0].asked
    cache.materialise(sources[2].snapshot, str(tmp_path / "run2"), sources[2])
    assert cache.used_bytes() <= 9000
    cache.materialise(sources[0].snapshot, str(tmp_path / "and again"), sources[0])
    assert not sources[0].asked, "it was used later than the second one"


def test_while_one_is_made_its_blobs_stay_and_its_room_is_kept(tmp_path: Path) -> None:
    """The second one asks for room while the first one is fetching."""
    first, second = (Source(make_tree(tmp_path / f"work{n}", {"big": str(n) * 4000})) for n in range(2))
    told: list[str] = []

    def other(blob: str) -> None:
        if blob != first.snapshot:
            with pytest.raises(NoSpace, match="in use"):
                NodeCache(str(tmp_path / "cache"), max_bytes=6000).materialise(
                    second.snapshot, str(tmp_path / "run1"), second
                )
            told.append(blob)

    first.before = other
    NodeCache(str(tmp_path / "cache"), max_bytes=6000).materialise(first.snapshot, str(tmp_path / "run0"), first)
    assert told
    second.before = lambda _blob: None
    NodeCache(str(tmp_path / "cache"), max_bytes=6000).materialise(second.snapshot, str(tmp_path / "run1"), second)


def test_a_snapshot_larger_than_the_cache_is_refused(tmp_path: Path, source: Source) -> None:
    cache = NodeCache(str(tmp_path / "cache"), max_bytes=50)
    with pytest.raises(NoSpace, match="make it larger"):
        cache.materialise(source.snapshot, str(tmp_path / "run"), source)


def test_a_mark_of_a_killed_process_does_not_keep_blobs(tmp_path: Path, cache: NodeCache, source: Source) -> None:
    left = tmp_path / "cache" / "in-use" / f"{source.snapshot}.0011"
    left.write_bytes(source.blobs[source.snapshot])
    assert cache._blobs_in_use() == {}
    assert not left.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other accounts")
def test_all_of_it_belongs_to_the_account(tmp_path: Path, cache: NodeCache, source: Source) -> None:
    cache.materialise(source.snapshot, str(tmp_path / "run"), source, account=(12345, 23456))
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == (12345, 23456)


_cached = st.lists(
    st.builds(StoredBlob, st.text("abcdef", min_size=1, max_size=2), st.integers(0, 50), st.integers(0, 5)),
    max_size=12,
    unique_by=lambda one: one.blob,
)


@given(cached=_cached, in_use=st.sets(st.text("abcdef", min_size=1, max_size=2)), needed=st.integers(0, 100))
def test_evicted_are_the_least_recently_used_and_no_more_than_needed(
    cached: list[StoredBlob], in_use: set[str], needed: int
) -> None:
    sizes = {one.blob: one.size_bytes for one in cached}
    try:
        evicted = choose_evicted(cached, in_use, needed, 120)
    except NoSpace:
        assert sum(size for blob, size in sizes.items() if blob in in_use) + needed > 120
        return
    left = sum(sizes.values()) - sum(sizes[blob] for blob in evicted)
    assert left + needed <= 120
    assert not set(evicted) & in_use
    assert not evicted or left + needed + sizes[evicted[-1]] > 120
    ages = {one.blob: (one.renewed_ns, one.blob) for one in cached}
    for blob in sizes.keys() - set(evicted) - in_use:
        assert all(ages[one] < ages[blob] for one in evicted)
