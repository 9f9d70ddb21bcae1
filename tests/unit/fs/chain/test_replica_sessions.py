"""Chain replicas whose disks, peers or data fail, and the sessions that copy chunks to them: one message at a time."""

from __future__ import annotations

import itertools

import pytest
from tests.support.fs.chain_sim.mutants import (
    BeginsWithWorkUnderWay,
    KeepsCompletionsFromBefore,
    ShowsTheOldVersionAfterDone,
    TakesAnswersOfAnyVersion,
)
from tests.support.fs.chain_sim.rig import (
    FAR_NS,
    LASTSRV,
    OFFLINE,
    REMOVE,
    SERVING,
    SYNCING,
    MessageInTransit,
    Rig,
    is_done,
    is_put,
    refusal,
    write,
)

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain.replica import Limits, Replica
from fireflyer.fs.schema.chunks import (
    Done,
    Missing,
    NotCommitted,
    RefusalReason,
    Request,
    SyncStart,
)
from fireflyer.fs.schema.ids import ChunkId


def test_the_tail_shows_the_old_until_done_and_the_table_says_so_before_the_message_goes() -> None:
    grants_done(Replica)
    with pytest.raises(AssertionError):
        grants_done(ShowsTheOldVersionAfterDone)


def grants_done(kind: type[Replica]) -> None:
    rig = Rig(SERVING, OFFLINE, kind=kind)
    rig.update(1, write(b"one"), b"one")
    rig.update(1, write(b"two"), b"two", chunk=ChunkId(2, 0), sequence=2)
    rig.run()
    rig.chain(SERVING, SYNCING)
    rig.run(drop=lambda sent: is_put(sent) or is_done(sent))
    waiter = rig.update(1, write(b"new"), b"new", chunk=ChunkId(3, 0), sequence=3)
    rig.run(drop=lambda sent: is_put(sent) or is_done(sent))
    assert rig[1].table is not None
    assert rig[1].table.answers_committed
    assert rig.read(1, ChunkId(3, 0)) == Missing()
    rig.tick(SECOND)
    dropped = rig.run(drop=is_done)
    assert len(dropped) == 1
    rig.update(1, write(b"NEW"), b"NEW", chunk=ChunkId(3, 0), sequence=4)
    rig.run(drop=is_put)
    assert isinstance(rig.replies[waiter], Done)
    assert rig.read(1, ChunkId(3, 0)) == NotCommitted(1)
    kinds = []
    for target, effect in rig.effects:
        if target == 1 and isinstance(effect, fx.Publish):
            kinds.append("old" if effect.entry.answers_committed else "none")
        elif target == 1 and isinstance(effect, fx.Send) and is_done(MessageInTransit(1, 2, effect.message, b"")):
            kinds.append("done")
    assert kinds[-2:] == ["none", "done"]
    rig.tick(SECOND)
    rig.run()
    assert fx.UpToDate(2) in rig[2].others
    assert rig[2].engine.index.chunks(None, 9) == rig[1].engine.index.chunks(None, 9)
    assert rig[2].engine.index.completions(None, 9) == rig[1].engine.index.completions(None, 9)


def test_a_session_waits_until_nothing_of_before_is_under_way() -> None:
    begins_late(Replica)
    with pytest.raises(AssertionError):
        begins_late(BeginsWithWorkUnderWay)


def begins_late(kind: type[Replica]) -> None:
    """The engine of the copy is slow with what it was given when it still served, and quick with all else."""
    rig = Rig(SERVING, SERVING, kind=kind)
    rig.update(1, write(b"one"), b"one")
    rig.run(idle=(2,))
    rig.chain(SERVING, SYNCING)
    rig.update(1, REMOVE, sequence=2)
    slow = rig[2].working.popleft()
    rig.run()
    rig[2].working.append(slow)
    rig.run()
    rig.tick(SECOND)
    rig.run()
    assert not rig[2].engine.index.records
    assert fx.UpToDate(2) in rig[2].others


def test_a_session_that_stalls_is_begun_anew_and_holds_nobody_up() -> None:
    rig = Rig(SERVING, OFFLINE)
    rig.update(1, write(b"one"), b"one")
    rig.run()
    rig.chain(SERVING, SYNCING)
    rig.run(drop=is_put)
    waiter = rig.update(1, write(b"two"), b"two", sequence=2)
    rig.run(drop=is_put)
    assert waiter not in rig.replies
    rig[1].feed(fx.PeerLost(2))
    rig.run(drop=lambda sent: sent.source == 1)
    assert isinstance(rig.replies[waiter], Done)
    rig.tick(SECOND)
    rig.run()
    assert rig.content(2) == b"two"
    starts = [
        effect.message.session
        for _, effect in rig.effects
        if isinstance(effect, fx.Send)
        and isinstance(effect.message, Request)
        and isinstance(effect.message.body, SyncStart)
    ]
    assert starts == [1, 2, 2]


def test_a_session_copies_no_faster_than_it_may() -> None:
    rig = Rig(SERVING, OFFLINE, limits=Limits(copy_bytes_per_tick=10, page=3, copies=2, stall_ns=FAR_NS))
    for index in range(7):
        rig.update(1, write(b"8 bytes "), b"8 bytes ", chunk=ChunkId(1, index), sequence=index + 1)
        rig.run()
    rig.chain(SERVING, SYNCING)
    counts = []
    for _ in range(8):
        rig.run()
        counts.append(len(rig[2].engine.index.records))
        rig.tick(MS)
    assert counts[0] <= 2
    assert all(after - before <= 2 for before, after in itertools.pairwise(counts))
    assert counts[-1] == 7


def test_damage_makes_a_replica_leave_where_others_serve_and_come_back_to_be_mended() -> None:
    rig = Rig(SERVING, SERVING)
    rig.update(1, write(b"one"), b"one")
    rig.run()
    rig[2].engine.flip()
    waiter = rig.update(1, write(b"x", 2), b"x", sequence=2)
    rig.run()
    assert any(isinstance(effect, fx.ReportGone) for effect in rig[2].others)
    assert rig[2].table is not None
    assert not rig[2].table.serving
    rig.chain(SERVING, OFFLINE)
    assert isinstance(rig.replies[waiter], Done)
    rig.chain(SERVING, SYNCING)
    rig.run()
    assert rig.content(2) == rig.content(1) == b"onx"


def test_the_only_replica_goes_on_with_what_is_not_damaged() -> None:
    rig = Rig(SERVING)
    rig.update(1, write(b"one"), b"one")
    rig.run()
    rig[1].engine.flip()
    waiter = rig.update(1, write(b"x", 2), b"x", sequence=2)
    other = rig.update(1, write(b"y"), b"y", client=2, chunk=ChunkId(5, 5))
    rig.run()
    assert refusal(rig, waiter) is RefusalReason.CORRUPT
    assert isinstance(rig.replies[other], Done)
    assert rig[1].table is not None
    assert rig[1].table.serving
    waiter = rig.update(1, REMOVE, sequence=3)
    rig.run()
    assert isinstance(rig.replies[waiter], Done)


def test_a_failed_disk_is_not_trusted_again() -> None:
    rig = Rig(SERVING, SERVING)
    rig[1].feed(fx.DiskFailed("input/output error"))
    assert isinstance(rig[1].others[-1], fx.ReportGone)
    rig.chain(SERVING, OFFLINE, order=(2, 1))
    rig.chain(SERVING, SYNCING, order=(2, 1))
    rig.run()
    rig.chain(SERVING, SERVING)
    assert rig[1].others[-1] == fx.ReportGone(4, "the target had stopped before", failed=True, changed_in=4)
    assert rig[1].table is not None
    assert not rig[1].table.serving


def test_all_that_came_back_as_the_last_is_committed() -> None:
    rig = Rig(SERVING, SERVING)
    rig.update(1, write(b"one"), b"one")
    rig.run(drop=is_put)
    rig.chain(LASTSRV, LASTSRV)
    assert rig.content(1) is None
    rig.chain(SERVING, OFFLINE)
    assert rig.content(1) == b"one"
    assert rig.read(1) != NotCommitted(1)


def test_a_copy_without_space_holds_nobody_up_and_is_tried_again() -> None:
    rig = Rig(SERVING, OFFLINE)
    rig.update(1, write(b"one"), b"one")
    rig.run()
    rig[2].engine.full = True
    rig.chain(SERVING, SYNCING)
    rig.run()
    waiter = rig.update(1, write(b"two"), b"two", sequence=2)
    rig.run()
    assert isinstance(rig.replies[waiter], Done)
    assert not rig[2].others
    rig[2].engine.full = False
    rig.tick(20 * SECOND)
    rig.run()
    assert rig.content(2) == b"two"
    assert rig[2].others == [fx.UpToDate(2)]
    rig[2].engine.full = True
    rig.update(1, write(b"more"), b"more", sequence=3)
    rig.run()
    assert isinstance(rig[2].others[-1], fx.ReportGone)


def test_what_is_known_to_be_lost_is_sent_again_soon_and_what_may_be_under_way_late() -> None:
    rig = Rig(SERVING, SERVING, limits=Limits(resend_ns=10 * SECOND, retry_ns=MS, stall_ns=FAR_NS))
    rig.update(1, write(b"one"), b"one")
    assert len(rig.in_transit) == 0
    rig[1].work()
    rig.in_transit.clear()
    rig.tick(9 * SECOND)
    assert not rig.in_transit
    rig[1].feed(fx.PeerLost(2))
    rig.tick(1)
    assert len(rig.in_transit) == 1
    rig.in_transit.clear()
    rig.chain(SERVING, SERVING, tell=(1,))
    rig.run()
    rig.tick(MS)
    assert len(rig.in_transit) == 1
    rig.in_transit.clear()
    rig.tick(10 * SECOND)
    assert len(rig.in_transit) == 1


def test_a_reader_that_finds_damage_does_not_disturb_the_copying_of_the_rest() -> None:
    rig = Rig(SERVING, OFFLINE)
    rig.update(1, write(b"one"), b"one")
    rig.run()
    rig.chain(SERVING, SYNCING)
    rig.run(drop=is_put)
    session = rig[1].replica.session
    rig[1].feed(fx.CorruptionFound(ChunkId(8, 8)))
    assert rig[1].replica.session is session


def test_a_copy_forgets_what_it_once_did_alone() -> None:
    retries_what_was_lost(Replica)
    with pytest.raises(AssertionError):
        retries_what_was_lost(KeepsCompletionsFromBefore)


def retries_what_was_lost(kind: type[Replica]) -> None:
    """A head stages an update that nobody else gets, is synced, and is the head again when the client asks again."""
    rig = Rig(SERVING, SERVING, kind=kind)
    rig.update(1, write(b"lost"), b"lost")
    rig.run(drop=is_put)
    rig.chain(OFFLINE, SERVING)
    rig.chain(SYNCING, SERVING)
    rig.chain(SERVING, SYNCING, order=(2, 1))
    rig.run()
    rig.tick(SECOND)
    rig.run()
    assert fx.UpToDate(4) in rig[1].others
    rig.chain(SERVING, OFFLINE)
    waiter = rig.update(1, write(b"lost"), b"lost")
    rig.run()
    assert isinstance(rig.replies[waiter], Done)
    assert rig.content(1) == b"lost"


def test_an_answer_of_an_older_chain_says_nothing() -> None:
    hears_late(Replica)
    with pytest.raises(AssertionError):
        hears_late(TakesAnswersOfAnyVersion)


def hears_late(kind: type[Replica]) -> None:
    """The answer of a successor that is gone has the very slot and number under which the next one is asked."""
    rig = Rig(SERVING, SERVING, SERVING, kind=kind)
    waiter = rig.update(1, write(b"one"), b"one")
    late = rig.run(drop=lambda sent: sent.target == 1)
    rig.chain(SERVING, OFFLINE, SERVING)
    rig[3].feed(fx.GiveUp(2, "hears nothing"))
    rig.run(drop=is_put)
    for sent in late:
        rig.deliver(sent)
    assert waiter not in rig.replies
