"""When a node's checks are run, what is reported, and until when."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.support.health import fault, passes

from fireflyer.base.health_event import MAX_LINE_BYTES, HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import MAX_LINES, PROGRAM, findings_of
from fireflyer.cluster.core.health.rounds import Following, HealthRounds, PrintedLines
from fireflyer.cluster.schema.sync import MAX_REPORTS, HealthHeard, HealthOrder

ORDER = HealthOrder(program=("/opt/health",), validation=("/opt/validate",), period_ns=300 * SECOND)


def line(event: HealthEvent) -> bytes:
    return msgspec.json.encode(event)


def rounds_of(order: HealthOrder | None = ORDER) -> HealthRounds:
    rounds = HealthRounds(incarnation=3)
    rounds.hear(order, 0)
    return rounds


def test_checks_are_run_at_once_and_then_once_a_period() -> None:
    rounds = rounds_of()
    due = rounds.next(0)
    assert due is not None
    assert (due.program, due.validation, due.probe) == (("/opt/health",), (), 0)
    assert rounds.next(299 * SECOND) is None
    assert rounds.wait_s(299 * SECOND) == 1.0
    assert rounds.next(300 * SECOND) is not None


def test_another_program_or_period_counts_at_once_and_not_when_the_former_period_is_over() -> None:
    rounds = rounds_of()
    rounds.next(0)
    period = msgspec.structs.replace(ORDER, period_ns=10 * SECOND)
    for number, order in enumerate((period, msgspec.structs.replace(ORDER, program=("/opt/other",))), 1):
        rounds.hear(order, number)
        due = rounds.next(number)
        assert due is not None
        assert due.program == order.program
        assert rounds.next(number) is None
        rounds.hear(order, number)
        assert rounds.next(number) is None, "the same order again"


def test_a_run_that_comes_or_goes_asks_for_a_round_also_while_one_is_under_way() -> None:
    rounds = rounds_of()
    due = rounds.next(0)
    assert due is not None
    assert rounds.runs_are(frozenset({"a"}))
    rounds.done(due, (), "")
    assert rounds.next(1) is not None
    assert not rounds.runs_are(frozenset({"a"}))
    assert rounds.next(2) is None
    assert rounds.runs_are(frozenset())
    assert rounds.next(3) is not None


def test_a_probe_repeats_one_check_once_and_one_without_a_check_is_all_and_the_validation() -> None:
    rounds = rounds_of(msgspec.structs.replace(ORDER, probe=5, check="mounts"))
    due = rounds.next(0)
    assert due is not None
    assert (due.program, due.validation, due.probe) == (("/opt/health", "--check", "mounts"), (), 5)
    rounds.done(due, (b"{}",), "")
    assert [report.probe for report in rounds.reports()] == [5]
    following = rounds.next(0)
    assert following is not None
    assert following.probe == 0, "the probe is not repeated"
    rounds.hear(msgspec.structs.replace(ORDER, probe=6), 0)
    due = rounds.next(0)
    assert due is not None
    assert (due.program, due.validation) == (("/opt/health",), ("/opt/validate",))


def test_a_report_is_said_until_it_is_taken_by_the_same_incarnation() -> None:
    rounds = rounds_of()
    for _ in range(2):
        due = rounds.next(0)
        rounds.runs_are(frozenset() if rounds.reports() else frozenset({"a"}))
        assert due is not None
        rounds.done(due, (), "")
    assert [report.number for report in rounds.reports()] == [1, 2]
    rounds.hear(msgspec.structs.replace(ORDER, heard=HealthHeard(2, 57)), 0)
    assert len(rounds.reports()) == 2, "of the agent before"
    rounds.hear(msgspec.structs.replace(ORDER, heard=HealthHeard(3, 1)), 0)
    assert [report.number for report in rounds.reports()] == [2]


def test_what_nobody_takes_is_bounded_and_the_answer_to_a_probe_is_kept() -> None:
    rounds = rounds_of(msgspec.structs.replace(ORDER, probe=1, check="mounts"))
    for number in range(50):
        due = rounds.next(number * 300 * SECOND)
        assert due is not None
        rounds.done(due, (), "")
    kept = rounds.reports()
    assert len(kept) == MAX_REPORTS
    assert [report.number for report in kept] == [1, 48, 49, 50]


def test_what_a_check_says_once_stays_until_it_is_taken() -> None:
    """Found by a campaign: nobody led for six periods, and the Xid went with the oldest report."""
    xid = line(fault("gpu_xid", cause="xid_79", at_once=True))
    mount, passed = line(fault("mounts", part="mount:/data")), line(passes("gpu_xid"))
    rounds = rounds_of()
    for number, lines in enumerate([(xid, b"no event"), *[(mount, passed)] * 20]):
        due = rounds.next(number * 300 * SECOND)
        assert due is not None
        rounds.done(due, lines, "")
    oldest = rounds.reports()[0]
    assert oldest.lines == (xid, mount, passed), "the fault comes before what was seen later"
    assert [report.lines for report in rounds.reports()[1:]] == [(mount, passed)] * (MAX_REPORTS - 1)


def test_a_site_that_checks_no_nodes_has_no_rounds() -> None:
    rounds = rounds_of(None)
    assert (rounds.next(0), rounds.reports()) == (None, ())


def test_what_happens_is_a_report_beside_that_of_a_round_which_is_under_way() -> None:
    xid = line(fault("gpu_xid", cause="xid_79", at_once=True))
    rounds = rounds_of()
    due = rounds.next(0)
    assert due is not None
    rounds.happened((xid,))
    assert [(report.number, report.probe, report.lines) for report in rounds.reports()] == [(1, 0, (xid,))]
    rounds.done(due, (), "")
    assert [report.number for report in rounds.reports()] == [1, 2]
    rounds.hear(msgspec.structs.replace(ORDER, heard=HealthHeard(3, 1)), 0)
    assert [report.number for report in rounds.reports()] == [2]
    assert rounds.next(299 * SECOND) is None, "it takes no round's place"


def test_what_happens_stays_until_it_is_taken_and_answers_to_probes_with_it() -> None:
    rounds = rounds_of(msgspec.structs.replace(ORDER, probe=1, check="mounts"))
    due = rounds.next(0)
    assert due is not None
    rounds.done(due, (), "")
    events = [line(fault("gpu_xid", cause="xid_48", part=f"gpu:{number}")) for number in range(50)]
    for event in events:
        rounds.happened((event,))
    kept = rounds.reports()
    assert len(kept) == MAX_REPORTS
    assert [report.probe for report in kept] == [1, 0, 0, 0]
    assert sorted(event for report in kept for event in report.lines) == sorted(events)


def test_a_report_says_which_probe_the_node_had_been_asked_for_when_its_event_happened() -> None:
    rounds = rounds_of()
    for number, heard_ns in ((7, 100), (7, 300), (9, 200)):
        rounds.hear(msgspec.structs.replace(ORDER, probe=number), heard_ns)
    rounds.hear(ORDER, 400)

    def asked(seen_ns: int, *, once: bool = True) -> int:
        event = HealthEvent(check="gpu_xid", severity="high", seen_ns=seen_ns, once=once)
        rounds.happened((b"no event", line(event)))
        return rounds.reports()[-1].asked

    assert [asked(99), asked(100), asked(199), asked(200), asked(10**9)] == [0, 7, 7, 9, 9]
    assert asked(250, once=False) == 0, "a state is found by the probe itself"
    rounds.hear(msgspec.structs.replace(ORDER, probe=1), 500)
    assert (asked(450), asked(600)) == (0, 1), "numbers of a node that was removed begin anew"


def test_what_happens_on_a_node_that_is_not_checked_is_not_reported() -> None:
    rounds = rounds_of(None)
    rounds.happened((b"{}",))
    rounds.hear(ORDER, 0)
    assert rounds.reports() == ()


def test_a_follower_that_ends_is_started_again_after_pauses_that_double() -> None:
    following = Following()
    assert following.wait_s(0) is None
    order = msgspec.structs.replace(ORDER, follow=("/opt/follow",))
    assert following.hear(order)
    assert not following.hear(order)
    now_ns, pauses = 0, []
    for _ in range(12):
        assert following.wait_s(now_ns) == 0
        following.ended(now_ns, now_ns)
        pauses.append(following.wait_s(now_ns))
        now_ns += round((following.wait_s(now_ns) or 0) * SECOND)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]
    following.ended(now_ns, now_ns + 3600 * SECOND)
    assert following.wait_s(now_ns + 3600 * SECOND) == 1, "one that has lived begins anew"
    assert following.hear(msgspec.structs.replace(ORDER, follow=("/opt/other",)))
    assert following.wait_s(now_ns) == 0
    assert following.hear(None)
    assert following.wait_s(now_ns) is None


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_lines_come_whole_however_the_pipe_divides_them(pieces: list[bytes]) -> None:
    lines = PrintedLines()
    taken: list[bytes] = []
    for piece in pieces:
        lines.feed(piece)
        taken += lines.take()
    whole = b"".join(pieces).split(b"\n")[:-1]
    assert dict.fromkeys(taken) == dict.fromkeys(line for line in whole if line.strip())


def test_lines_are_bounded_and_one_that_is_too_long_is_told() -> None:
    lines = PrintedLines()
    for _ in range(100):
        lines.feed(b"x" * 65536)
    lines.feed(b"\n" + b"".join(b"%d\n" % number for number in range(MAX_LINES + 5)))
    first, second = lines.take(), lines.take()
    assert (len(first), len(second), lines.take()) == (MAX_LINES, 6, ())
    assert len(first[0]) == MAX_LINE_BYTES
    (finding,) = findings_of(first[:1], 0)
    assert finding.check == PROGRAM
