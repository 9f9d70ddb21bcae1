"""Each kind of fault, by hand: what is said, of whom, and how surely."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.collectives.flight_dumps import Call, World, dump_with, dumps_of, label, message

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.collectives.flight import Dump, Fault, Record, Verdict, explain

ALLREDUCE: Call = ("allreduce", "f32", "sum", 1000, -1)
BARRIER: Call = ("barrier", "f32", "", 0, -1)
CALLS: list[Call] = [ALLREDUCE, BARRIER, ALLREDUCE, ALLREDUCE, BARRIER, ALLREDUCE]


def culprits(verdict: Verdict) -> list[int]:
    return [culprit.rank for culprit in verdict.culprits]


def test_a_rank_that_has_not_entered() -> None:
    world = World([0, 0, 1, 1], CALLS, "absent", rank=3, at=2)
    verdict = explain(dumps_of(world))
    assert verdict.kind == "absent"
    assert verdict.summary == f"{label(world, 3)} had not entered allreduce #2 of 1000 f32"
    assert "ranks 0, 1, 2 wait for" in verdict.evidence[0]
    assert [row.waits_for for row in verdict.table] == [(3,), (3,), (3,), ()]


def test_a_rank_that_enters_when_the_others_have_given_up_is_late_not_present() -> None:
    dumps = dumps_of(World([0, 0, 1], CALLS, "absent", rank=1, at=2, raised=True))
    late = dumps[1]
    after_ns = dumps[0].snapshot.records[2].finished_ns + SECOND
    for started_ns in (0, after_ns + 1000):
        record = msgspec.structs.replace(
            dumps[0].snapshot.records[2],
            submitted_ns=after_ns,
            started_ns=started_ns,
            finished_ns=after_ns + 2000,
        )
        snapshot = msgspec.structs.replace(
            late.snapshot, records=(*late.snapshot.records, record), submitted=3, monotonic_ns=after_ns + SECOND
        )
        snapshot = msgspec.structs.replace(snapshot, realtime_ns=dumps[0].wall_ns(after_ns + SECOND))
        for fault in (dumps[0].fault, None):
            seen = [msgspec.structs.replace(dump, fault=fault) for dump in dumps]
            seen[1] = msgspec.structs.replace(seen[1], snapshot=snapshot)
            verdict = explain(seen)
            assert (verdict.kind, culprits(verdict)) == ("absent", [1])
            assert "only after it had failed on the others" in verdict.summary


def test_a_rank_that_left_no_dump_is_suspected_and_only_certain_where_it_was_raised() -> None:
    world = World([0, 0, 1, 1], CALLS, "gone", rank=2, at=1)
    suspected = explain(dumps_of(world))
    assert (suspected.kind, culprits(suspected), suspected.culprits[0].certain) == ("gone", [2], False)
    assert "suspected" in suspected.summary
    world.raised = True
    certain = explain(dumps_of(world))
    assert (certain.kind, culprits(certain), certain.culprits[0].certain) == ("gone", [2], True)
    assert f"no dump of {label(world, 2)}" in certain.evidence


@pytest.mark.parametrize(
    ("said", "kind"),
    [("has not entered barrier #1 for 2.1 s", "asleep"), ("died during barrier #1: its process has ended", "gone")],
)
def test_a_rank_whose_process_lived_is_asleep_and_not_gone(said: str, kind: str) -> None:
    world = World([0, 0, 1, 1], CALLS, "gone", rank=2, at=1, raised=True)
    text = f"{label(world, 2)} {said}"
    dumps = [
        msgspec.structs.replace(dump, fault=dump.fault and Fault("peer_failed", 2, dump.fault.seq, text))
        for dump in dumps_of(world)
    ]
    verdict = explain(dumps)
    assert (verdict.kind, culprits(verdict), verdict.culprits[0].certain) == (kind, [2], True)
    assert any("lived while the others waited" in line for line in verdict.evidence) is (kind == "asleep")
    assert f"no dump of {label(world, 2)}" in verdict.evidence


def test_a_rank_that_is_seen_inside_but_left_no_dump() -> None:
    dumps = dumps_of(World([0, 0, 0], CALLS, "stalled", rank=2, at=1))[:2]
    verdict = explain(dumps)
    assert (verdict.kind, culprits(verdict)) == ("gone", [2])
    assert "hangs inside barrier #1" in verdict.summary


def test_one_dump_of_many_does_not_accuse_all_others() -> None:
    world = World([0, 0, 1, 1, 2, 2], CALLS, "absent", rank=3, at=2, lost={1, 2, 3, 4, 5})
    verdict = explain(dumps_of(world))
    assert verdict.kind == "undecided"
    assert not verdict.decided
    assert "most ranks left no dump here, only 0" in verdict.summary


def test_bytes_that_stopped() -> None:
    verdict = explain(dumps_of(World([0, 1, 2], CALLS, "stalled", rank=1, at=3)))
    assert (verdict.kind, culprits(verdict)) == ("stalled", [1])
    assert "after 20 of 40 chunks" in verdict.summary


def test_ranks_that_are_equally_far_cannot_be_told_apart() -> None:
    dumps = dumps_of(World([0, 1], [ALLREDUCE], "stalled", rank=0, at=0))
    record = dumps[0].snapshot.records[0]
    same = msgspec.structs.replace(record, chunks_done=20, progress_ns=0)
    dumps = [
        msgspec.structs.replace(dump, snapshot=msgspec.structs.replace(dumps[0].snapshot, records=(same,)))
        for dump in dumps
    ]
    verdict = explain(dumps)
    assert (verdict.kind, verdict.culprits) == ("undecided", ())
    assert "no rank is behind" in verdict.evidence[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "broadcast"), ("dtype", "bf16"), ("op", "max"), ("count", 1001), ("root", 1)],
)
def test_a_call_that_differs_in_anything(field: str, value: object) -> None:
    dumps = dumps_of(World([0, 0, 1], [ALLREDUCE], "stalled", rank=0, at=0))
    wrong = msgspec.structs.replace(dumps[1].snapshot.records[0], **{field: value})
    dumps[1] = msgspec.structs.replace(dumps[1], snapshot=msgspec.structs.replace(dumps[1].snapshot, records=(wrong,)))
    verdict = explain(dumps)
    assert (verdict.kind, culprits(verdict), verdict.culprits[0].certain) == ("mismatch", [1], True)
    assert "ranks 0, 2 called allreduce of 1000 f32" in verdict.evidence[0]


def test_a_call_left_out_is_recognised_by_what_follows() -> None:
    calls = [("allreduce", "f32", "sum", count, -1) for count in (10, 20, 30, 40, 50)]
    verdict = explain(dumps_of(World([0, 0, 0], calls, "skip", rank=2, at=1, queued=3)))
    assert culprits(verdict) == [2]
    assert "it skipped a call, #1 or an equal one before" in verdict.summary


def test_two_ranks_that_disagree_are_both_named_and_neither_for_certain() -> None:
    verdict = explain(dumps_of(World([0, 0], CALLS, "other", rank=1, at=2)))
    assert (verdict.kind, culprits(verdict)) == ("mismatch", [0, 1])
    assert not any(culprit.certain for culprit in verdict.culprits)


def test_what_was_raised_first_counts() -> None:
    dumps = dumps_of(World([0, 0, 1, 1], CALLS, "gone", rank=2, at=1, raised=True))
    follow_up = Fault("peer_failed", 0, 1, "rank 0 (node 0, host n0) closed its connection")
    last = msgspec.structs.replace(dumps[2].snapshot, records=tuple(_later(r) for r in dumps[2].snapshot.records))
    dumps[2] = msgspec.structs.replace(dumps[2], fault=follow_up, snapshot=last)
    verdict = explain(dumps)
    assert culprits(verdict) == [2]
    assert any("closed its connection" in line for line in verdict.evidence)


def _later(record: Record) -> Record:
    return msgspec.structs.replace(record, finished_ns=record.finished_ns + SECOND) if record.finished_ns else record


@pytest.mark.parametrize(
    ("code", "kind"), [("aborted", "aborted"), ("data_corruption", "corrupted"), ("usage", "mismatch")]
)
def test_what_is_no_ones_silence(code: str, kind: str) -> None:
    fault = Fault(code, 1, 0, "rank 1 (node 0, host n0) aborted the group: out of memory")
    verdict = explain([dump_with(rank, 3, [], fault=fault) for rank in range(3)])
    assert (verdict.kind, culprits(verdict), verdict.summary) == (kind, [1], fault.text)


def test_messages_that_wait_for_each_other_are_a_circle() -> None:
    dumps = [dump_with(rank, 4, [message("recv", (rank + 1) % 3)] if rank < 3 else []) for rank in range(4)]
    verdict = explain(dumps)
    assert (verdict.kind, culprits(verdict)) == ("deadlock", [0, 1, 2])
    assert "0 -> 1 -> 2 -> 0" in verdict.summary


def test_a_chain_of_messages_ends_at_the_one_that_waits_for_nobody() -> None:
    records = {0: [message("recv", 1)], 1: [message("recv", 2)], 2: [message("send", 3, state="done")], 3: []}
    verdict = explain([dump_with(rank, 4, records[rank]) for rank in range(4)])
    assert (verdict.kind, culprits(verdict)) == ("absent", [2])
    assert "never sent what rank 1 waits for" in verdict.summary
    assert len(verdict.evidence) == 2


def test_a_chain_goes_from_a_collective_through_a_message() -> None:
    inside = dumps_of(World([0, 0, 0], [ALLREDUCE], "absent", rank=2, at=0))[0].snapshot.records[0]
    waiting = msgspec.structs.replace(inside, submitted_ns=SECOND, started_ns=SECOND)
    records = {0: [waiting], 1: [message("recv", 2)], 2: [waiting]}
    verdict = explain([dump_with(rank, 3, records[rank]) for rank in range(3)])
    assert (verdict.kind, culprits(verdict)) == ("deadlock", [1, 2])


def test_a_message_that_both_ends_called_for_and_that_does_not_move() -> None:
    verdict = explain([dump_with(0, 2, [message("send", 1)]), dump_with(1, 2, [message("recv", 0)])])
    assert (verdict.kind, verdict.culprits) == ("undecided", ())
    assert "no rank can be blamed" in verdict.summary
    assert len(verdict.evidence) == 2


def test_a_send_that_nobody_asked_for() -> None:
    verdict = explain([dump_with(0, 2, [message("send", 1)]), dump_with(1, 2, [])])
    assert culprits(verdict) == [1]
    assert "never received what rank 0 waits for" in verdict.summary


def test_messages_with_different_tags_do_not_meet() -> None:
    verdict = explain([dump_with(0, 2, [message("send", 1)]), dump_with(1, 2, [message("recv", 0, tag=5)])])
    assert (verdict.kind, culprits(verdict)) == ("deadlock", [0, 1])


def test_messages_with_other_tags_are_not_counted() -> None:
    here = [message("send", 1, tag=2, seq=1), message("send", 1, tag=1, seq=0)]
    there = [message("recv", 0, tag=1, seq=0), message("recv", 0, tag=2, seq=1)]
    verdict = explain([dump_with(0, 2, here), dump_with(1, 2, there)])
    assert (verdict.kind, verdict.culprits) == ("undecided", ())


def test_a_receive_from_any_rank_waits_for_all_that_have_not_sent() -> None:
    waiting = message("recv", -1, tag=3)
    assert waiting.call() == "recv of 8 f32 from any rank, tag 3"
    verdict = explain([dump_with(0, 3, [waiting]), dump_with(1, 3, []), dump_with(2, 3, [])])
    assert (verdict.kind, culprits(verdict)) == ("absent", [1, 2])


@pytest.mark.parametrize("sender_was_told", [True, False])
def test_a_message_whose_ends_disagree(sender_was_told: bool) -> None:
    told = message("send", 1, state="failed", failure="mismatch")
    sent = told if sender_was_told else message("send", 1, state="done")
    received = message("recv", 0, count=9, state="failed", failure="mismatch")
    verdict = explain([dump_with(0, 2, [sent]), dump_with(1, 2, [received])])
    assert (verdict.kind, culprits(verdict)) == ("mismatch", [0, 1])
    assert "message #0 from rank 0 to rank 1 is not what is received" in verdict.summary


def test_who_has_only_just_arrived_holds_nobody_up() -> None:
    dumps = dumps_of(World([0, 0], [ALLREDUCE], "absent", rank=1, at=0))
    fresh = msgspec.structs.replace(dumps[0].snapshot, monotonic_ns=dumps[0].snapshot.records[0].started_ns + 1000)
    verdict = explain([msgspec.structs.replace(dumps[0], snapshot=fresh), dumps[1]])
    assert verdict.kind == "nothing"


def test_who_dumped_before_the_others_began_to_wait_may_have_come_since() -> None:
    dumps = dumps_of(World([0, 0], [ALLREDUCE], "absent", rank=1, at=0))
    early = msgspec.structs.replace(dumps[1].snapshot, realtime_ns=dumps[1].snapshot.realtime_ns - 3600 * SECOND)
    verdict = explain([dumps[0], msgspec.structs.replace(dumps[1], snapshot=early)])
    assert culprits(verdict) == []


def test_of_two_dumps_of_a_rank_the_later_counts() -> None:
    dumps = dumps_of(World([0, 0], CALLS, "absent", rank=1, at=2))
    snapshot = dumps[1].snapshot
    older = msgspec.structs.replace(snapshot, records=(), submitted=0, finished=0, realtime_ns=1)
    verdict = explain([*dumps, msgspec.structs.replace(dumps[1], snapshot=older)])
    assert verdict == explain(dumps)


def test_a_rank_that_is_late_again_and_again_shows_without_a_failure() -> None:
    verdict = explain(dumps_of(World([0, 0, 1, 1], [ALLREDUCE] * 30, "slow", rank=3)))
    assert verdict.kind == "nothing"
    assert [each.rank for each in verdict.stragglers] == [3]
    assert "was last to enter 30 of 30 collectives" in verdict.evidence[-1]


@pytest.mark.parametrize("change", [{"group": "another"}, {"plan": "fedcba9876543210"}, {"world_size": 3}])
def test_dumps_of_several_groups_are_refused(change: dict[str, object]) -> None:
    dumps: list[Dump] = dumps_of(World([0, 0], CALLS))
    with pytest.raises(UsageError, match="rank 0 and rank 1 are of different groups"):
        explain([dumps[0], msgspec.structs.replace(dumps[1], **change)])


def test_no_dumps_are_refused() -> None:
    with pytest.raises(UsageError, match="no dumps"):
        explain([])


def test_values_that_did_not_fit_fp8_are_told() -> None:
    dumps = dumps_of(World([0, 0], CALLS, "absent", rank=1, at=5))

    def with_saturated(dump: Dump, at: dict[int, int]) -> Dump:
        records = [msgspec.structs.replace(one, saturated=at.get(one.seq, 0)) for one in dump.snapshot.records]
        return msgspec.structs.replace(dump, snapshot=msgspec.structs.replace(dump.snapshot, records=tuple(records)))

    found = explain([with_saturated(dumps[0], {0: 3, 2: 40}), with_saturated(dumps[1], {2: 10})])
    line = "53 of 2,000 values in 2 sums did not fit fp8, 50 of them in allreduce #2 of 1000 f32"
    assert line in found.evidence
    assert not any("fp8" in note for note in explain(dumps).evidence)
