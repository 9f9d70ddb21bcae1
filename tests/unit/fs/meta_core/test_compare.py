"""What `ff fs fsck` takes for wrong, and what not."""

from __future__ import annotations

import msgspec
import pytest

from fireflyer.fs.core.meta.fsck.compare import Fault, FaultKind, Name, NamespaceCheck, lasting, wrong_chunks
from fireflyer.fs.core.meta.inodes.layout import order_of
from fireflyer.fs.schema.chunks import ChunkEntry, ChunkVersion
from fireflyer.fs.schema.ids import ChunkId, ContentId
from fireflyer.fs.schema.inodes import ROOT, DirectoryDetails, FileDetails, Inode, Kind, Layout

CHAINS = (11, 12, 13, 14)
CHUNK = 65536


def directory(number: int, parent: int, entries: int, subdirectories: int = 0, quota_tree: int = 0) -> Inode:
    body = DirectoryDetails(parent, entries, subdirectories)
    return Inode(number, Kind.DIRECTORY, 0o755, 0, 0, 1, 0, 0, 0, quota_tree, body)


def file(number: int, links: int = 1, length: int = 0, quota_tree: int = 0) -> Inode:
    return Inode(
        number, Kind.FILE, 0o644, 0, 0, links, 0, 0, 0, quota_tree, FileDetails(Layout(1, CHUNK, 3, number), length)
    )


def held(length: int) -> ChunkVersion:
    return ChunkVersion(ContentId(1, 1), length, 0)


def kinds(names: NamespaceCheck) -> list[FaultKind]:
    return [fault.kind for fault in names.faults()]


def test_a_tree_with_several_names_of_a_file_is_right() -> None:
    root, below = directory(ROOT, ROOT, 3, 1), directory(2, ROOT, 1, quota_tree=2)
    twice = file(4, links=2)
    names = NamespaceCheck(root)
    within = names.directory("/", root, [Name("a", file(3)), Name("b", below), Name("c", twice)])
    assert within == [Name("b", below)]
    assert names.directory("/b", below, [Name("d", msgspec.structs.replace(twice, quota_tree=2))]) == []
    assert names.faults() == []


def test_counts_of_a_directory() -> None:
    names = NamespaceCheck(directory(ROOT, ROOT, 2, 1))
    names.directory("/", directory(ROOT, ROOT, 2, 1), [Name("a", file(3))])
    (fault,) = names.faults()
    assert (fault.kind, fault.path, fault.text) == (
        FaultKind.COUNTS,
        "/",
        "counts 2 names and 1 directories, contains 1 and 0",
    )


def test_a_directory_that_changed_meanwhile_proves_nothing() -> None:
    names = NamespaceCheck(directory(ROOT, ROOT, 2, 1))
    names.directory("/", directory(ROOT, ROOT, 2, 1), [Name("a", file(3)), Name("b", file(3))], steady=False)
    assert names.faults() == []


@pytest.mark.parametrize(("links", "found"), [(1, 2), (3, 2), (0, 1), (2, 1)])
def test_links_that_are_not_as_many_as_names(links: int, found: int) -> None:
    root = directory(ROOT, ROOT, found)
    names = NamespaceCheck(root)
    names.directory("/", root, [Name(str(number), file(5, links)) for number in range(found)])
    assert kinds(names) == [FaultKind.LINKS]


def test_a_directory_that_is_in_two_or_says_that_it_is_elsewhere() -> None:
    root = directory(ROOT, ROOT, 3, 3)
    names = NamespaceCheck(root)
    entries = [Name("a", directory(2, ROOT, 0)), Name("b", directory(2, ROOT, 0)), Name("c", directory(3, 2, 0))]
    assert [one.name for one in names.directory("/", root, entries)] == ["a", "c"]
    assert [(fault.kind, fault.path) for fault in names.faults()] == [(FaultKind.TREE, "/b"), (FaultKind.TREE, "/c")]


def test_a_quota_area_that_its_directory_is_not_in() -> None:
    root = directory(ROOT, ROOT, 2)
    names = NamespaceCheck(root)
    names.directory("/", root, [Name("a", file(5, quota_tree=5)), Name("b", file(6, quota_tree=2))])
    assert kinds(names) == [FaultKind.AREA, FaultKind.AREA]


def test_chunks_that_are_where_they_belong_and_holes_are_right() -> None:
    inode = file(7, length=5 * CHUNK - 10)
    order = order_of(Layout(1, CHUNK, 3, 7), CHAINS)
    there = {
        order[0]: [ChunkEntry(ChunkId(7, 0), held(CHUNK)), ChunkEntry(ChunkId(7, 3), held(5))],
        order[1]: [ChunkEntry(ChunkId(7, 4), held(CHUNK - 10))],
    }
    assert wrong_chunks("/x", inode, CHAINS, there) == []


def test_chunks_that_are_wrong() -> None:
    inode = file(7, length=5 * CHUNK - 10)
    order = order_of(Layout(1, CHUNK, 3, 7), CHAINS)
    (foreign,) = set(CHAINS) - set(order)
    there = {
        order[0]: [
            ChunkEntry(ChunkId(7, 1), held(1)),
            ChunkEntry(ChunkId(7, 3), None),
            ChunkEntry(ChunkId(7, 6), held(1)),
        ],
        order[1]: [ChunkEntry(ChunkId(7, 4), held(CHUNK - 9))],
        foreign: [ChunkEntry(ChunkId(7, 0), held(1))],
    }
    found = [fault.kind for fault in wrong_chunks("/x", inode, CHAINS, there)]
    assert found == [
        FaultKind.MISPLACED,
        FaultKind.DAMAGED,
        FaultKind.BEHIND,
        FaultKind.BEHIND,
        FaultKind.MISPLACED,
    ]


def test_only_what_is_found_twice_lasts() -> None:
    one, other = (Fault(FaultKind.BEHIND, 7, "/x", f"ends at {end}") for end in (5, 6))
    assert lasting([one, other], [other]) == [other]
    assert lasting([one], [other]) == []
