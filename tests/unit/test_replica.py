"""A chain replica, one message at a time."""

from __future__ import annotations

import itertools

import pytest
from tests.support.replica_bugs import (
    BeginsWithWorkUnderWay,
    KeepsRowsFromBefore,
    ShowsTheOldVersionAfterDone,
    TakesAnswersOfAnyVersion,
)
from tests.support.replica_rig import CHUNK, FAR_NS, Letter, Rig, write

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core import replica_effects as fx
from fireflyer.fs.core.replica import Limits, Replica
from fireflyer.fs.schema.chunks import (
    Accepted,
    Answer,
    Change,
    Done,
    Found,
    Missing,
    NotCommitted,
    Operation,
    Put,
    Refusal,
    Refused,
    Request,
    SyncDone,
    SyncStart,
    Unheard,
    Waiting,
)
from fireflyer.fs.schema.ids import MAX_CHUNK_BYTES, ChunkId, ContentId

SERVING, SYNCING, OFFLINE, LASTSRV = "serving", "syncing", "offline", "lastsrv"
REMOVE = Change(Operation.REMOVE)


def refusal(rig: Rig, waiter: int) -> Refusal:
    reply = rig.replies[waiter]
    assert isinstance(reply, Refused), reply
    return reply.refusal


def is_put(letter: Letter) -> bool:
    return isinstance(letter.message, Request) and isinstance(letter.message.body, Put)


def is_answer(letter: Letter) -> bool:
    return isinstance(letter.message, Answer)


def is_done(letter: Letter) -> bool:
    return isinstance(letter.message, Request) and isinstance(letter.message.body, SyncDone)


def test_an_update_is_done_when_all_have_it_and_shown_only_then() -> None:
    rig = Rig(SERVING, SERVING, SERVING)
    waiter = rig.update(1, write(b"one"), b"one")
    rig.run(idle=(3,))
    assert waiter not in rig.replies
    assert rig.read(1) == rig.read(2) == NotCommitted(3)
    assert rig.read(3) == Missing()
    rig.run()
    done = rig.replies[waiter]
    assert isinstance(done, Done)
    assert done.id == ContentId(1, 1)
    assert done.held is not None
    assert (done.held.length, rig.content(1), rig.content(2), rig.content(3)) == (3, b"one", b"one", b"one")
    assert isinstance(rig.read(2), Found)
    assert not any(one.handles or one.replica.busy_chunks for one in rig.machines.values())


def test_partial_extending_truncating_and_removing_updates_are_the_same_everywhere() -> None:
    rig = Rig(SERVING, SERVING)
    for sequence, (change, data, expected) in enumerate(
        [
            (write(b"ab", 3), b"ab", b"\0\0\0ab"),
            (write(b"c", 1), b"c", b"\0c\0ab"),
            (Change(Operation.TRUNCATE, 0, 2), b"", b"\0c"),
            (Change(Operation.TRUNCATE, 0, 4), b"", b"\0c\0\0"),
            (REMOVE, b"", None),
            (REMOVE, b"", None),
            (Change(Operation.TRUNCATE, 0, 1), b"", b"\0"),
        ],
        start=1,
    ):
        waiter = rig.update(1, change, data, sequence=sequence)
        rig.run()
        assert isinstance(rig.replies[waiter], Done)
        assert rig.content(1) == rig.content(2) == expected


def test_a_retry_is_answered_and_not_done_again_also_by_the_next_head() -> None:
    rig = Rig(SERVING, SERVING)
    first = rig.update(1, write(b"one"), b"one")
    rig.run()
    rig.update(1, write(b"two"), b"two", client=2)
    rig.run()
    rig.chain(OFFLINE, SERVING)
    again = rig.update(2, write(b"one"), b"one")
    rig.run()
    done, once = rig.replies[again], rig.replies[first]
    assert isinstance(done, Done)
    assert isinstance(once, Done)
    assert (done.id, done.held) == (once.id, None)
    assert rig.content(2) == b"two"


def test_a_channel_that_has_gone_on_gets_nothing_more_done_of_before() -> None:
    rig = Rig(SERVING)
    rig.update(1, write(b"two"), b"two", sequence=2)
    rig.run()
    assert refusal(rig, rig.update(1, write(b"one"), b"one", sequence=1)) is Refusal.DUPLICATE
    assert refusal(rig, rig.update(1, write(b"x"), b"x", sequence=2, chunk=ChunkId(9, 9))) is Refusal.USAGE


def test_who_becomes_tail_shows_what_was_pending_although_another_is_synced_from_then_on() -> None:
    """The old tail may have shown it; so the new one may not go back to what was before."""
    rig = Rig(SERVING, SERVING, OFFLINE)
    waiter = rig.update(1, write(b"one"), b"one")
    rig.run(drop=is_answer)
    assert rig.content(2) == b"one"
    rig.chain(SERVING, OFFLINE, SYNCING)
    assert rig.content(1) == b"one"
    assert isinstance(rig.replies[waiter], Done)
    rig.run()
    assert rig.content(3) == b"one"


def test_a_new_successor_is_sent_what_is_pending_and_may_have_it_already() -> None:
    rig = Rig(SERVING, SERVING, SERVING)
    waiter = rig.update(1, write(b"one"), b"one")
    rig.run(drop=is_answer)
    assert (rig.content(3), rig.content(1)) == (b"one", None)
    rig.chain(SERVING, OFFLINE, SERVING)
    rig.run()
    assert isinstance(rig.replies[waiter], Done)
    assert rig.content(1) == b"one"


def test_a_new_head_drives_what_is_pending_before_it_begins_something_new() -> None:
    rig = Rig(SERVING, SERVING, SERVING)
    rig.update(1, write(b"one"), b"one")
    rig.run(drop=lambda letter: letter.target == 3)
    rig.chain(OFFLINE, SERVING, SERVING)
    retry = rig.update(2, write(b"one"), b"one")
    other = rig.update(2, write(b"two"), b"two", client=2)
    rig.run()
    done, later = rig.replies[retry], rig.replies[other]
    assert isinstance(done, Done)
    assert isinstance(later, Done)
    assert (done.id, later.id) == (ContentId(1, 1), ContentId(2, 2))
    assert rig.content(2) == rig.content(3) == b"two"


def test_no_space_at_a_successor_undoes_the_update_and_its_retry_is_done_under_another_name() -> None:
    rig = Rig(SERVING, SERVING, SERVING)
    rig[3].engine.full = True
    waiter = rig.update(1, write(b"one"), b"one", sequence=4)
    rig.run()
    assert refusal(rig, waiter) is Refusal.NO_SPACE
    assert rig.read(1) == rig.read(2) == rig.read(3) == Missing()
    assert refusal(rig, rig.update(1, write(b"old"), b"old", sequence=3)) is Refusal.DUPLICATE
    rig[3].engine.full = False
    waiter = rig.update(1, write(b"one"), b"one", sequence=4)
    rig.run()
    done = rig.replies[waiter]
    assert isinstance(done, Done)
    assert done.id == ContentId(1, 2)
    assert rig.content(1) == rig.content(3) == b"one"


def dropping(target: int) -> tuple[Rig, int]:
    """Three replicas; the last one has no space, and the engine of `target` has not yet made its drop durable."""
    rig = Rig(SERVING, SERVING, SERVING)
    rig[3].engine.full = True
    waiter = rig.update(1, write(b"one"), b"one")
    for one in range(1, target + 1):
        rig.run(idle=(target,)) if one == target else rig[one].work()
    rig[target].work()
    rig.run(idle=(target,))
    assert rig[target].working
    return rig, waiter


@pytest.mark.parametrize("target", [1, 2])
def test_a_refusal_waits_until_the_drop_is_durable(target: int) -> None:
    rig, waiter = dropping(target)
    assert rig.read(target) == Missing()
    rig.tick(SECOND)
    rig.run(idle=(target,))
    assert waiter not in rig.replies
    assert not any(isinstance(one, fx.ReportUnreachable) for one in rig[1].others)
    rig[3].engine.full = False
    later = rig.update(1, write(b"two"), b"two", sequence=2, client=2)
    rig.run()
    assert refusal(rig, waiter) is Refusal.NO_SPACE
    assert isinstance(rig.replies[later], Done)
    assert rig.content(1) == rig.content(3) == b"two"


def test_who_asks_again_in_a_later_chain_gets_the_answer_of_a_drop_under_way() -> None:
    rig, waiter = dropping(2)
    rig.chain(SERVING, SERVING, OFFLINE)
    rig.run(idle=(2,))
    assert waiter not in rig.replies
    rig.run()
    assert refusal(rig, waiter) is Refusal.NO_SPACE
    assert rig.read(1) == rig.read(2) == Missing()
    assert not any(one.replica.busy_chunks for one in rig.machines.values())


def test_a_drop_of_a_role_that_is_lost_is_nobodys() -> None:
    rig, waiter = dropping(1)
    rig[1].feed(fx.GiveUp(1, "drained"))
    assert refusal(rig, waiter) is Refusal.STALE
    assert rig[1].replica.busy_chunks == 1
    rig.run()
    assert rig[1].replica.busy_chunks == 0


def test_a_replica_is_busy_while_the_engine_adopts_for_it_even_if_the_chain_has_changed() -> None:
    rig = Rig(SERVING, SYNCING)
    rig[1].feed(fx.Tick())
    rig.run(idle=(2,))
    rig.chain(SERVING, OFFLINE)
    assert (rig[2].replica.busy_chunks, rig[2].replica.busy) == (0, True)
    rig.run()
    assert not rig[2].replica.busy


def test_an_engine_that_does_not_end_a_drop_hangs() -> None:
    rig, _ = dropping(2)
    for _ in range(30):
        rig.tick(SECOND)
        rig.run(idle=(2,))
    assert any(isinstance(one, fx.ReportGone) and "does not answer" in one.reason for one in rig[2].others)


def test_a_declined_request_stays_declined_when_a_copy_of_it_comes_late() -> None:
    rig = Rig(SERVING, SERVING)
    rig[2].engine.full = True
    rig.update(1, write(b"one"), b"one")
    rig.run(idle=(2,), drop=is_answer)
    rig.tick(SECOND)
    copy = rig.letters.pop()
    rig.run()
    rig[2].engine.full = False
    rig.deliver(copy)
    rig.run()
    assert not rig[2].engine.index.records


def test_other_bytes_than_the_heads_are_refused_with_both_checksums() -> None:
    rig = Rig(SERVING, SERVING)
    waiter = rig.update(1, write(b"one"), b"one")
    rig.run(idle=(2,))
    record, event = rig[2].working.popleft()
    assert isinstance(event, fx.Staged)
    rig[2].engine.staged(record)
    rig[2].feed(fx.Staged(event.chunk, event.id, None))
    rig.run()
    reply = rig.replies[waiter]
    assert isinstance(reply, Refused)
    assert "the head has Held(" in reply.message
    assert "this replica None" in reply.message
    assert rig.read(1) == rig.read(2) == Missing()


def test_nothing_leaves_a_replica_behind_the_fence_and_all_goes_on_when_it_is_extended() -> None:
    rig = Rig(SERVING, SERVING)
    waiter = rig.update(1, write(b"one"), b"one")
    rig.now_ns = FAR_NS
    rig.run()
    assert not rig.letters
    assert rig.content(1) is None
    assert refusal(rig, rig.update(1, write(b"x"), b"x", client=2)) is Refusal.STALE
    for machine in rig.machines.values():
        machine.feed(fx.FenceExtended(2 * FAR_NS))
    rig.run()
    assert isinstance(rig.replies[waiter], Done)


def test_what_a_client_may_not_ask_is_refused() -> None:
    rig = Rig(SERVING, SERVING)
    for change in (Change(Operation.REPLACE, 0, 1), Change(Operation.WRITE, MAX_CHUNK_BYTES, 1)):
        assert refusal(rig, rig.update(1, change)) is Refusal.USAGE
    assert refusal(rig, rig.update(1, REMOVE, sequence=0)) is Refusal.USAGE
    assert refusal(rig, rig.update(2, REMOVE)) is Refusal.STALE
    assert refusal(rig, rig.update(1, REMOVE, version=7)) is Refusal.STALE


def test_every_queue_has_an_end() -> None:
    rig = Rig(SERVING, limits=Limits(chunks=2, queue=2, rows=3))
    waiters = [rig.update(1, write(b"x"), b"x", client=client) for client in range(1, 6)]
    assert [waiter in rig.replies for waiter in waiters] == [False, False, False, True, True]
    assert refusal(rig, waiters[4]) is Refusal.BUSY
    rig.update(1, REMOVE, chunk=ChunkId(2, 0), client=1)
    assert refusal(rig, rig.update(1, REMOVE, chunk=ChunkId(3, 0), client=1)) is Refusal.BUSY
    rig.run()
    assert refusal(rig, rig.update(1, REMOVE, client=9)) is Refusal.BUSY
    rig[1].feed(fx.ClientEnded(2))
    waiter = rig.update(1, REMOVE, client=9)
    rig.run()
    assert isinstance(rig.replies[waiter], Done)


def test_a_client_that_uses_up_what_it_can_leaves_others_what_is_theirs() -> None:
    rig = Rig(SERVING, limits=Limits(rows=16, client_rows=2))

    def remembered(client: int, channels: int) -> int:
        for channel in range(channels):
            rig.update(1, REMOVE, client=client, channel=channel)
            rig.run()
        return len([one for one in rig[1].engine.index.rows(None, 99) if one.client == client])

    assert remembered(5, 9) == 4, "a quarter of all"
    assert [remembered(client, 9) for client in (4, 6, 1)] == [2, 2, 2]
    assert [remembered(client, 9) for client in (7, 8, 9)] == [2, 2, 2]
    assert remembered(2, 1) == 0, "all are taken"


@pytest.mark.parametrize("lanes", [256, 1])
def test_who_waits_for_its_successor_keeps_no_data_in_memory(lanes: int) -> None:
    """Or replicas of several chains, each full of data that wait for another, would wait for ever."""
    rig = Rig(SERVING, SERVING, SERVING, limits=Limits(resend_ns=SECOND, lanes=lanes))
    others = [ChunkId(2, index) for index in range(3)]
    waiters = [rig.update(1, write(b"content"), b"content")]
    waiters += [rig.update(1, write(b"more"), b"more", chunk=one, client=5 + one.index) for one in others]
    rig.run(idle=(3,), drop=is_answer)
    assert not rig[1].handles
    assert not rig[2].handles
    while not all(waiter in rig.replies for waiter in waiters):
        rig.tick(SECOND)
        rig.run()
    assert all(isinstance(rig.replies[waiter], Done) for waiter in waiters)
    assert [rig.content(target) for target in (1, 2, 3)] == [b"content"] * 3
    assert not any(machine.handles for machine in rig.machines.values())


def test_what_waits_of_a_client_that_is_over_is_refused_before_its_rows_are_forgotten() -> None:
    """Else a retry that waits would find no row, and do it again."""
    rig = Rig(SERVING)
    first, retry = rig.update(1, write(b"one"), b"one"), rig.update(1, write(b"one"), b"one")
    other = rig.update(1, write(b"two"), b"two", client=2)
    rig[1].feed(fx.ClientEnded(1))
    assert rig.replies.keys() == {retry}
    assert refusal(rig, retry) is Refusal.ENDED
    rig.run()
    assert [type(rig.replies[one]) for one in (first, other)] == [Done, Done]
    assert rig.content(1) == b"two"
    assert not rig[1].handles


def test_a_later_attempt_takes_the_place_of_one_that_waits() -> None:
    rig = Rig(SERVING)
    rig.update(1, write(b"a"), b"a", client=2)
    first = rig.update(1, write(b"b"), b"b")
    second = rig.update(1, write(b"b"), b"b")
    assert refusal(rig, first) is Refusal.DUPLICATE
    rig.run()
    assert isinstance(rig.replies[second], Done)


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
    rig.run(drop=lambda letter: is_put(letter) or is_done(letter))
    waiter = rig.update(1, write(b"new"), b"new", chunk=ChunkId(3, 0), sequence=3)
    rig.run(drop=lambda letter: is_put(letter) or is_done(letter))
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
        elif target == 1 and isinstance(effect, fx.Send) and is_done(Letter(1, 2, effect.message, b"")):
            kinds.append("done")
    assert kinds[-2:] == ["none", "done"]
    rig.tick(SECOND)
    rig.run()
    assert fx.UpToDate(2) in rig[2].others
    assert rig[2].engine.index.chunks(None, 9) == rig[1].engine.index.chunks(None, 9)
    assert rig[2].engine.index.rows(None, 9) == rig[1].engine.index.rows(None, 9)


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
    rig.run(drop=lambda letter: letter.source == 1)
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
    assert refusal(rig, waiter) is Refusal.CORRUPT
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
    assert rig[1].others[-1] == fx.ReportGone(4, "it had stopped before", failed=True)
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


def test_who_is_behind_asks_for_routing() -> None:
    rig = Rig(SERVING, SERVING)
    rig.chain(SERVING, SERVING, tell=(2,))
    rig.update(1, write(b"one"), b"one", version=1)
    rig.run()
    assert rig[1].others == [fx.AskRouting()]
    rig[2].feed(fx.PeerSaid(1, Request(1, 9, 0, 0, 1, SyncDone())))
    assert rig[2].others == [fx.AskRouting()]


@pytest.mark.parametrize("source", [2, 3, 0])
def test_a_request_from_anybody_but_the_predecessor_is_ignored(source: int) -> None:
    rig = Rig(SERVING, SERVING)
    put = Put(CHUNK, ContentId(1, 1), None, REMOVE, None, None)
    rig[2].feed(fx.PeerSaid(source, Request(1, 1, 0, 0, 1, put)))
    rig[1].feed(fx.PeerSaid(source, Answer(1, 1, 0, 0, 1, Accepted())))
    assert not rig[2].working
    assert not rig.letters


def test_a_peer_that_does_not_answer_is_reported() -> None:
    rig = Rig(SERVING, SERVING)
    rig.update(1, write(b"one"), b"one")
    rig.run(drop=is_put)
    rig.tick(10 * SECOND)  # it stood still itself
    rig.tick(SECOND)
    rig.tick(SECOND)
    assert rig[1].others == []
    rig.tick(SECOND)
    assert rig[1].others == [fx.ReportUnreachable(2)]
    rig[2].feed(fx.GiveUp(7, "said of another version"))
    assert not rig[2].others
    rig[2].feed(fx.GiveUp(1, "cut off from target 1"))
    assert rig[2].others == [fx.ReportGone(1, "cut off from target 1")]


@pytest.mark.parametrize("hangs", ["path", "disk of 3", "disk of 2", "disk of 1"])
def test_who_waits_for_another_is_not_taken_for_the_one_that_is_cut_off(hangs: str) -> None:
    """A slow disk is waited for; one that hangs makes its own target give up."""
    rig = Rig(SERVING, SERVING, SERVING, limits=Limits(resend_ns=SECOND, stall_ns=3 * SECOND, hang_ns=9 * SECOND))
    waiter = rig.update(1, write(b"one"), b"one")
    idle = {"path": (), "disk of 3": (3,), "disk of 2": (2,), "disk of 1": (1,)}[hangs]

    def lost(letter: Letter) -> bool:
        return hangs == "path" and 3 in (letter.source, letter.target)

    def blamed() -> set[tuple[int, fx.Effect]]:
        return {(number, one) for number, machine in rig.machines.items() for one in machine.others}

    for _ in range(8):
        rig.run(drop=lost, idle=idle)
        rig.tick(SECOND)
    if hangs == "path":
        assert blamed() == {(2, fx.ReportUnreachable(3))}
        rig.run()
        rig.tick(SECOND)
        rig.run()
        assert isinstance(rig.replies[waiter], Done)
        return
    assert not blamed()
    for _ in range(2):
        rig.run(idle=idle)
        rig.tick(SECOND)
    assert blamed() == {(idle[0], fx.ReportGone(1, "the disk does not answer"))}


def test_data_are_sent_again_only_where_they_are_missing() -> None:
    rig = Rig(SERVING, SERVING)
    waiters = [rig.update(1, write(b"data"), b"data", chunk=ChunkId(3, at), client=at + 1) for at in range(2)]
    rig[1].work()
    rig.deliver(rig.letters.popleft())
    rig[1].work()
    rig.letters.clear()  # the second one is lost, the first one is being staged
    rig.tick(2 * SECOND)
    assert [letter.data for letter in rig.letters] == [b"", b""]
    while rig.letters and rig.letters[0].source == 1:
        rig.deliver(rig.letters.popleft())
    bodies = [letter.message.body for letter in rig.letters if isinstance(letter.message, Answer)]
    assert bodies == [Waiting(), Unheard()]
    rig.run()
    assert all(isinstance(rig.replies[waiter], Done) for waiter in waiters)


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
    assert len(rig.letters) == 0
    rig[1].work()
    rig.letters.clear()
    rig.tick(9 * SECOND)
    assert not rig.letters
    rig[1].feed(fx.PeerLost(2))
    rig.tick(1)
    assert len(rig.letters) == 1
    rig.letters.clear()
    rig.chain(SERVING, SERVING, tell=(1,))
    rig.run()
    rig.tick(MS)
    assert len(rig.letters) == 1
    rig.letters.clear()
    rig.tick(10 * SECOND)
    assert len(rig.letters) == 1


def test_a_reader_that_finds_damage_does_not_disturb_the_copying_of_the_rest() -> None:
    rig = Rig(SERVING, OFFLINE)
    rig.update(1, write(b"one"), b"one")
    rig.run()
    rig.chain(SERVING, SYNCING)
    rig.run(drop=is_put)
    session = rig[1].replica.session
    rig[1].feed(fx.DamageFound(ChunkId(8, 8)))
    assert rig[1].replica.session is session


def test_a_copy_forgets_what_it_once_did_alone() -> None:
    retries_what_was_lost(Replica)
    with pytest.raises(AssertionError):
        retries_what_was_lost(KeepsRowsFromBefore)


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
    """The answer of a successor that is gone has the very lane and number under which the next one is asked."""
    rig = Rig(SERVING, SERVING, SERVING, kind=kind)
    waiter = rig.update(1, write(b"one"), b"one")
    late = rig.run(drop=lambda letter: letter.target == 1)
    rig.chain(SERVING, OFFLINE, SERVING)
    rig[3].feed(fx.GiveUp(2, "hears nothing"))
    rig.run(drop=is_put)
    for letter in late:
        rig.deliver(letter)
    assert waiter not in rig.replies
