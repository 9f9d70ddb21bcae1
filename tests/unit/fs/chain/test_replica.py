"""A chain replica, one message at a time."""

from __future__ import annotations

import pytest
from tests.support.fs.chain_sim.rig import (
    CHUNK,
    FAR_NS,
    OFFLINE,
    REMOVE,
    SERVING,
    SYNCING,
    MessageInTransit,
    Rig,
    is_answer,
    is_put,
    refusal,
    write,
)

from fireflyer.base.units import SECOND
from fireflyer.fs.core.chain import effects as fx
from fireflyer.fs.core.chain.replica import Limits
from fireflyer.fs.schema.chunks import (
    Accepted,
    Answer,
    Change,
    Done,
    Found,
    InProgress,
    Missing,
    NotCommitted,
    Operation,
    Put,
    RefusalReason,
    Refused,
    Request,
    SyncDone,
    UnknownRequest,
)
from fireflyer.fs.schema.ids import MAX_CHUNK_BYTES, ChunkId, ContentId


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
    assert refusal(rig, rig.update(1, write(b"one"), b"one", sequence=1)) is RefusalReason.DUPLICATE
    assert refusal(rig, rig.update(1, write(b"x"), b"x", sequence=2, chunk=ChunkId(9, 9))) is RefusalReason.USAGE


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
    rig.run(drop=lambda sent: sent.target == 3)
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
    assert refusal(rig, waiter) is RefusalReason.NO_SPACE
    assert rig.read(1) == rig.read(2) == rig.read(3) == Missing()
    assert refusal(rig, rig.update(1, write(b"old"), b"old", sequence=3)) is RefusalReason.DUPLICATE
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
    assert refusal(rig, waiter) is RefusalReason.NO_SPACE
    assert isinstance(rig.replies[later], Done)
    assert rig.content(1) == rig.content(3) == b"two"


def test_who_asks_again_in_a_later_chain_gets_the_answer_of_a_drop_under_way() -> None:
    rig, waiter = dropping(2)
    rig.chain(SERVING, SERVING, OFFLINE)
    rig.run(idle=(2,))
    assert waiter not in rig.replies
    rig.run()
    assert refusal(rig, waiter) is RefusalReason.NO_SPACE
    assert rig.read(1) == rig.read(2) == Missing()
    assert not any(one.replica.busy_chunks for one in rig.machines.values())


def test_a_drop_of_a_role_that_is_lost_is_nobodys() -> None:
    rig, waiter = dropping(1)
    rig[1].feed(fx.GiveUp(1, "drained"))
    assert refusal(rig, waiter) is RefusalReason.STALE
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
    copy = rig.in_transit.pop()
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
    assert "the head has content ChunkVersion(" in reply.message
    assert "this replica None" in reply.message
    assert rig.read(1) == rig.read(2) == Missing()


def test_nothing_leaves_a_replica_behind_the_fence_and_all_goes_on_when_it_is_extended() -> None:
    rig = Rig(SERVING, SERVING)
    waiter = rig.update(1, write(b"one"), b"one")
    rig.now_ns = FAR_NS
    rig.run()
    assert not rig.in_transit
    assert rig.content(1) is None
    assert refusal(rig, rig.update(1, write(b"x"), b"x", client=2)) is RefusalReason.STALE
    for machine in rig.machines.values():
        machine.feed(fx.FenceExtended(2 * FAR_NS))
    rig.run()
    assert isinstance(rig.replies[waiter], Done)


def test_what_a_client_may_not_ask_is_refused() -> None:
    rig = Rig(SERVING, SERVING)
    for change in (Change(Operation.REPLACE, 0, 1), Change(Operation.WRITE, MAX_CHUNK_BYTES, 1)):
        assert refusal(rig, rig.update(1, change)) is RefusalReason.USAGE
    assert refusal(rig, rig.update(1, REMOVE, sequence=0)) is RefusalReason.USAGE
    assert refusal(rig, rig.update(2, REMOVE)) is RefusalReason.STALE
    assert refusal(rig, rig.update(1, REMOVE, version=7)) is RefusalReason.STALE


def test_every_queue_has_an_end() -> None:
    rig = Rig(SERVING, limits=Limits(chunks=2, queue=2, completions=3))
    waiters = [rig.update(1, write(b"x"), b"x", client=client) for client in range(1, 6)]
    assert [waiter in rig.replies for waiter in waiters] == [False, False, False, True, True]
    assert refusal(rig, waiters[4]) is RefusalReason.BUSY
    rig.update(1, REMOVE, chunk=ChunkId(2, 0), client=1)
    assert refusal(rig, rig.update(1, REMOVE, chunk=ChunkId(3, 0), client=1)) is RefusalReason.BUSY
    rig.run()
    assert refusal(rig, rig.update(1, REMOVE, client=9)) is RefusalReason.BUSY
    rig[1].feed(fx.ClientEnded(2))
    waiter = rig.update(1, REMOVE, client=9)
    rig.run()
    assert isinstance(rig.replies[waiter], Done)


def test_a_client_that_uses_up_what_it_can_leaves_others_what_is_theirs() -> None:
    rig = Rig(SERVING, limits=Limits(completions=16, client_completions=2))

    def remembered(client: int, channels: int) -> int:
        for channel in range(channels):
            rig.update(1, REMOVE, client=client, channel=channel)
            rig.run()
        return len([one for one in rig[1].engine.index.completions(None, 99) if one.client == client])

    assert remembered(5, 9) == 4, "a quarter of all"
    assert [remembered(client, 9) for client in (4, 6, 1)] == [2, 2, 2]
    assert [remembered(client, 9) for client in (7, 8, 9)] == [2, 2, 2]
    assert remembered(2, 1) == 0, "all are taken"


@pytest.mark.parametrize("slots", [256, 1])
def test_who_waits_for_its_successor_keeps_no_data_in_memory(slots: int) -> None:
    """Or replicas of several chains, each full of data that wait for another, would wait for ever."""
    rig = Rig(SERVING, SERVING, SERVING, limits=Limits(resend_ns=SECOND, slots=slots))
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
    assert refusal(rig, retry) is RefusalReason.ENDED
    rig.run()
    assert [type(rig.replies[one]) for one in (first, other)] == [Done, Done]
    assert rig.content(1) == b"two"
    assert not rig[1].handles


def test_a_later_attempt_takes_the_place_of_one_that_waits() -> None:
    rig = Rig(SERVING)
    rig.update(1, write(b"a"), b"a", client=2)
    first = rig.update(1, write(b"b"), b"b")
    second = rig.update(1, write(b"b"), b"b")
    assert refusal(rig, first) is RefusalReason.DUPLICATE
    rig.run()
    assert isinstance(rig.replies[second], Done)


def test_who_is_behind_asks_for_routing() -> None:
    rig = Rig(SERVING, SERVING)
    rig.chain(SERVING, SERVING, tell=(2,))
    rig.update(1, write(b"one"), b"one", version=1)
    rig.run()
    assert rig[1].others == [fx.AskRouting()]
    rig[2].feed(fx.MessageFromPeer(1, Request(1, 9, 0, 0, 1, SyncDone())))
    assert rig[2].others == [fx.AskRouting()]


@pytest.mark.parametrize("source", [2, 3, 0])
def test_a_request_from_anybody_but_the_predecessor_is_ignored(source: int) -> None:
    rig = Rig(SERVING, SERVING)
    put = Put(CHUNK, ContentId(1, 1), None, REMOVE, None, None)
    rig[2].feed(fx.MessageFromPeer(source, Request(1, 1, 0, 0, 1, put)))
    rig[1].feed(fx.MessageFromPeer(source, Answer(1, 1, 0, 0, 1, Accepted())))
    assert not rig[2].working
    assert not rig.in_transit


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
    assert rig[2].others == [fx.ReportGone(1, "cut off from target 1", changed_in=1)]


@pytest.mark.parametrize("hangs", ["path", "disk of 3", "disk of 2", "disk of 1"])
def test_who_waits_for_another_is_not_taken_for_the_one_that_is_cut_off(hangs: str) -> None:
    """A slow disk is waited for; one that hangs makes its own target give up."""
    rig = Rig(SERVING, SERVING, SERVING, limits=Limits(resend_ns=SECOND, stall_ns=3 * SECOND, hang_ns=9 * SECOND))
    waiter = rig.update(1, write(b"one"), b"one")
    idle = {"path": (), "disk of 3": (3,), "disk of 2": (2,), "disk of 1": (1,)}[hangs]

    def lost(sent: MessageInTransit) -> bool:
        return hangs == "path" and 3 in (sent.source, sent.target)

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
    assert blamed() == {(idle[0], fx.ReportGone(1, "the disk does not answer", changed_in=1))}


def test_data_are_sent_again_only_where_they_are_missing() -> None:
    rig = Rig(SERVING, SERVING)
    waiters = [rig.update(1, write(b"data"), b"data", chunk=ChunkId(3, at), client=at + 1) for at in range(2)]
    rig[1].work()
    rig.deliver(rig.in_transit.popleft())
    rig[1].work()
    rig.in_transit.clear()  # the second one is lost, the first one is being staged
    rig.tick(2 * SECOND)
    assert [sent.data for sent in rig.in_transit] == [b"", b""]
    while rig.in_transit and rig.in_transit[0].source == 1:
        rig.deliver(rig.in_transit.popleft())
    bodies = [sent.message.body for sent in rig.in_transit if isinstance(sent.message, Answer)]
    assert bodies == [InProgress(), UnknownRequest()]
    rig.run()
    assert all(isinstance(rig.replies[waiter], Done) for waiter in waiters)
