"""Connections between nodes on which bytes stopped: which way, how many were on their way, and at which end they lie.

Pure. Each leader notes its end of every connection: what the transport took, what was read, what the system holds. Two
ends laid side by side tell where bytes are that were sent and did not arrive. A connection is only looked at when an
end has awaited something for the patience of the evidence: what is on its way when a group fails is lost everywhere.

*Sender*: nothing more was given to the connection, so that it is not to blame. *Receiver*: what was sent lies unread in
the receiver's system. *Network*: the receiver reads, and the sender sent: what is missing is in neither program. Of a
connection whose other end left no dump, less can be said: a receiver that stopped reading and a network that stopped
delivering may look the same.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

from fireflyer.base.units import format_duration
from fireflyer.collectives.flight.dump import LinkEnd
from fireflyer.collectives.flight.evidence import Evidence

__all__ = ["Side", "StoppedLink", "find_stopped_links"]

Side: TypeAlias = Literal["sender", "receiver", "network", "receiver or network", "undecided"]

_CONTROL: Final = -1
_LOST_BEATS: Final = 3
"""So many heartbeats are not on their way at once."""
_ORDER: Final[dict[Side, int]] = {"network": 0, "receiver or network": 1, "receiver": 2, "undecided": 3, "sender": 4}


class StoppedLink(NamedTuple):
    """One direction of one connection."""

    sender: int
    receiver: int
    connection: str
    sent: int
    """Bytes that the sender's transport took; -1 where the sender left no dump."""
    received: int
    """Bytes that the receiver has read; -1 where the receiver left no dump."""
    side: Side
    """Who kept them from arriving."""
    text: str


def find_stopped_links(evidence: Evidence) -> tuple[StoppedLink, ...]:
    """Where bytes are missing first, those that the sender never sent last."""
    ends: dict[tuple[int, int, int, int], LinkEnd] = {}
    for dump in evidence.dumps:
        for end in dump.snapshot.links:
            ends[dump.rank, end.rank, end.channel, end.socket] = end
    both_ways = sorted({*ends, *((other, rank, *which) for rank, other, *which in ends)})
    found = []
    for sender, receiver, channel, socket in both_ways:
        here, there = ends.get((sender, receiver, channel, socket)), ends.get((receiver, sender, channel, socket))
        judged = _judge(here, there, channel == _CONTROL, evidence.patience_ns, evidence.timeout_ns)
        if judged is not None:
            found.append(_stopped(evidence, (sender, receiver), _name(channel, socket), (here, there), judged))
    return tuple(sorted(found, key=lambda link: (_ORDER[link.side], link.sender, link.receiver)))


def _judge(
    sender: LinkEnd | None, receiver: LinkEnd | None, control: bool, patience_ns: int, timeout_ns: int
) -> tuple[Side, str] | None:
    """Why bytes of this direction do not arrive; None where they do, as far as can be seen."""
    if receiver is not None and sender is not None:
        if control:
            return _judge_control(sender, receiver, timeout_ns)
        return _judge_data(sender, receiver, patience_ns)
    if control:  # heartbeats that stay away are what the other rank was named for
        return None
    if sender is not None:
        return _judge_by_sender(sender, patience_ns)
    return _judge_by_receiver(receiver, patience_ns) if receiver is not None else None


def _judge_control(sender: LinkEnd, receiver: LinkEnd, timeout_ns: int) -> tuple[Side, str] | None:
    silent_ns = _since(receiver, receiver.awaiting_since_ns)
    if sender.frames_sent - receiver.frames_received < _LOST_BEATS or silent_ns < timeout_ns // 2:
        return None
    return "network", f"heartbeats were sent, and none has arrived for {format_duration(silent_ns)}"


def _judge_data(sender: LinkEnd, receiver: LinkEnd, patience_ns: int) -> tuple[Side, str] | None:
    waited_ns = _since(receiver, receiver.awaiting_since_ns)
    held_ns = max(_since(sender, sender.blocked_since_ns), _since(sender, sender.sent_ns))
    missing = sender.sent - receiver.received
    if missing > 0 and receiver.unread > 0 and not receiver.awaiting_since_ns and held_ns >= patience_ns:
        return "receiver", f"{receiver.unread} bytes are unread in the receiver's socket buffer: it does not read them"
    if waited_ns < patience_ns or missing < 0:
        return None
    if missing == 0 and not sender.blocked_since_ns:
        return "sender", f"the receiver waited for more for {format_duration(waited_ns)}, which the sender never sent"
    if held_ns < patience_ns:
        return None
    if missing == 0:
        return "network", "what the sender's kernel accepted has arrived, it accepts no more, and the receiver waits"
    return "network", f"the receiver waited for them for {format_duration(waited_ns)}; {_whereabouts(sender)}"


def _whereabouts(sender: LinkEnd) -> str:
    if sender.retransmits > 0:
        return f"the sender's kernel retransmitted them {sender.retransmits} times without an acknowledgement"
    if sender.unacknowledged > 0:
        return f"the sender's kernel still holds {sender.unacknowledged} bytes that the receiver has not acknowledged"
    if sender.unacknowledged == 0:
        return "they were acknowledged to the sender, by a proxy, tunnel or firewall that did not pass them on"
    return "whether they left the sender's host is unknown"


def _judge_by_sender(sender: LinkEnd, patience_ns: int) -> tuple[Side, str] | None:
    """The receiver left no dump."""
    quiet_ns = max(_since(sender, sender.blocked_since_ns), _since(sender, sender.sent_ns))
    if quiet_ns < patience_ns:
        return None
    if sender.retransmits > 0:
        return "receiver or network", f"{_whereabouts(sender)}: the receiver's host or the network has failed"
    if sender.blocked_since_ns or sender.unacknowledged > 0:
        return "receiver or network", f"{_whereabouts(sender)}; the receiver hangs, or the network failed"
    return None


def _judge_by_receiver(receiver: LinkEnd, patience_ns: int) -> tuple[Side, str] | None:
    """The sender left no dump; its heartbeats said how many frames it had begun."""
    waited_ns = _since(receiver, receiver.awaiting_since_ns)
    if waited_ns < patience_ns:
        return None
    told = f"by its last heartbeat the sender had started {receiver.frames_announced} frames"
    whole = f"{receiver.frames_received} arrived completely"
    if receiver.frames_announced <= receiver.frames_received:
        return "sender", f"{told}, and {whole}: what the receiver waits for was never sent"
    if receiver.announced_ns - receiver.awaiting_since_ns >= patience_ns:
        return "network", f"{told}, and {whole}; heartbeats kept arriving, the bytes did not"
    return "undecided", f"{told}, and {whole}; the sender or the network stopped"


def _since(end: LinkEnd, ns: int) -> int:
    return end.at_ns - ns if ns else 0


def _stopped(
    evidence: Evidence,
    ranks: tuple[int, int],
    connection: str,
    ends: tuple[LinkEnd | None, LinkEnd | None],
    judged: tuple[Side, str],
) -> StoppedLink:
    (sender, receiver), (side, why) = ranks, judged
    sent, received = ends[0].sent if ends[0] else -1, ends[1].received if ends[1] else -1
    counts = f"{_bytes(sent)} sent, {_bytes(received)} received"
    broken = "".join(f"; it broke ({end.broken})" for end in ends[:1] if end is not None and end.broken)
    blame = "not the connection: the sender" if side == "sender" else side
    text = (
        f"bytes from {evidence.ranks[sender].label} to {evidence.ranks[receiver].label} stopped on {connection}: "
        f"{counts}; {why}{broken} (held up by: {blame})"
    )
    return StoppedLink(sender, receiver, connection, sent, received, side, text)


def _bytes(count: int) -> str:
    return "an unknown number of bytes" if count < 0 else f"{count} bytes"


def _name(channel: int, socket: int) -> str:
    return "the control connection" if channel == _CONTROL else f"data connection {channel}.{socket}"
