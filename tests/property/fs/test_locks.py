"""Locks of an inode against a model that keeps for every byte who has it."""

from __future__ import annotations

from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.fs.core.meta.open_files.locks import changed, in_the_way
from fireflyer.fs.core.meta.open_rows import HeldLock
from fireflyer.fs.schema.meta import LockKind, Window

BYTES: Final = 12
Owner = tuple[int, int]
Model = dict[Window, list[dict[Owner, LockKind]]]


@st.composite
def wishes(draw: st.DrawFn) -> HeldLock:
    window = draw(st.sampled_from(Window))
    start = 0 if window is Window.WHOLE else draw(st.integers(0, BYTES - 1))
    end = BYTES if window is Window.WHOLE else draw(st.integers(start + 1, BYTES))
    client, owner = draw(st.integers(1, 2)), draw(st.integers(0, 1))
    return HeldLock(window, draw(st.sampled_from(LockKind)), start, end, client, owner)


def free(model: Model, wanted: HeldLock) -> bool:
    me = (wanted.client, wanted.owner)
    return wanted.kind is LockKind.NONE or not any(
        other != me and LockKind.WRITE in (kind, wanted.kind)
        for place in model[wanted.window][wanted.start : wanted.end]
        for other, kind in place.items()
    )


def take(model: Model, wanted: HeldLock) -> None:
    me = (wanted.client, wanted.owner)
    for place in model[wanted.window][wanted.start : wanted.end]:
        place.pop(me, None)
        if wanted.kind is not LockKind.NONE:
            place[me] = wanted.kind


def as_model(held: tuple[HeldLock, ...]) -> Model:
    model: Model = {window: [{} for _ in range(BYTES)] for window in Window}
    for one in held:
        for place in model[one.window][one.start : one.end]:
            assert (one.client, one.owner) not in place, "an owner holds a byte twice"
            place[one.client, one.owner] = one.kind
    return model


@given(st.lists(wishes(), max_size=25))
def test_every_byte_has_whom_the_model_says(asked: list[HeldLock]) -> None:
    held: tuple[HeldLock, ...] = ()
    model = as_model(held)
    for wanted in asked:
        assert (not in_the_way(held, wanted)) == free(model, wanted)
        if free(model, wanted):
            held = changed(held, wanted)
            take(model, wanted)
            assert as_model(held) == model


@given(st.lists(wishes(), max_size=25))
def test_neighbours_of_one_kind_are_one_lock(asked: list[HeldLock]) -> None:
    held: tuple[HeldLock, ...] = ()
    for wanted in asked:
        if not in_the_way(held, wanted):
            held = changed(held, wanted)
    for one in held:
        assert one.kind is not LockKind.NONE
        assert one.start < one.end
        for other in held:
            same = (one.window, one.client, one.owner, one.kind) == (
                other.window,
                other.client,
                other.owner,
                other.kind,
            )
            assert not (same and one.end == other.start), "two locks could be one"
