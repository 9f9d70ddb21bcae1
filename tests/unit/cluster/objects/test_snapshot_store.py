"""Submitting: what is sent, what is refused, who is charged, and who may have what."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.objects.memory import MemoryObjects, make_tree, read_tree

from fireflyer.base.errors import Busy, NoSpace, NotFound, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.core.objects.collection import GRACE_NS, RESERVED_NS
from fireflyer.cluster.objects import (
    NodeCache,
    Quota,
    SnapshotStore,
    Usage,
    encode_manifest,
    files_by_blob,
    open_pieces,
    take_snapshot,
)


class Site:
    """A store, and users who submit directories."""

    def __init__(self, quota: Quota | None = None) -> None:
        self.now_ns = GRACE_NS * 2
        self.objects = MemoryObjects(lambda: self.now_ns)
        self.quota = quota or Quota()
        self.rows: list[tuple[str, str]] = []
        self.start()

    def start(self) -> None:
        self.store = SnapshotStore(self.objects, wall_ns=lambda: self.now_ns, quota_of=lambda _owner: self.quota)

    def submit(self, owner: str, root: Path) -> tuple[str, list[str]]:
        """The snapshot, and the paths that were sent."""
        manifest = take_snapshot(str(root))
        data = encode_manifest(manifest)
        snapshot = hash_of(data)
        files = files_by_blob(manifest)
        owed = self.store.begin(owner, snapshot, data)
        for blob in owed:
            self.store.put(owner, snapshot, blob, open_pieces(str(root), files[blob].path))
        self.store.seal(owner, snapshot)
        self.rows.append((owner, snapshot))
        self.store.release(owner, snapshot)
        return snapshot, sorted(files[blob].path for blob in owed)

    def collect(self) -> int:
        return self.store.collect(lambda: self.rows).blobs


@pytest.fixture
def site() -> Site:
    return Site()


def test_only_what_changed_is_sent(site: Site, tmp_path: Path) -> None:
    root = make_tree(tmp_path / "work", {"a": "1", "b": "2"})
    _, sent = site.submit("ann", root)
    assert sent == ["a", "b"]
    make_tree(root, {"b": "3", "c": "1"})
    _, sent = site.submit("ann", root)
    assert sent == ["b"]
    snapshot, sent = site.submit("ann", root)
    assert sent == []
    assert site.store.begin("ann", snapshot) == (), "its name is enough"
    assert site.store.usage("ann") == Usage(3 + sum(len(site.objects.blobs[one]) for _, one in set(site.rows)), 5, 2)


def test_nobody_gets_a_blob_for_its_name(site: Site, tmp_path: Path) -> None:
    root = make_tree(tmp_path / "work", {"secret": "of ann"})
    snapshot, _ = site.submit("ann", root)
    blob = hash_of(b"of ann")
    with pytest.raises(NotFound, match="send its manifest"):
        site.store.begin("bob", snapshot)
    data = site.store.manifest(snapshot)
    assert site.store.begin("bob", snapshot, data) == (blob,)
    with pytest.raises(NotFound, match="are missing"):
        site.store.seal("bob", snapshot)
    for guess in ([b"guess?"], [b"too long a guess"], []):
        with pytest.raises(UsageError):
            site.store.put("bob", snapshot, blob, guess)
        with pytest.raises(NotFound):
            site.store.seal("bob", snapshot)
    site.store.put("bob", snapshot, blob, [b"of", b" ann"])
    site.store.seal("bob", snapshot)


def test_a_node_gets_the_blobs_of_its_snapshot_and_no_others(site: Site, tmp_path: Path) -> None:
    one, _ = site.submit("ann", make_tree(tmp_path / "one", {"a": "1"}))
    other, _ = site.submit("bob", make_tree(tmp_path / "other", {"a": "2"}))
    size_bytes, pieces = site.store.open(one, hash_of(b"1"))
    assert (size_bytes, b"".join(pieces)) == (1, b"1")
    with pytest.raises(NotFound, match="is not in snapshot"):
        site.store.open(one, hash_of(b"2"))
    NodeCache(str(tmp_path / "cache")).materialise(
        other, str(tmp_path / "run"), lambda blob, _size: site.store.open(other, blob)[1]
    )
    assert read_tree(tmp_path / "run") == {"a": "2"}


def test_what_is_not_asked_for_is_not_taken(site: Site, tmp_path: Path) -> None:
    manifest = take_snapshot(str(make_tree(tmp_path / "work", {"a": "1"})))
    data = encode_manifest(manifest)
    with pytest.raises(NotFound, match="begin it again"):
        site.store.put("ann", hash_of(data), hash_of(b"1"), [b"1"])
    site.store.begin("ann", hash_of(data), data)
    site.store.check_begun("ann", hash_of(data))
    for owner, snapshot in (("bob", hash_of(data)), ("ann", hash_of(b"1"))):
        with pytest.raises(NotFound, match="begin it again"):
            site.store.check_begun(owner, snapshot)
    with pytest.raises(NotFound, match="is not in snapshot"):
        site.store.put("ann", hash_of(data), hash_of(b"2"), [b"2"])
    with pytest.raises(UsageError, match="not that of snapshot"):
        site.store.begin("ann", hash_of(b"x"), data)
    with pytest.raises(UsageError, match="cannot be decoded"):
        site.store.begin("ann", hash_of(b"x"), b"x")


def test_an_owner_is_bounded_in_bytes_files_and_submissions(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "work", {"a": "1" * 1000})
    for quota in (Quota(size_bytes=1000), Quota(blobs=1)):
        with pytest.raises(NoSpace, match="of ann would have"):
            Site(quota).submit("ann", root)
    site = Site(Quota(size_bytes=2500))
    manifests = [encode_manifest(take_snapshot(str(make_tree(root, {"a": str(number) * 1000})))) for number in range(3)]
    for data in manifests[:2]:
        site.store.begin("ann", hash_of(data), data)
    with pytest.raises(NoSpace):
        site.store.begin("ann", hash_of(manifests[2]), manifests[2])
    site.store.begin("bob", hash_of(manifests[2]), manifests[2])
    site.now_ns += RESERVED_NS
    site.store.begin("ann", hash_of(manifests[2]), manifests[2])


def test_submissions_at_a_time_are_bounded(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.cluster.core.objects.collection.MAX_RESERVATIONS_OF_OWNER", 1)
    one, two = (encode_manifest(take_snapshot(str(make_tree(tmp_path / n, {"a": n})))) for n in "12")
    site.store.begin("ann", hash_of(one), one)
    with pytest.raises(Busy, match="wait until they are complete"):
        site.store.begin("ann", hash_of(two), two)
    site.store.begin("ann", hash_of(one), one)


def test_what_nobody_names_goes_after_the_grace_age_and_is_no_longer_charged(site: Site, tmp_path: Path) -> None:
    site.submit("ann", make_tree(tmp_path / "one", {"a": "1", "b": "shared"}))
    site.submit("bob", make_tree(tmp_path / "two", {"b": "shared"}))
    site.rows.pop(0)
    assert site.collect() == 0
    assert site.store.usage("ann") == Usage()
    site.now_ns += GRACE_NS + 1
    assert site.collect() == 2
    assert hash_of(b"shared") in site.objects.blobs
    assert hash_of(b"1") not in site.objects.blobs


def test_a_manager_that_starts_knows_what_is_charged_and_an_upload_begins_again(site: Site, tmp_path: Path) -> None:
    root = make_tree(tmp_path / "one", {"a": "1"})
    snapshot, _ = site.submit("ann", root)
    before = site.store.usage("ann")
    site.start()
    assert site.store.load(site.rows) == ()
    assert site.store.usage("ann") == before
    with pytest.raises(NotFound, match="begin it again"):
        site.store.seal("ann", snapshot)
    assert site.submit("ann", root) == (snapshot, [])


def test_nothing_is_collected_while_a_manifest_cannot_be_read(site: Site, tmp_path: Path) -> None:
    snapshot, _ = site.submit("ann", make_tree(tmp_path / "one", {"a": "1"}))
    site.submit("bob", make_tree(tmp_path / "two", {"a": "2"}))
    site.rows.pop()
    site.now_ns += GRACE_NS + SECOND
    site.objects.blobs[snapshot] = b"?"
    assert site.store.collect(lambda: site.rows) == (0, 0, (snapshot,))
    assert hash_of(b"2") in site.objects.blobs


def test_blobs_of_logs_are_kept(site: Site) -> None:
    site.objects.put(hash_of(b"log"), 3, [b"log"])
    site.now_ns += GRACE_NS + SECOND
    assert site.store.collect(list, lambda: [hash_of(b"log")]).blobs == 0
    assert site.store.collect(list).blobs == 1
