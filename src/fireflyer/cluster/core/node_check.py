"""Whose fault a rank's failure was, by the word of a program that looks at the rank's node (`--on-failure`).

It runs when all ranks of the attempt are gone, so that it may use the GPUs, on the node of the rank that is blamed, by
its supervisor, at most once an attempt. Its exit code is the verdict:

- 0, *sound*: nothing is wrong with the node. The failure is the script's: the job ends.
- 2, *suspect*: the node's fault. The job is restarted, while restarts are left; the event log names the node.
- anything else, a timeout, or a supervisor that is lost meanwhile, *unknown*: the usual rules decide (`restarts`).

A job of the platform has a program that its user has not chosen, and can be started on other nodes: its spec says
`on_failure_accuses`. There the program is not asked of a failure that is the infrastructure's in any case; sound
changes nothing, because the program does not see all that can be wrong with a node; and suspect ends a job that cannot
go on without the node.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fireflyer.base.events import NodeVerdict
from fireflyer.base.units import SECOND, format_duration
from fireflyer.cluster.core.blame import Failure, signal_name
from fireflyer.cluster.core.restarts import Decision, Restarts
from fireflyer.cluster.schema.wire import Checked

__all__ = ["ANSWER_SLACK_NS", "SOUND", "SUSPECT", "NodeCheck", "decide", "verdict_of"]

SOUND, SUSPECT = 0, 2
MAX_WORDS = 200
ANSWER_SLACK_NS = 10 * SECOND
"""A supervisor that has not answered so long after the time limit of its program will not."""


@dataclass(slots=True)
class NodeCheck:
    """That of one attempt; without arguments: nothing was asked."""

    attempt: int = -1
    node: int = -1
    incarnation: int = 0
    rank: int = -1
    asked_ns: int = 0
    limit_ns: int = 0
    answer: Checked | None = None

    @property
    def asked(self) -> bool:
        return self.attempt >= 0

    @property
    def deadline_ns(self) -> int:
        return self.asked_ns + self.limit_ns + ANSWER_SLACK_NS

    def take(self, node: int, incarnation: int, answer: Checked) -> None:
        """An answer; one that comes twice, of another supervisor or of another attempt changes nothing."""
        if (node, incarnation, answer.attempt) == (self.node, self.incarnation, self.attempt) and self.answer is None:
            self.answer = answer


def verdict_of(answer: Checked | None) -> tuple[NodeVerdict, str]:
    """And why, in one line."""
    if answer is None:
        return "unknown", "the check of the node was not answered"
    if answer.note:
        return "unknown", f"the check of the node could not be started: {answer.note}"
    if answer.timed_out:
        return "unknown", f"the check of the node did not end within {format_duration(answer.limit_ns)}"
    if answer.exit_code == SOUND:
        return "sound", "the check found nothing wrong with the node"
    if answer.exit_code == SUSPECT:
        words = "".join(char for char in answer.words.removeprefix("suspect: ") if char.isprintable())[:MAX_WORDS]
        return "suspect", "the check found the node at fault" + (f": {words}" if words else "")
    if answer.exit_code > 128:
        return "unknown", f"the check of the node was killed by {signal_name(answer.exit_code - 128)}"
    return "unknown", f"the check of the node exited with code {answer.exit_code}, which is neither 0 nor 2"


def decide(
    restarts: Restarts,
    failure: Failure | None,
    verdict: NodeVerdict | None,
    *,
    attempt: int,
    port_taken: bool,
    accuses: bool = False,
    bound: bool = False,
) -> tuple[Failure | None, Decision]:
    """Whether to restart, and the failure with the kind that the verdict gives it. None: there was no check. `accuses`:
    see above; `bound`: the job cannot go on without the node."""
    if failure is None or verdict is None or verdict == "unknown" or (verdict == "sound" and accuses):
        return failure, restarts.decide(failure, attempt=attempt, port_taken=port_taken)
    if verdict == "sound":
        why = "not restarted: --on-failure found nothing wrong with its node"
        return msgspec.structs.replace(failure, kind="user"), Decision(False, why)
    failure = msgspec.structs.replace(failure, kind="infrastructure", identity="")
    if accuses and bound:
        return failure, Decision(False, "not restarted on a node that the check found at fault")
    return failure, restarts.decide(failure, attempt=attempt, port_taken=port_taken)
