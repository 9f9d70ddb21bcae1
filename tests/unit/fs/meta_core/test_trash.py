"""The trash: what is kept in it, who gets at it, when it is emptied."""

from __future__ import annotations

import errno

import pytest
from tests.support.fs.clusters.names import ADMINISTRATOR, Names, at, user

from fireflyer.base.units import SECOND
from fireflyer.fs.core.meta.background_tasks import EXPIRE_EVERY_NS
from fireflyer.fs.core.meta.context import Requester
from fireflyer.fs.core.meta.namespace.trash import MOST_STEP_NS
from fireflyer.fs.core.meta.namespace.trash_expiry import TrashClock
from fireflyer.fs.schema.inodes import Defaults, Kind
from fireflyer.fs.schema.meta import (
    GetQuota,
    Link,
    ListDirectory,
    Listing,
    MakeDirectory,
    MakeNode,
    QuotaTree,
    Remove,
    Removed,
    RemoveDirectory,
    RemoveTree,
    Rename,
    SetAttributes,
    SetDefaults,
    SetQuota,
    Stat,
)

ALICE, BOB = user(1001), user(1002)
YEAR_NS = 365 * 86400 * SECOND
STEP_S = EXPIRE_EVERY_NS // SECOND


def begin(names: Names, *paths: str, seconds: int = 60) -> None:
    names.do(MakeDirectory(at("d")), SetAttributes(at("d"), mode=0o777))
    names.do(SetDefaults(at("d"), Defaults(trash_s=seconds)))
    for path in paths:
        if path.endswith("/"):
            names.do(MakeDirectory(at("d/" + path)), requester=ALICE)
        else:
            names.do(MakeNode(at("d/" + path), Kind.FILE), requester=ALICE)


def listed(names: Names, path: str, requester: Requester = ADMINISTRATOR) -> list[str]:
    answer = names.ask(ListDirectory(names.stat(path).id), Listing, requester)
    return [entry.name.decode() for entry in answer.entries]


def test_what_is_removed_is_found_in_the_trash_of_who_removed_it_and_can_be_moved_back() -> None:
    with Names() as names:
        begin(names, "f")
        inode = names.stat("d/f")
        names.do(Remove(at("d/f")), requester=BOB)
        names.check()
        assert listed(names, ".trash/1002", BOB) == [f"f~{inode.id}"]
        assert names.errno(Stat(at(f".trash/1002/f~{inode.id}")), ALICE) == errno.EACCES
        assert names.errno(Rename(at(".trash/1002"), at("mine")), BOB) == errno.EACCES
        names.do(Rename(at(f".trash/1002/f~{inode.id}"), at("d/f")), requester=BOB)
        assert names.stat("d/f").id == inode.id
        names.now_ns += 120 * SECOND
        assert not names.expire()
        assert names.stat("d/f").links == 1
        names.check()


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_what_lies_below_a_tree_that_is_removed_goes_to_its_own_trash(limit: int) -> None:
    with Names() as names:
        names.do(MakeDirectory(at("t"), 0o777), MakeDirectory(at("t/plain")), MakeNode(at("t/plain/f"), Kind.FILE))
        names.do(MakeDirectory(at("t/home")), SetDefaults(at("t/home"), Defaults(trash_s=60)))
        names.do(MakeNode(at("t/home/f"), Kind.FILE), MakeDirectory(at("t/home/empty")), MakeDirectory(at("t/home/in")))
        names.do(MakeNode(at("t/home/in/g"), Kind.FILE), MakeNode(at("t/home/linked"), Kind.FILE))
        names.do(Link(at("t/home/linked"), at("t/home/in/too")), MakeNode(at("t/z"), Kind.FILE))
        file, within, linked = (names.stat(f"t/home/{name}").id for name in ("f", "in", "linked"))
        while names.ask(RemoveTree(at("t"), limit), Removed).more:
            names.check()
        names.check()
        assert names.errno(Stat(at("t"))) == errno.ENOENT
        assert listed(names, ".trash/0") == [f"f~{file}", f"in~{within}"]
        assert names.stat(f".trash/0/in~{within}/too").id == linked
        names.now_ns += 120 * SECOND
        names.expire()
        assert listed(names, ".trash/0") == []
        names.check()


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_a_trash_that_lies_in_the_tree_goes_with_it(limit: int) -> None:
    """As the last name of what is in there."""
    with Names() as names:
        names.do(MakeDirectory(at("t"), 0o777), MakeDirectory(at("t/head")), SetQuota(at("t/head"), inodes=100))
        names.do(SetDefaults(at("t/head"), Defaults(trash_s=60)), MakeDirectory(at("t/head/in")))
        for path in ("t/head/!", "t/head/z", "t/head/in/f"):
            names.do(MakeNode(at(path), Kind.FILE))
        names.do(Remove(at("t/head/z")))
        assert listed(names, "t/head") == ["!", ".trash", "in"]
        while names.ask(RemoveTree(at("t"), limit), Removed).more:
            names.check()
        assert names.errno(Stat(at("t"))) == errno.ENOENT
        names.check()


def test_it_is_removed_for_good_when_its_time_has_come() -> None:
    with Names() as names:
        begin(names, "f", "g")
        names.do(Remove(at("d/f")), requester=ALICE)
        names.now_ns += 50 * SECOND
        names.do(Remove(at("d/g")), requester=ALICE)
        assert not names.expire()
        assert len(listed(names, ".trash/1001")) == 2
        names.now_ns += 20 * SECOND
        assert not names.expire()
        assert [name[0] for name in listed(names, ".trash/1001")] == ["g"]
        names.check()
        names.now_ns += 60 * SECOND
        names.expire()
        assert listed(names, ".trash/1001") == []
        assert not [key for key, _ in names.rows() if key[:2] == b"FT"]
        names.check()


def lead(names: Names, clock: TrashClock, from_s: int, seconds: int) -> int:
    """For so long; when it is then, by that leader's own clock."""
    for now_s in range(from_s, from_s + seconds, STEP_S):
        names.lead(clock, now_s * SECOND)
    return from_s + seconds


@pytest.mark.parametrize("wrong_ns", [YEAR_NS, -YEAR_NS])
def test_a_leader_whose_wall_clock_is_wrong_removes_nothing_early_or_late(wrong_ns: int) -> None:
    with Names() as names:
        lead(names, TrashClock(), 1000, 20)
        begin(names, "f")
        names.do(Remove(at("d/f")), requester=ALICE)
        names.now_ns += wrong_ns
        other = TrashClock()
        now_s = lead(names, other, 7, 60)
        assert len(listed(names, ".trash/1001")) == 1
        lead(names, other, now_s, MOST_STEP_NS // SECOND + 2 * STEP_S)
        assert listed(names, ".trash/1001") == []
        names.check()


@pytest.mark.parametrize("wrong_ns", [YEAR_NS, -YEAR_NS])
def test_what_is_removed_by_a_service_whose_wall_clock_is_wrong_stays_as_long_as_other_things(wrong_ns: int) -> None:
    with Names() as names:
        clock = TrashClock()
        now_s = lead(names, clock, 1000, 20)
        begin(names, "f")
        names.now_ns += wrong_ns
        names.do(Remove(at("d/f")), requester=ALICE)
        names.now_ns -= wrong_ns
        now_s = lead(names, clock, now_s, 60)
        assert len(listed(names, ".trash/1001")) == 1
        lead(names, clock, now_s, MOST_STEP_NS // SECOND + 2 * STEP_S)
        assert listed(names, ".trash/1001") == []


def test_several_that_believe_to_lead_and_pauses_make_its_time_no_shorter() -> None:
    with Names() as names:
        clocks = [TrashClock() for _ in range(3)]
        now_s = lead(names, clocks[0], 1000, 20)
        begin(names, "f")
        names.do(Remove(at("d/f")), requester=ALICE)
        removed_s = now_s
        while now_s < removed_s + 60:
            for clock in clocks:
                names.lead(clock, now_s * SECOND)
            now_s += 1
        assert len(listed(names, ".trash/1001")) == 1
        names.do(MakeNode(at("d/g"), Kind.FILE), Remove(at("d/g")), requester=BOB)
        names.lead(clocks[0], (now_s + 3600) * SECOND)  # it stood still, or the machine did
        assert len(listed(names, ".trash/1002")) == 1


def test_it_is_off_by_default_and_off_in_the_trash() -> None:
    with Names() as names:
        begin(names, "f", "sub/", "sub/g", seconds=0)
        names.do(Remove(at("d/f")))
        assert names.errno(Stat(at(".trash"))) == errno.ENOENT
        names.do(SetDefaults(at("d"), Defaults(trash_s=5)), SetDefaults(at("d/sub"), Defaults(trash_s=5)))
        names.do(RemoveTree(at("d/sub")), requester=ALICE)
        kept = f".trash/1001/{listed(names, '.trash/1001')[0]}"
        assert listed(names, kept) == ["g"]
        names.do(Remove(at(kept + "/g")), requester=ALICE)
        assert listed(names, ".trash/1001") == [kept.split("/")[-1]]
        names.do(RemoveDirectory(at(kept)), requester=ALICE)
        assert listed(names, ".trash/1001") == []
        names.check()


def test_directories_made_in_one_with_trash_have_it_too() -> None:
    with Names() as names:
        begin(names, "sub/", "sub/f")
        names.do(Remove(at("d/sub/f")), requester=ALICE)
        assert len(listed(names, ".trash/1001")) == 1


def test_what_a_rename_replaces_is_kept_and_what_has_another_name_is_not() -> None:
    with Names() as names:
        begin(names, "f", "g", "h")
        old = names.stat("d/g").id
        names.do(Rename(at("d/f"), at("d/g")), requester=ALICE)
        assert listed(names, ".trash/1001") == [f"g~{old}"]
        names.check()
        names.do(Link(at("d/h"), at("d/again")))
        names.do(Remove(at("d/again")), requester=ALICE)
        assert listed(names, ".trash/1001") == [f"g~{old}"]
        names.do(Rename(at(f".trash/1001/g~{old}"), at("d/g")), requester=ALICE)
        assert len(listed(names, ".trash/1001")) == 1  # what was put in the place of g meanwhile
        names.check()


def test_a_tree_goes_to_the_trash_at_once_and_is_removed_in_steps() -> None:
    with Names() as names:
        begin(names, "t/", *(f"t/{number}" for number in range(5)), "t/s/", "t/s/f")
        assert names.ask(RemoveTree(at("d/t"), 1), Removed, ALICE) == Removed(1, more=False)
        names.check()
        assert len(listed(names, ".trash/1001")) == 1
        names.now_ns += 61 * SECOND
        steps = 1
        while names.expire(2):
            names.check()
            steps += 1
        assert steps >= 4
        assert listed(names, ".trash/1001") == []
        names.check()


def test_a_tree_with_what_others_own_is_not_removed_with_more_rights_than_its_remover_had() -> None:
    with Names() as names:
        begin(names, "t/")
        names.do(SetAttributes(at("d/t"), mode=0o777))
        names.do(MakeDirectory(at("d/t/bobs"), 0o755), MakeNode(at("d/t/bobs/f"), Kind.FILE), requester=BOB)
        names.do(RemoveTree(at("d/t")), requester=ALICE)
        names.now_ns += 61 * SECOND
        assert not names.expire()
        assert len(listed(names, ".trash/1001")) == 1
        assert not [key for key, _ in names.rows() if key[:2] == b"FT"]
        names.check()


def test_what_cannot_be_removed_in_a_tree_ends_with_all_counted() -> None:
    with Names() as names:
        begin(names, "t/", "t/a", "t/b/", "t/b/f", "t/c/", "t/c/bobs/", "t/d")
        names.do(MakeNode(at("d/t/c/bobs/f"), Kind.FILE), SetAttributes(at("d/t/c/bobs"), uid=1002, mode=0o700))
        names.do(RemoveTree(at("d/t")), requester=ALICE)
        names.now_ns += 61 * SECOND
        while names.expire():
            names.check()
        names.check()
        [kept] = listed(names, ".trash/1001")
        assert listed(names, f".trash/1001/{kept}") == ["c", "d"]


def test_each_area_has_its_own_and_a_full_one_can_still_be_emptied() -> None:
    with Names() as names:
        begin(names)
        names.do(SetQuota(at("d"), None, 3), SetAttributes(at("d"), uid=1001))
        names.do(MakeNode(at("d/f"), Kind.FILE), MakeNode(at("d/g"), Kind.FILE), requester=ALICE)
        names.do(Remove(at("d/f")), requester=ALICE)
        assert len(listed(names, "d/.trash/1001")) == 1
        assert names.ask(GetQuota(at("d")), QuotaTree).inodes == 5
        names.check()


@pytest.mark.parametrize(("requester", "mode"), [(BOB, 0o755), (ADMINISTRATOR, 0o775)])
def test_a_name_that_is_taken_is_left_alone(requester: Requester, mode: int) -> None:
    with Names() as names:
        begin(names, "f", "g")
        names.do(MakeDirectory(at(".trash"), mode), requester=requester)
        names.do(Remove(at("d/f")), requester=ALICE)
        assert listed(names, ".trash") == []
        assert len(listed(names, ".trash.1/1001")) == 1
        names.do(Remove(at("d/g")), requester=BOB)
        assert sorted(listed(names, ".trash.1")) == ["1001", "1002"]
        names.check()


def test_another_file_in_its_place_is_not_what_was_removed() -> None:
    with Names() as names:
        begin(names, "f")
        names.do(Remove(at("d/f")), requester=ALICE)
        [kept] = listed(names, ".trash/1001")
        names.do(Rename(at(".trash/1001/" + kept), at("d/f")), requester=ALICE)
        names.do(MakeNode(at(".trash/1001/" + kept), Kind.FILE), requester=ALICE)
        names.now_ns += 61 * SECOND
        names.expire()
        assert listed(names, ".trash/1001") == [kept]
        names.check()


def test_long_names_and_names_that_come_again_have_room_in_it() -> None:
    with Names() as names:
        long = "n" * 255
        begin(names, long)
        inode = names.stat("d/" + long).id
        names.do(Remove(at("d/" + long)), requester=ALICE)
        [kept] = listed(names, ".trash/1001")
        names.do(Rename(at(".trash/1001/" + kept), at("d/" + long)), requester=ALICE)
        names.do(MakeNode(at(".trash/1001/" + kept), Kind.FILE), requester=ALICE)
        names.do(Remove(at("d/" + long)), requester=ALICE)
        both = listed(names, ".trash/1001")
        assert len(both) == 2
        assert all(len(name) <= 255 for name in both)
        assert inode in [names.stat(".trash/1001/" + name).id for name in both]
        names.check()
