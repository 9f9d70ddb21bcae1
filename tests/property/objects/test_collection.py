"""Collections beside submissions lose nothing that a task's row names, in whatever order their steps fall."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.objects.submissions import check_seed

from fireflyer.cluster.core.objects.collection import Accounts, Reservation, Usage
from fireflyer.cluster.objects import SnapshotStore
from fireflyer.cluster.objects.snapshot_store import Collected

SEEDS = 120


@pytest.mark.parametrize("block", range(4))
def test_no_named_snapshot_loses_a_blob(block: int) -> None:
    for seed in range(block * SEEDS // 4, (block + 1) * SEEDS // 4):
        check_seed(seed)


def test_when_no_task_is_left_nothing_is() -> None:
    world = check_seed(1)
    world.named.clear()
    world.store.collect(world.rows)
    assert not world.objects.blobs
    assert world.store.usage("user0") == Usage()


class RowsReadBefore(SnapshotStore):
    """The rows are read, and only then the collection begins."""

    def collect(
        self, named: Callable[[], Iterable[tuple[str, str]]], also: Callable[[], Iterable[str]] = tuple
    ) -> Collected:
        rows = list(named())
        return super().collect(lambda: rows, also)


class NothingReserved(SnapshotStore):
    """A collection does not begin with what is reserved."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        begin = self._collection.begin
        self._collection.begin = lambda now_ns, reserved: begin(now_ns, ())  # type: ignore[method-assign]


class NoBarrier(SnapshotStore):
    """What is reserved while a collection goes on is not marked."""

    def _reserve(self, owner: str, snapshot: str, blobs: dict[str, int]) -> Reservation:
        with self._lock:
            return self._reservations.reserve(self._wall_ns(), owner, snapshot, blobs)


class AskedBefore(SnapshotStore):
    """What is missing is asked before it is reserved."""

    def begin(self, owner: str, snapshot: str, manifest: bytes | None = None) -> tuple[str, ...]:
        self._objects.renew([snapshot])
        owed = super().begin(owner, snapshot, manifest)
        with self._lock:
            self._reservations.release(owner, snapshot)
        self._objects.renew([])
        self._reserve_again(owner, snapshot, manifest)
        return owed

    def _reserve_again(self, owner: str, snapshot: str, manifest: bytes | None) -> None:
        super().begin(owner, snapshot, manifest)

    def seal(self, owner: str, snapshot: str) -> None:
        """Nor is anything looked at again."""
        with self._lock:
            self._accounts.add(owner, snapshot, self._found(owner, snapshot).blobs)
            self._reservations.release(owner, snapshot)


@pytest.mark.parametrize("mutant", [RowsReadBefore, NothingReserved, NoBarrier, AskedBefore])
def test_a_planted_fault_is_found(mutant: type[SnapshotStore]) -> None:
    for seed in itertools.takewhile(lambda seed: seed < 400, itertools.count()):
        try:
            check_seed(seed, mutant)
        except AssertionError:
            return
    pytest.fail(f"{mutant.__name__}: not found in 400 seeds")


_blobs = st.dictionaries(st.sampled_from("abcdef"), st.just(1), min_size=1)
_snapshots = st.lists(st.tuples(st.sampled_from(["ann", "bob"]), st.sampled_from("123456")), max_size=8)


@given(contents=st.dictionaries(st.sampled_from("123456"), _blobs), first=_snapshots, kept=_snapshots)
def test_an_owner_is_charged_for_each_distinct_blob_of_their_snapshots(
    contents: Mapping[str, Mapping[str, int]], first: list[tuple[str, str]], kept: list[tuple[str, str]]
) -> None:
    sizes = {"a": 1, "b": 10, "c": 100, "d": 1000, "e": 10_000, "f": 100_000}
    accounts = Accounts()
    for owner, snapshot in first:
        accounts.add(owner, snapshot, {blob: sizes[blob] for blob in contents.get(snapshot, {})})
    accounts.keep_only(kept)
    for owner in ("ann", "bob"):
        snapshots = {snapshot for one, snapshot in first if one == owner} & {one for who, one in kept if who == owner}
        blobs = {blob for snapshot in snapshots for blob in contents.get(snapshot, {})}
        assert accounts.usage(owner) == Usage(sum(sizes[blob] for blob in blobs), len(blobs), len(snapshots))
