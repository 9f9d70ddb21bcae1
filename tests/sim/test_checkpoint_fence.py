"""An attempt that nobody could stop goes on saving while the next has begun: it changes nothing any more.

The next attempt starts after every single operation of the old one, under many schedules. From the moment at which it
has begun no operation of the old one may make, change or remove a checkpoint; all checkpoints are whole; the new one's
saves succeed; the old one is told why its own fail. Also by a client that keeps using directories that it had looked up
before they were moved (`Handles`), and across power losses in the middle of it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpoints.jobs import LAUNCH, ROOT, Job, check_recovery
from tests.support.checkpoints.rivals import Rivals

from fireflyer.base.errors import Fenced, FireflyerError
from fireflyer.base.ports import Disk
from fireflyer.checkpoint import opening
from fireflyer.checkpoint.core.fence import (
    UNKNOWN_LAUNCH,
    Writer,
    check_start,
    next_writer,
    overtaken_by,
    parse_writer,
    smaller,
    writers,
)
from fireflyer.checkpoint.core.names import trash_name
from fireflyer.checkpoint.engine import performing
from fireflyer.checkpoint.engine.directory import commit, remove_tree
from fireflyer.checkpoint.engine.steps import Steps
from fireflyer.sim import SimDisk, enumerate_outcomes

OTHER_LAUNCH = "fedcba0987654321"
OLD_STEPS = [10, 20, 30, 40, 50]
SLOW = (1, 6, 40)
"""How much slower the old attempt is: the next begins, or even ends, between two of its operations."""


def operations_of_the_old_one() -> int:
    disk = SimDisk()
    Job(disk, 2, OLD_STEPS[:3]).run()
    return len(disk.operations)


def overlap(start: int, seed: int, *, handles: bool = False, launch: str = LAUNCH) -> Rivals:
    """The old attempt alone for `start` operations, then both."""
    rivals = Rivals(seed, handles=handles)
    old = rivals.add(0, list(OLD_STEPS), keep=1, slow=SLOW[seed % len(SLOW)])
    old.start()
    rivals.run(lambda: len(rivals.disk.operations) >= start)
    rivals.add(1 if launch == LAUNCH else 0, [], launch=launch, keep=9).start()
    return rivals


def check_overlap(rivals: Rivals) -> None:
    rivals.run_to_the_end()
    old, new = rivals.jobs
    assert new.begun
    assert not new.errors
    assert len(new.committed) == 2
    for _, _, message in old.errors:
        assert "attempt 0 may no longer change" in message
        assert "has begun there" in message


def straggler_campaign(*, handles: bool, seeds: range, stride: int = 1) -> int:
    fenced = 0
    for seed in seeds:
        for start in range(seed % stride, operations_of_the_old_one(), stride):
            rivals = overlap(start, seed, handles=handles)
            check_overlap(rivals)
            fenced += bool(rivals.jobs[0].errors)
    return fenced


@pytest.mark.parametrize("handles", [False, True], ids=["by path", "by handle"])
def test_when_the_next_attempt_has_begun_the_old_one_changes_no_checkpoint(handles: bool) -> None:
    assert straggler_campaign(handles=handles, seeds=range(3), stride=2) > 30


@pytest.mark.slow
@pytest.mark.parametrize("handles", [False, True], ids=["by path", "by handle"])
def test_the_same_after_every_operation_under_many_schedules(handles: bool) -> None:
    assert straggler_campaign(handles=handles, seeds=range(12)) > 500


def test_another_launch_begins_with_attempt_0_and_fences_the_old_one_too() -> None:
    begun = 20  # before that the old one may be the last to begin, and then it has the directory
    for start in range(begun, operations_of_the_old_one(), 5):
        rivals = overlap(start, start, launch=OTHER_LAUNCH)
        assert rivals.jobs[0].begun
        check_overlap(rivals)


def test_attempts_that_start_at_once_do_not_both_begin_unless_one_fences_the_other() -> None:
    for seed in range(60):
        rivals = Rivals(seed)
        for launch in (LAUNCH, OTHER_LAUNCH):
            rivals.add(0, [10, 20] if launch == LAUNCH else [30, 40], launch=launch, ordered=False).start()
        rivals.run_to_the_end()
        first, second = rivals.jobs
        whole = [job for job in (first, second) if len(job.committed) == 2 and not job.errors]
        assert whole, "one of them has the directory"
        for job in (first, second):
            assert all("may no longer change" in message for _, _, message in job.errors)


def test_an_attempt_that_starts_after_a_later_one_of_its_launch_is_refused() -> None:
    refused = 0
    for seed in range(60):
        rivals = Rivals(seed)
        late = rivals.add(3, [10, 20])
        newer = rivals.add(4, [30, 40])
        newer.start()
        rivals.run(lambda rivals=rivals, seed=seed: len(rivals.disk.operations) >= seed % 12)  # type: ignore[misc]
        late.start()
        rivals.run_to_the_end()
        assert len(newer.committed) == 2
        assert not newer.errors
        refused += late.ended_by is not None
    assert refused > 40


@pytest.mark.parametrize("handles", [False, True], ids=["by path", "by handle"])
def test_power_is_lost_while_the_next_attempt_begins(handles: bool) -> None:
    for seed, start in enumerate(range(10, operations_of_the_old_one(), 9)):
        for more in range(3, 45, 6):
            rivals = overlap(start, seed, handles=handles)
            count = len(rivals.disk.operations) + more
            rivals.run(lambda rivals=rivals, count=count: len(rivals.disk.operations) >= count)  # type: ignore[misc]
            at_least = max((step for job in rivals.jobs for step, _ in job.committed), default=0)
            for outcome in enumerate_outcomes(rivals.disk.pending(), limit=4):
                disk = rivals.disk.clone()
                disk.crash(outcome)
                check_recovery(disk, at_least=at_least, world_size=2, attempt=2)


# Planted faults: each weakened fence must be caught by the same campaign.


def caught(*, handles: bool = False) -> bool:
    try:
        straggler_campaign(handles=handles, seeds=range(3))
    except (AssertionError, FireflyerError):
        return True
    return False


def test_a_commit_that_checks_for_a_newer_attempt_and_then_acts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fence(disk: Disk, root: str, writer: Writer, other: Writer) -> Steps[None]:
        yield

    whole = commit

    def checked(disk: Disk, root: str, directory: str, step: int, manifest: bytes, **options: Any) -> Steps[str]:
        writer = parse_writer(directory.partition("/")[0])
        assert writer is not None
        newer = overtaken_by(disk.list(root), writer)
        if newer is not None:
            raise Fenced(f"attempt 0 may no longer change {root}: it has begun there")
        return (yield from whole(disk, root, directory, step, manifest, **options))

    monkeypatch.setattr(opening, "_fence", no_fence)
    monkeypatch.setattr(performing, "commit", checked)
    assert caught()


def test_a_fence_that_only_renames_the_old_directory_is_caught_by_a_client_with_handles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def aside(disk: Disk, root: str, writer: Writer, other: Writer) -> Steps[None]:
        ours = f"{root}/{writer.name}"
        trash = trash_name(other.name, disk.list(ours))
        disk.rename(f"{root}/{other.name}", f"{ours}/{trash}")
        yield
        disk.sync_dir(root)

    monkeypatch.setattr(opening, "_fence", aside)
    assert not caught(), "by path it would do"
    assert caught(handles=True)


def test_a_fence_that_empties_saves_in_the_old_directory_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(disk: Disk, root: str, writer: Writer, other: Writer) -> Steps[None]:
        yield from remove_tree(disk, f"{root}/{other.name}")

    monkeypatch.setattr(opening, "_fence", in_place)
    assert caught()


def test_a_removal_that_does_not_go_through_the_writers_directory_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_root(disk: Disk, root: str, name: str, writer_directory: str) -> Steps[None]:
        trash = trash_name(name.rpartition("/")[2], disk.list(root))
        disk.rename(f"{root}/{name}", f"{root}/{trash}")
        yield
        disk.sync_dir(root)
        yield from remove_tree(disk, f"{root}/{trash}")

    monkeypatch.setattr(performing, "discard", in_root)
    assert caught()


# The decisions.

HEXADECIMAL = "0123456789abcdef"
some_writers = st.builds(
    Writer,
    token=st.integers(1, 20),
    tag=st.text(HEXADECIMAL, min_size=1, max_size=8),
    attempt=st.integers(0, 5),
    launch=st.sampled_from([LAUNCH, OTHER_LAUNCH, UNKNOWN_LAUNCH]),
)


@given(st.lists(some_writers, max_size=6, unique_by=lambda writer: writer.name), st.integers(0, 5))
def test_a_new_writer_is_newer_than_all_and_a_name_says_who_it_is(others: list[Writer], attempt: int) -> None:
    names = ["step-00000010", "job.json", *(other.name for other in others)]
    assert writers(names) == sorted(others)
    ours = next_writer(names, launch=LAUNCH, attempt=attempt, tag="0")
    assert overtaken_by([*names, ours.name], ours) is None
    assert smaller([*names, ours.name], ours) == sorted(others)
    assert parse_writer(ours.name) == ours
    later = [other for other in others if other.launch == LAUNCH and other.attempt > attempt]
    if later:
        with pytest.raises(Fenced, match=f"attempt {attempt} may no longer change"):
            check_start(names, launch=LAUNCH, attempt=attempt, root=ROOT)
    else:
        check_start(names, launch=LAUNCH, attempt=attempt, root=ROOT)
    check_start(names, launch=UNKNOWN_LAUNCH, attempt=attempt, root=ROOT)


@pytest.mark.parametrize(
    "name",
    [
        ".writer-1-00000-1234567890abcdef-0",
        ".writer-00000001-00000-1234567890abcdef-",
        ".writer-00000001-00000-1234567890ABCDEF-0",
        ".writer-٠٠٠٠٠٠٠١-00000-1234567890abcdef-0",
        ".writer-000000001-00000-1234567890abcdef-0",
        ".writer-99999999999-00000-1234567890abcdef-0",
        ".writer-00000001-00000-1234567890abcdef-0/..",
    ],
)
def test_names_that_no_writer_has_are_none(name: str) -> None:
    assert parse_writer(name) is None


def test_the_order_of_writers_is_that_of_their_tokens() -> None:
    old = Writer(1, "ff", 7, LAUNCH)
    assert msgspec.structs.replace(old, token=2, tag="00", attempt=0) > old
