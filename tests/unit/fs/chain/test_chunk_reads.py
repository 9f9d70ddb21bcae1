"""What the published table and a chunk's record let a replica answer."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fs.chain_sim.engine_model import Books, Record

from fireflyer.fs.core.chain.effects import PendingContent, TableEntry
from fireflyer.fs.core.chain.reads import decide
from fireflyer.fs.core.chain.role import role_of
from fireflyer.fs.schema.chunks import (
    ChunkEntry,
    ChunkVersion,
    Found,
    Missing,
    NotCommitted,
    Query,
    QueryKind,
    RefusalReason,
    Refused,
)
from fireflyer.fs.schema.ids import ChunkId, ContentId
from fireflyer.fs.schema.routing import Chain, Member, TargetState

OLD, NEW = ChunkVersion(ContentId(1, 1), 10, 7), ChunkVersion(ContentId(1, 2), 20, 8)
CLEAN, CHANGING, COMING, GOING, BROKEN = (ChunkId(1, index) for index in range(5))
TABLE = TableEntry(1, 5, True, 1000, 9, False)


def books() -> Books:
    return Books(
        {
            CLEAN: Record(OLD),
            CHANGING: Record(OLD, pending=PendingContent(NEW.id, NEW)),
            COMING: Record(pending=PendingContent(NEW.id, NEW)),
            GOING: Record(OLD, pending=PendingContent(NEW.id, None)),
            BROKEN: Record(OLD, damaged=True),
        }
    )


def look(chunk: ChunkId, kind: QueryKind = QueryKind.READ, **other: int) -> Query:
    return Query(**{"chain": 1, "chain_version": 5, "kind": kind, "chunk": chunk} | other)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [QueryKind.READ, QueryKind.STAT])
def test_a_clean_chunk_is_answered_and_an_absent_one_is_missing(kind: QueryKind) -> None:
    assert decide(999, TABLE, books(), look(CLEAN, kind)) == Found((ChunkEntry(CLEAN, OLD),))
    assert decide(999, TABLE, books(), look(ChunkId(7, 7), kind)) == Missing()


@pytest.mark.parametrize("chunk", [CHANGING, COMING, GOING])
@pytest.mark.parametrize("kind", [QueryKind.READ, QueryKind.STAT, QueryKind.LAST])
def test_what_is_under_way_is_for_the_tail_to_answer(chunk: ChunkId, kind: QueryKind) -> None:
    assert decide(0, TABLE, books(), look(chunk, kind)) == NotCommitted(9)


def test_a_tail_that_syncs_answers_with_what_it_has_committed() -> None:
    alone = msgspec.structs.replace(TABLE, answers_committed=True)
    assert decide(0, alone, books(), look(CHANGING)) == Found((ChunkEntry(CHANGING, OLD),))
    assert decide(0, alone, books(), look(GOING)) == Found((ChunkEntry(GOING, OLD),))
    assert decide(0, alone, books(), look(COMING)) == Missing()
    assert decide(0, alone, books(), look(COMING, QueryKind.LAST)) == Found((ChunkEntry(CHANGING, OLD),))
    listed = decide(0, alone, books(), look(CLEAN, QueryKind.LIST, length=2))
    assert listed == Found((ChunkEntry(CLEAN, OLD), ChunkEntry(CHANGING, OLD)))


def test_a_page_of_the_chain_says_what_it_knows_of_each_chunk() -> None:
    other = ChunkId(2, 0)
    index = books()
    index.records[other] = Record(NEW)
    every = (CLEAN, OLD), (CHANGING, None), (COMING, None), (GOING, None), (BROKEN, None), (other, NEW)
    for first in range(6):
        for limit in (1, 2, 10):
            page = decide(0, TABLE, index, look(every[first][0], QueryKind.CHAIN, length=limit))
            assert page == Found(tuple(ChunkEntry(*one) for one in every[first : first + limit]))
    assert decide(0, TABLE, index, look(ChunkId(0, 0), QueryKind.CHAIN, length=1)) == Found((ChunkEntry(CLEAN, OLD),))
    assert decide(0, TABLE, index, look(ChunkId(1, 5), QueryKind.CHAIN)) == Found((ChunkEntry(other, NEW),))
    assert decide(0, TABLE, index, look(ChunkId(2, 1), QueryKind.CHAIN)) == Found(())
    behind = decide(1000, TABLE, index, look(CLEAN, QueryKind.CHAIN))
    assert isinstance(behind, Refused)


def test_a_list_is_right_as_a_whole_or_not_given() -> None:
    assert decide(0, TABLE, books(), look(CLEAN, QueryKind.LIST, length=1)) == Found((ChunkEntry(CLEAN, OLD),))
    assert decide(0, TABLE, books(), look(CLEAN, QueryKind.LIST, length=2)) == NotCommitted(9)
    assert decide(0, TABLE, books(), look(ChunkId(2, 0), QueryKind.LIST)) == Found(())


def test_the_last_chunk_is_looked_for_in_its_file_alone() -> None:
    index = books()
    index.records[ChunkId(2, 3)] = Record(NEW)
    assert decide(0, TABLE, index, look(ChunkId(2, 99), QueryKind.LAST)) == Found((ChunkEntry(ChunkId(2, 3), NEW),))
    assert decide(0, TABLE, index, look(ChunkId(2, 2), QueryKind.LAST)) == Missing()
    assert decide(0, TABLE, index, look(ChunkId(1, 99), QueryKind.LAST)) == Found((ChunkEntry(BROKEN, OLD),))


def test_damaged_data_are_not_sent() -> None:
    reply = decide(0, TABLE, books(), look(BROKEN))
    assert isinstance(reply, Refused)
    assert reply.refusal is RefusalReason.CORRUPT
    assert decide(0, TABLE, books(), look(BROKEN, QueryKind.STAT)) == Found((ChunkEntry(BROKEN, OLD),))


def test_nothing_is_answered_without_a_role_behind_the_fence_or_at_another_version() -> None:
    idle = msgspec.structs.replace(TABLE, serving=False)
    for now_ns, table, asked, message in (
        (0, None, look(CLEAN), "does not serve"),
        (0, idle, look(CLEAN), "does not serve"),
        (0, TABLE, look(CLEAN, chain=2), "does not serve"),
        (1000, TABLE, look(CLEAN), "has had no answer from a manager"),
        (0, TABLE, look(CLEAN, chain_version=4), "has version 5, the request 4"),
        (0, TABLE, look(CLEAN, chain_version=6), "has version 5, the request 6"),
    ):
        reply = decide(now_ns, table, books(), asked)
        assert isinstance(reply, Refused)
        assert reply.refusal is RefusalReason.STALE
        assert message in reply.message


def test_the_chain_says_who_stands_where() -> None:
    states = [TargetState.SERVING, TargetState.SERVING, TargetState.SYNCING, TargetState.WAITING]
    chain = Chain(1, 4, tuple(Member(10 + at, at, state) for at, state in enumerate(states)))
    head, tail, syncing, waiting = (role_of(chain, 10 + at) for at in range(4))
    assert (head.head, head.last, head.predecessor, head.successor) == (True, False, 0, 11)
    assert (tail.head, tail.last, tail.predecessor, tail.successor) == (False, True, 10, 12)
    assert (syncing.serving, syncing.syncing, syncing.predecessor, syncing.successor) == (False, True, 11, 0)
    assert (waiting.serving, waiting.syncing, waiting.predecessor, waiting.tail) == (False, False, 0, 11)
    assert role_of(chain, 99).state is None
    assert not tail.alone
