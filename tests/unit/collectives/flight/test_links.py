"""Two ends of a connection side by side: which way bytes stopped, how many were under way, who held them up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.support.collectives.flight_dumps import TIMEOUT_NS, World, dumps_of

from fireflyer.base.errors import DataCorruption
from fireflyer.base.units import SECOND
from fireflyer.collectives.flight import Dump, Fault, LinkEnd, Verdict, explain
from fireflyer.collectives.flight.dump import decode_dump, encode_dump
from fireflyer.collectives.flight.evidence import Evidence
from fireflyer.collectives.flight.links import find_stopped_links

AT_NS = 100 * SECOND
AGO_8_S, AGO_9_S, NOW = AT_NS - 8 * SECOND, AT_NS - 9 * SECOND, AT_NS - 1
CALLS = [("allreduce", "f32", "sum", 1000, -1)] * 3
FROM_0_TO_2 = "bytes from rank 0 (node 0, host n0) to rank 2 (node 1, host n1) stopped on"
DATA: dict[str, Any] = {"channel": 0, "socket": 1, "at_ns": AT_NS}
SENT: dict[str, Any] = DATA | {"rank": 2, "sent": 5000, "sent_ns": AGO_8_S, "frames_sent": 5}
AWAITED: dict[str, Any] = DATA | {"rank": 0, "received": 3000, "awaiting_since_ns": AGO_9_S, "frames_received": 3}


def dumps_with(sender: dict[str, Any] | None, receiver: dict[str, Any] | None, *, raised: bool = True) -> list[Dump]:
    """Ranks 0, 1 on node 0 and 2, 3 on node 1, all inside the same sum. An end that is None left no dump."""
    world = World([0, 0, 1, 1], CALLS, "stalled", rank=2, at=2, raised=raised)
    ends = {0: sender, 2: receiver}
    dumps = []
    for dump in dumps_of(world):
        if dump.rank in ends:
            end = ends[dump.rank]
            if end is None:
                continue
            snapshot = msgspec.structs.replace(dump.snapshot, links=(LinkEnd(**end),))
            dump = msgspec.structs.replace(dump, snapshot=snapshot)
        dumps.append(dump)
    return dumps


def stopped(sender: dict[str, Any] | None, receiver: dict[str, Any] | None) -> list[tuple[int, int, str, str]]:
    found = find_stopped_links(Evidence(dumps_with(sender, receiver)))
    return [(link.sender, link.receiver, link.side, link.text) for link in found]


GOLDEN: list[Any] = [
    pytest.param(
        SENT | {"unacknowledged": 2000, "retransmits": 4, "blocked_since_ns": AGO_8_S},
        AWAITED,
        "network",
        "5000 bytes sent, 3000 bytes received; the receiver waited for them for 9.0 s; the sender's "
        "kernel retransmitted them 4 times without an acknowledgement (held up by: network)",
        id="packets that are not answered",
    ),
    pytest.param(
        SENT | {"unacknowledged": 1500, "retransmits": 0, "blocked_since_ns": AGO_8_S},
        AWAITED | {"unread": 0},
        "network",
        "5000 bytes sent, 3000 bytes received; the receiver waited for them for 9.0 s; the sender's "
        "kernel still holds 1500 bytes that the receiver has not acknowledged (held up by: network)",
        id="something between that takes no more",
    ),
    pytest.param(
        SENT | {"unacknowledged": 0, "retransmits": 0},
        AWAITED,
        "network",
        "5000 bytes sent, 3000 bytes received; the receiver waited for them for 9.0 s; they were "
        "acknowledged to the sender, by a proxy, tunnel or firewall that did not pass them on (held up by: network)",
        id="something between that swallows",
    ),
    pytest.param(
        SENT | {"unacknowledged": 0, "blocked_since_ns": AGO_8_S},
        AWAITED | {"received": 5000},
        "network",
        "5000 bytes sent, 5000 bytes received; what the sender's kernel accepted has arrived, it "
        "accepts no more, and the receiver waits (held up by: network)",
        id="a sender whose system takes nothing, though nothing is on its way",
    ),
    pytest.param(
        SENT,
        AWAITED | {"received": 5000},
        "sender",
        "5000 bytes sent, 5000 bytes received; the receiver waited for more for 9.0 s, which the "
        "sender never sent (held up by: not the connection: the sender)",
        id="a sender that has nothing more",
    ),
    pytest.param(
        SENT | {"blocked_since_ns": AGO_8_S},
        AWAITED | {"awaiting_since_ns": 0, "unread": 700},
        "receiver",
        "5000 bytes sent, 3000 bytes received; 700 bytes are unread in the receiver's socket buffer: "
        "it does not read them (held up by: receiver)",
        id="a receiver that does not read",
    ),
    pytest.param(
        SENT | {"unacknowledged": 2000, "retransmits": 6, "blocked_since_ns": AGO_8_S},
        None,
        "receiver or network",
        "5000 bytes sent, an unknown number of bytes received; the sender's kernel retransmitted them 6 "
        "times without an acknowledgement: the receiver's host or the network has failed (held up by: receiver or "
        "network)",
        id="a receiver without a dump, whose host does not answer",
    ),
    pytest.param(
        SENT | {"unacknowledged": 2000, "retransmits": 0, "blocked_since_ns": AGO_8_S},
        None,
        "receiver or network",
        "5000 bytes sent, an unknown number of bytes received; the sender's kernel still holds 2000 bytes "
        "that the receiver has not acknowledged; the receiver hangs, or the network failed (held up by: receiver or "
        "network)",
        id="a receiver without a dump, which takes no more",
    ),
    pytest.param(
        None,
        AWAITED | {"frames_announced": 3, "announced_ns": NOW},
        "sender",
        "an unknown number of bytes sent, 3000 bytes received; by its last heartbeat the sender had started 3 "
        "frames, and 3 arrived completely: what the receiver waits for was never sent (held up by: not the "
        "connection: the sender)",
        id="a sender without a dump that sent nothing",
    ),
    pytest.param(
        None,
        AWAITED | {"frames_announced": 5, "announced_ns": NOW},
        "network",
        "an unknown number of bytes sent, 3000 bytes received; by its last heartbeat the sender had started 5 "
        "frames, and 3 arrived completely; heartbeats kept arriving, the bytes did not (held up by: network)",
        id="a sender without a dump whose heartbeats arrived",
    ),
    pytest.param(
        None,
        AWAITED | {"frames_announced": 4, "announced_ns": AGO_9_S},
        "undecided",
        "an unknown number of bytes sent, 3000 bytes received; by its last heartbeat the sender had started 4 "
        "frames, and 3 arrived completely; the sender or the network stopped (held up by: undecided)",
        id="a sender without a dump that fell silent in a frame",
    ),
]


@pytest.mark.parametrize(("sender", "receiver", "side", "text"), GOLDEN)
def test_what_is_said_of_a_direction(
    sender: dict[str, Any] | None, receiver: dict[str, Any] | None, side: str, text: str
) -> None:
    assert stopped(sender, receiver) == [(0, 2, side, f"{FROM_0_TO_2} data connection 0.1: {text}")]


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        pytest.param(SENT, AWAITED | {"awaiting_since_ns": NOW}, id="bytes that were under way when the group failed"),
        pytest.param(SENT | {"sent_ns": NOW}, AWAITED, id="a sender that came late, and then sent"),
        pytest.param(SENT | {"sent": 2000}, AWAITED, id="an end that was noted earlier"),
        pytest.param(SENT, AWAITED | {"awaiting_since_ns": 0}, id="nothing is awaited"),
        pytest.param(SENT | {"unacknowledged": 0}, None, id="no dump of the receiver, and nothing is held up"),
        pytest.param(SENT | {"sent_ns": NOW, "unacknowledged": 9}, None, id="a sender that is going on"),
        pytest.param(None, AWAITED | {"awaiting_since_ns": NOW}, id="a receiver that is going on"),
    ],
)
def test_of_connections_that_move_nothing_is_said(
    sender: dict[str, Any] | None, receiver: dict[str, Any] | None
) -> None:
    assert stopped(sender, receiver) == []


CONTROL: dict[str, Any] = {"channel": -1, "at_ns": AT_NS}
BEATS = CONTROL | {"rank": 2, "sent": 900, "sent_ns": NOW, "frames_sent": 9}
HEARD = CONTROL | {"rank": 0, "received": 500, "frames_received": 5, "awaiting_since_ns": AGO_8_S}


def test_heartbeats_that_were_sent_and_did_not_come() -> None:
    ((*ends, side, text),) = stopped(BEATS, HEARD)
    assert (ends, side) == ([0, 2], "network")
    assert text == (
        f"{FROM_0_TO_2} the control connection: 900 bytes sent, 500 bytes received; "
        "heartbeats were sent, and none has arrived for 8.0 s (held up by: network)"
    )
    assert stopped(BEATS | {"frames_sent": 7}, HEARD) == []  # a stopped process says two when it goes on
    assert stopped(BEATS, HEARD | {"awaiting_since_ns": AT_NS - TIMEOUT_NS // 4}) == []
    assert stopped(BEATS, None) == []


def test_where_bytes_are_missing_comes_before_what_was_never_sent() -> None:
    dumps = dumps_with(SENT, AWAITED)
    idle: dict[str, Any] = {"awaiting_since_ns": AGO_9_S, "at_ns": AT_NS}
    there = LinkEnd(rank=2, channel=0, socket=0, **idle)
    back = LinkEnd(rank=0, channel=0, socket=0, **idle)
    for index, end in ((0, there), (2, back)):
        snapshot = dumps[index].snapshot
        snapshot = msgspec.structs.replace(snapshot, links=(*snapshot.links, end))
        dumps[index] = msgspec.structs.replace(dumps[index], snapshot=snapshot)
    found = find_stopped_links(Evidence(dumps))
    assert [(link.side, link.sender, link.connection) for link in found] == [
        ("network", 0, "data connection 0.1"),
        ("sender", 0, "data connection 0.0"),
        ("sender", 2, "data connection 0.0"),
    ]


def verdict_of(dumps: list[Dump], fault: Fault | None) -> Verdict:
    return explain([msgspec.structs.replace(dump, fault=fault) for dump in dumps])


def test_lost_bytes_are_the_verdict_where_an_end_of_the_connection_was_raised_or_nobody() -> None:
    dumps = dumps_with(SENT, AWAITED)
    for fault in (Fault("peer_failed", 0, 2, "half-open"), Fault("peer_failed", 2, 2, "half-open"), None):
        verdict = verdict_of(dumps, fault)
        assert (verdict.kind, verdict.decided) == ("link", True)
        assert verdict.summary.startswith(FROM_0_TO_2)
        assert [(each.rank, each.certain) for each in verdict.culprits] == [(0, False), (2, False)]
        assert [(link.sent, link.received) for link in verdict.links] == [(5000, 3000)]


@pytest.mark.parametrize(
    "fault",
    [Fault("peer_failed", 3, 2, "rank 3 died"), Fault("usage", -1, 2, "calls differ"), Fault("aborted", 1, 2, "")],
)
def test_lost_bytes_do_not_hide_what_else_was_raised(fault: Fault) -> None:
    verdict = verdict_of(dumps_with(SENT, AWAITED), fault)
    assert verdict.kind != "link"


def test_of_an_end_without_a_dump_the_connection_is_told_beside_the_verdict() -> None:
    blocked = SENT | {"blocked_since_ns": AGO_8_S, "unacknowledged": 2000}
    fault = Fault("peer_failed", 2, 2, "rank 2 gave no sign of life")
    verdict = verdict_of(dumps_with(blocked, None), fault)
    assert (verdict.kind, [each.rank for each in verdict.culprits]) == ("gone", [2])
    assert any("receiver or network" in line for line in verdict.evidence)


def test_a_sender_that_had_nothing_to_send_is_told_only_of_who_is_blamed() -> None:
    idle = AWAITED | {"received": 5000}
    blamed = verdict_of(dumps_with(SENT, idle), Fault("peer_failed", 0, 2, "rank 0 hangs"))
    other = verdict_of(dumps_with(SENT, idle), Fault("peer_failed", 3, 2, "rank 3 hangs"))
    assert any("not the connection" in line for line in blamed.evidence)
    assert not any("not the connection" in line for line in other.evidence)


def test_links_survive_a_file_and_hostile_ones_are_refused() -> None:
    dump = dumps_with(SENT | {"broken": "Connection reset by peer"}, None)[0]
    assert decode_dump(encode_dump(dump), name="here") == dump
    for wrong in ({"rank": 4}, {"sent": -1}, {"broken": "a\x1b[2J"}):
        link = msgspec.structs.replace(dump.snapshot.links[0], **wrong)
        hostile = msgspec.structs.replace(dump.snapshot, links=(link,))
        raw = msgspec.json.encode(msgspec.structs.replace(dump_without_checks(dump), snapshot=hostile))
        with pytest.raises(DataCorruption):
            decode_dump(raw, name="here")


def dump_without_checks(dump: Dump) -> Any:
    """Of the same fields; `Dump` itself refuses ranks that there are not."""
    made = msgspec.defstruct("Unchecked", [(name, Any) for name in Dump.__struct_fields__], frozen=True)
    return made(*(getattr(dump, name) for name in Dump.__struct_fields__))
