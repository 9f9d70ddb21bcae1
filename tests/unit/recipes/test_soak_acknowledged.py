"""What writers of the soak do, note, and what must be there by their notes."""

from __future__ import annotations

import hashlib
import itertools

import pytest

from fireflyer.base.errors import InvariantViolation
from fireflyer.recipes.soak.acknowledged import (
    Noted,
    Remove,
    Replace,
    Write,
    content_of,
    decode_notes,
    encode_note,
    twins_of_notes,
)
from fireflyer.recipes.soak.operations import LOGS, WRITERS, operations


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_files_follow_from_the_notes_in_their_order() -> None:
    notes: list[Noted] = [
        Write(0, "/a", 0, 100, new=True),
        Write(1, "/a", 100, 50),
        Write(2, "/a", 20, 10),
        Replace(3, "/b", 30),
        Replace(4, "/b", 20),
        Write(5, "/c", 0, 5, new=True),
        Remove(6, "/c"),
    ]
    found = {twin.path: twin for twin in twins_of_notes(7, "w", notes)}
    a = bytearray(content_of(7, "w", 0, 100) + content_of(7, "w", 1, 50))
    a[20:30] = content_of(7, "w", 2, 10)
    assert (found["/a"].bytes, found["/a"].digest) == (150, digest(bytes(a)))
    assert (found["/b"].bytes, found["/b"].digest) == (20, digest(content_of(7, "w", 4, 20)))
    assert set(found) == {"/a", "/b"}
    lost = {twin.path: twin for twin in twins_of_notes(7, "w", [note for note in notes if note.number != 2])}
    assert lost["/a"] != found["/a"]


def test_contents_differ_by_seed_writer_and_number() -> None:
    different = {content_of(*key, 16) for key in itertools.product((1, 2), ("v", "w"), (1, 2))}
    assert len(different) == 8


@pytest.mark.parametrize(
    "notes",
    [
        [Write(0, "/a", 10, 5, new=True)],
        [Write(0, "/a", 0, 5)],
        [Write(0, "/a", 0, 5, new=True), Write(1, "/a", 0, 5, new=True)],
        [Write(0, "/a", 0, 5, new=True), Write(1, "/a", 6, 5)],
        [Remove(0, "/a")],
    ],
)
def test_notes_that_no_writer_makes_are_refused(notes: list[Noted]) -> None:
    with pytest.raises(InvariantViolation):
        twins_of_notes(1, "w", notes)


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_operations_are_the_same_for_a_seed_and_can_be_noted_and_replayed(writer: str) -> None:
    count = 700
    first = list(itertools.islice(operations(writer, 3), count))
    assert first == list(itertools.islice(operations(writer, 3), count))
    assert first != list(itertools.islice(operations(writer, 4), count))
    assert [one.number for one in first] == list(range(count))
    lines = b"".join(encode_note(one) for one in first).splitlines(keepends=True)
    assert decode_notes(lines) == first
    files = twins_of_notes(3, writer, first)
    assert 1 <= len(files) <= 12
    assert all(twin.path.startswith(f"/soak/{writer}/") for twin in files)
    if writer == "append":
        assert len(files) in (LOGS, LOGS + 1)
