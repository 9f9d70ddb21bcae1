"""Mutants of the state of open files: the real code with one bug each, which the simulation must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from tests.support.fs.meta_sim.chaos import chaos
from tests.support.fs.meta_sim.chunks import ChunkClient
from tests.support.fs.meta_sim.workload import MetaClient
from tests.support.fs.meta_sim.world import RequestPorts

from fireflyer.fs.core.meta import dispatch, quota_trees, replies
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes import attributes
from fireflyer.fs.core.meta.inodes.layout import chain_of, pieces
from fireflyer.fs.core.meta.namespace import xattrs
from fireflyer.fs.core.meta.open_files import garbage_collection, lengths, locks, session_cleanup, truncate
from fireflyer.fs.core.meta.open_files.garbage_collection import GarbageCollector
from fireflyer.fs.core.meta.open_files.lengths import ChunkEnd, file_of
from fireflyer.fs.core.meta.open_files.session_cleanup import SessionCleaner
from fireflyer.fs.core.meta.open_rows import HeldLock, TruncationRow, WriterRow, pair_of
from fireflyer.fs.core.meta.open_rows import any_in as any_in_rows
from fireflyer.fs.core.meta.ports import Ports
from fireflyer.fs.core.meta.tables import UNLINKED, inode_key
from fireflyer.fs.schema.inodes import FileDetails, Inode
from fireflyer.fs.schema.meta import Close, ErrorReply, Found, LockKind, Report, Reserve, Reserved, SetAttributes

__all__ = ["MUTANTS", "Mutant"]

Patch = pytest.MonkeyPatch


# --- lengths ---


def reports_of_another_cut_are_believed(patch: Patch) -> None:
    original = lengths._reported

    async def reported(request: Report | Close, context: Context, measured: ChunkEnd | None) -> tuple[Inode, WriterRow]:
        _, body = file_of(await context.inode(request.inode))
        return await original(request, context, ChunkEnd(body.cut, request.end))

    patch.setattr(lengths, "_reported", reported)
    patch.setattr(lengths, "_end_of", lambda request, _inode, _measured: min(request.end, 40 * 16384))


def reports_of_another_cut_are_ignored(patch: Patch) -> None:
    original = lengths._reported

    async def reported(request: Report | Close, context: Context, measured: ChunkEnd | None) -> tuple[Inode, WriterRow]:
        _, body = file_of(await context.inode(request.inode))
        return await original(request, context, ChunkEnd(body.cut, 0) if measured is None else measured)

    patch.setattr(lengths, "_reported", reported)


def reservations_do_not_grow_the_file(patch: Patch) -> None:
    async def reserve(request: Reserve, context: Context) -> Reserved:
        inode, body = file_of(await context.inode(request.inode))
        await lengths.writer_of(context, inode.id, request.handle)
        return Reserved(body.length, inode)

    patch.setitem(dispatch._BODIES, Reserve, reserve)


def leaves_what_is_over_the_quota(patch: Patch) -> None:
    original = lengths.drop_writer

    async def drop(context: Context, inode: Inode, client: int, *, excess: bool) -> Inode:
        return await original(context, inode, client, excess=False)

    patch.setattr(lengths, "drop_writer", drop)
    patch.setattr(session_cleanup, "drop_writer", drop)


def lazy_closes_end_what_was_opened_since(patch: Patch) -> None:
    """As if the client did not write the file any more: true when nothing can overtake its close."""
    original = lengths.close

    async def close(request: Close, context: Context, measured: ChunkEnd | None = None) -> Found | ErrorReply:
        answer = await original(request, context, measured)
        if request.lazy and isinstance(answer, Found):
            return Found(await lengths.drop_writer(context, answer.inode, context.requester.client, excess=False))
        return answer

    patch.setitem(dispatch._BODIES, Close, close)


def closes_lazily_what_was_not_told(patch: Patch) -> None:
    patch.setattr(MetaClient, "_may_be_lazy", lambda *_: True)


def attributes_forget_their_report(patch: Patch) -> None:
    patch.setitem(dispatch._BODIES, SetAttributes, attributes.set_attributes)


# --- cuts ---


def answers_before_the_chunks_are_cut(patch: Patch) -> None:
    async def cut_off(*_: Any) -> None:
        return

    patch.setattr(truncate, "_cut_off", cut_off)


def leaves_the_last_chunk_whole(patch: Patch) -> None:
    async def shorten(*_: Any) -> None:
        return

    patch.setattr(truncate, "_shorten", shorten)


def keeps_no_answer_for_others(patch: Patch) -> None:
    def keep(*_: Any) -> None:
        return

    original = truncate._end

    async def end(context: Context, inode_id: int, row: TruncationRow) -> None:
        mine = (row.client, row.number) == (context.requester.client, context.number)
        with pytest.MonkeyPatch.context() as inner:
            if not mine:
                inner.setattr(replies, "keep", keep)
            await original(context, inode_id, row)

    patch.setattr(truncate, "_end", end)


def forgets_what_was_given_up(patch: Patch) -> None:
    """That a chunk is not there is taken to mean that nothing is on its way to it."""
    patch.setattr(RequestPorts, "in_doubt", lambda *_: {})


def takes_over_from_the_living(patch: Patch) -> None:
    async def lives(*_: Any) -> bool:
        return False

    patch.setattr(truncate, "lives", lives)
    takes_over_at_once(patch)


def takes_over_at_once(patch: Patch) -> None:
    patch.setattr(RequestPorts, "settle_ns", property(lambda _: 0, lambda *_: None), raising=False)


def goes_on_under_another_session(patch: Patch) -> None:
    """As the chunk client does with all updates that are not bound to a session."""
    patch.setattr(ChunkClient, "_check", lambda *_: None)


def two_tasks_cut_at_once(patch: Patch) -> None:
    patch.setattr(RequestPorts, "claim", lambda *_: True)


def holes_make_chunks_longer(patch: Patch) -> None:
    original = truncate._make_hole

    async def make_hole(
        inode_id: int, body: FileDetails, order: Sequence[int], row: TruncationRow, ports: Ports
    ) -> None:
        await original(inode_id, body, order, row, ports)
        for piece in pieces(body.layout, row.start, row.end - row.start):
            if piece.size < body.layout.chunk_bytes:
                chain = chain_of(order, piece.chunk)
                await ports.chunks.write_zeros(
                    inode_id, chain, piece.chunk, piece.offset, piece.size, session=row.owner
                )

    patch.setattr(truncate, "_make_hole", make_hole)


# --- what clients leave ---


def dead_writers_are_not_asked_for(patch: Patch) -> None:
    async def measure(inode_id: int, ports: Ports, **_: Any) -> ChunkEnd:
        async def look(context: Context) -> ChunkEnd:
            return ChunkEnd(file_of(await context.inode(inode_id))[1].cut, 0)

        return await ports.transact(look)

    patch.setattr("fireflyer.fs.core.meta.open_files.session_cleanup.truncate.measure", measure)


def reaps_before_the_last_writes_arrive(patch: Patch) -> None:
    original = SessionCleaner.step

    async def step(self: SessionCleaner, ports: Ports) -> bool:
        class Hasty:
            settle_ns = 0

            def __getattr__(self, name: str) -> Any:
                return getattr(ports, name)

        return await original(self, Hasty())

    patch.setattr(SessionCleaner, "step", step)


def locks_outlive_their_clients(patch: Patch) -> None:
    async def release_all(*_: Any) -> None:
        return

    patch.setattr(locks, "release_all", release_all)


def an_unlock_takes_the_whole_lock(patch: Patch) -> None:
    """The wrong half: what remains on the right side of a change is forgotten, and of others' what it overlaps."""

    def changed(held: tuple[HeldLock, ...], wanted: HeldLock) -> tuple[HeldLock, ...]:
        others = tuple(one for one in held if one.start < wanted.start or one.window is not wanted.window)
        return original(others, wanted)

    original = locks.changed
    patch.setattr(locks, "changed", changed)


def readers_do_not_stop_writers(patch: Patch) -> None:
    original = locks.in_the_way

    def in_the_way(held: tuple[HeldLock, ...], wanted: HeldLock) -> list[HeldLock]:
        return [one for one in original(held, wanted) if one.kind is LockKind.WRITE]

    patch.setattr(locks, "in_the_way", in_the_way)


# --- collecting ---


def collects_what_is_held(patch: Patch) -> None:
    async def holds_of(*_: Any) -> bool:
        return False

    patch.setattr(garbage_collection, "holds_of", holds_of)


def one_beat_is_enough(patch: Patch) -> None:
    patch.setattr(garbage_collection, "HEARTBEATS_AFTER", 1)


def two_beats_are_enough(patch: Patch) -> None:
    patch.setattr(garbage_collection, "HEARTBEATS_AFTER", 2)


def looks_at_beats_without_a_generation(patch: Patch) -> None:
    """What is unlinked after the look is taken for unlinked before."""
    patch.setattr(garbage_collection, "set_generation", lambda *_: None)


def collects_what_is_written(patch: Patch) -> None:
    async def any_in(rows: Any, begin: bytes, end: bytes) -> bool:
        return begin[:2] == UNLINKED and await original(rows, begin, end)

    original = any_in_rows
    patch.setattr(garbage_collection, "any_in", any_in)


def the_inode_goes_before_its_chunks(patch: Patch) -> None:
    async def choose(context: Context, key: bytes) -> Inode | None:
        inode = await original(context, key)
        if inode is not None:
            await garbage_collection._clear(context, key, inode)
        return inode

    original = garbage_collection._doomed
    patch.setattr(garbage_collection, "_doomed", choose)


def collected_bytes_stay_in_use(patch: Patch) -> None:
    async def clear(context: Context, key: bytes, inode: Inode) -> None:
        if await context.rows.get(key) is not None:
            await quota_trees.charge(context, inode.quota_tree, inode.length, 0, checked=False)
            await original(context, key, inode)

    original = garbage_collection._clear
    patch.setattr(garbage_collection, "_clear", clear)


def attributes_are_charged_again_with_each_change(patch: Patch) -> None:
    original = xattrs._charge

    async def charge(context: Context, inode: Inode, kept: Mapping[bytes, int]) -> None:
        await original(context, msgspec.structs.replace(inode, xattr_bytes=0), kept)

    patch.setattr(xattrs, "_charge", charge)


def chunks_are_forgotten(patch: Patch) -> None:
    """Only those of the first chain are removed."""

    async def remove_all(inode_id: int, order: Sequence[int], ports: Ports) -> None:
        await original(inode_id, order[:1], ports)

    original = truncate.remove_all
    patch.setattr(garbage_collection, "remove_all", remove_all)


def unlinked_files_are_forgotten(patch: Patch) -> None:
    original = GarbageCollector._collect

    async def collect(self: GarbageCollector, ports: Ports) -> bool:
        async def drop(context: Context) -> None:
            page = await context.rows.get_range(UNLINKED, UNLINKED + b"\xff", limit=1)
            for key, _ in page.items:
                context.rows.clear(inode_key(pair_of(key)[1]))
                context.rows.clear(key)

        await ports.transact(drop)
        return await original(self, ports)

    patch.setattr(GarbageCollector, "_collect", collect)


class Mutant(NamedTuple):
    """`within`: so many seeds find it, from the first; several times as many as it took."""

    apply: Callable[[Patch], None]
    within: int
    plan: str
    """Of the faults."""

    def attempt(self, seed: int) -> str | None:
        """What the simulation found, or None."""
        try:
            chaos(seed, plan=self.plan)
        except AssertionError as error:
            return str(error)
        return None


MUTANTS: dict[str, Mutant] = {}
for _apply, _within, _plan in [
    (reports_of_another_cut_are_believed, 50, "cuts"),
    (reports_of_another_cut_are_ignored, 50, "cuts"),
    (reservations_do_not_grow_the_file, 50, ""),
    (leaves_what_is_over_the_quota, 120, ""),
    (lazy_closes_end_what_was_opened_since, 50, ""),
    (closes_lazily_what_was_not_told, 50, ""),
    (attributes_forget_their_report, 50, ""),
    (answers_before_the_chunks_are_cut, 50, "cuts"),
    (leaves_the_last_chunk_whole, 50, "cuts"),
    (keeps_no_answer_for_others, 120, "cuts"),
    (forgets_what_was_given_up, 1500, "cuts"),
    (takes_over_from_the_living, 300, "cuts"),
    (takes_over_at_once, 1500, "cuts"),
    (goes_on_under_another_session, 120, "sessions"),
    (two_tasks_cut_at_once, 1200, "cuts"),
    (holes_make_chunks_longer, 1000, "cuts"),
    (dead_writers_are_not_asked_for, 50, ""),
    (reaps_before_the_last_writes_arrive, 300, "deaths"),
    (locks_outlive_their_clients, 50, ""),
    (an_unlock_takes_the_whole_lock, 50, ""),
    (readers_do_not_stop_writers, 50, ""),
    (collects_what_is_held, 60, "holds"),
    (one_beat_is_enough, 80, "holds"),
    (two_beats_are_enough, 600, "holds"),
    (looks_at_beats_without_a_generation, 100, "holds"),
    (collects_what_is_written, 50, ""),
    (the_inode_goes_before_its_chunks, 400, ""),
    (collected_bytes_stay_in_use, 50, ""),
    (attributes_are_charged_again_with_each_change, 50, ""),
    (chunks_are_forgotten, 50, ""),
    (unlinked_files_are_forgotten, 50, ""),
]:  # fmt: skip
    MUTANTS[_apply.__name__.replace("_", " ")] = Mutant(_apply, _within, _plan)
