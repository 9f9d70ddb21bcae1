"""Why an attempt ended, who is to blame, and whether another one follows.

Failures come in a burst, and news of the cause may arrive after news of its consequences: who is to blame is decided
`blame_ns` after the first, or when all nodes are quiet if that is sooner (see `blame`). A first rank that failed before
any report is judged only when the gang is gone, because then the port tells whether a stranger had taken it: such a
restart is free, a few times. With `--on-failure` the node of the rank that is blamed is checked first (`node_check`).
What a failure says of a host is counted before it is said whether another attempt follows: none does where too few
hosts are left.
"""

from __future__ import annotations

from collections.abc import Sequence

from fireflyer.base.events import (
    AttemptFailed,
    JobEvent,
    NodeChecked,
    NodeVerdict,
    PeerFailureReport,
    Report,
    StepReport,
)
from fireflyer.base.rank_layout import RankLayout
from fireflyer.base.suspension import SUSPENDED_EXIT_CODE
from fireflyer.cluster.core.blame import Failure, blame, gave_up_waiting, name_the_peer, signal_name
from fireflyer.cluster.core.hosts import Hosts
from fireflyer.cluster.core.messages import CheckNode, Effect, Log, NodeAnswered
from fireflyer.cluster.core.node_check import NodeCheck, decide, verdict_of
from fireflyer.cluster.core.restarts import Decision, Restarts
from fireflyer.cluster.core.states import Node, NodeState, quiet
from fireflyer.cluster.schema.job import Culprit, JobSpec
from fireflyer.cluster.schema.wire import RankEnd

__all__ = ["Judgement"]


class Judgement:
    """`begin_attempt`, then what happens in it, then `judge` until it is `judged`."""

    def __init__(self, spec: JobSpec, hosts: Hosts) -> None:
        self._spec = spec
        self._hosts = hosts
        self.restarts = Restarts(spec.max_restarts)
        self.stop_signal: int | None = None
        """That stopped the job."""
        self.suspending = False
        """No attempt follows: where one would have, the job is suspended."""
        self.any_left = False
        """A rank has left because of the suspension: what fails then, fails because of that."""
        self.fatal: str | None = None
        """Why no restart can help."""
        self.culprit: Culprit | None = None
        self.verdict: NodeVerdict | None = None
        """Of the check of the culprit's node; None: there was none."""
        self._attempt = -1
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self._attempt += 1
        self.judged = False
        self.progressed = False
        """A step was reported."""
        self.failed_ns = 0
        """When the attempt began to be stopped."""
        self._reported = self._port_taken = False
        self._failures: list[Failure] = []
        self._peer_failures: list[PeerFailureReport] = []
        self._failure: Failure | None = None
        self._decision = Decision(False, "")
        self._check = NodeCheck()
        self.verdict = None
        self.restarts.begin_attempt()

    @property
    def ends_job(self) -> bool:
        """Whatever failed: the job was stopped, or cannot go on."""
        return self.stop_signal is not None or self.fatal is not None

    @property
    def restarting(self) -> bool:
        return self._decision.restart and not self.ends_job and not self.suspending

    @property
    def suspended(self) -> bool:
        """Once judged: nothing failed, or another attempt would have followed."""
        return self.suspending and not self.ends_job and (self._failure is None or self._decision.restart)

    def outcome(self) -> tuple[int, str]:
        """Exit code of the job that ends with this attempt, and why."""
        if self.stop_signal is not None:
            return 128 + self.stop_signal, f"stopped by {signal_name(self.stop_signal)}"
        if self.fatal is not None:
            return 1, self.fatal
        if self.suspended:
            return SUSPENDED_EXIT_CODE, "suspended" if self._failure is None else f"suspended; {self._failure.reason}"
        if self._failure is None:
            return 1, "the job was stopped"
        why = f"; {self._decision.why}" if self._decision.why else ""
        return self._failure.exit_code, self._failure.reason + why

    # -- what happens in the attempt -----------------------------------------------------------------------------------

    def add(self, failure: Failure) -> None:
        if not self.judged:
            self._failures.append(failure)

    def report(self, report: Report, *, ranks: int) -> None:
        """A report of the current attempt, which has so many ranks."""
        self.restarts.report(report)
        self._reported = True
        if isinstance(report, PeerFailureReport) and 0 <= report.peer < ranks:
            self._peer_failures.append(report)
        self.progressed = self.progressed or isinstance(report, StepReport)

    def port_was_taken(self) -> None:
        """MASTER_PORT was held by a stranger when the ranks were gone."""
        self._port_taken = self._spec.master_port == 0

    def gave_up_waiting(self, end: RankEnd) -> bool:
        return gave_up_waiting(end, self._peer_failures)

    # -- judging -------------------------------------------------------------------------------------------------------

    def judge(self, now_ns: int, nodes: Sequence[Node], layout: RankLayout) -> list[Effect]:
        """Once the attempt is being stopped, until `judged`. A node is checked where that is asked for. `layout` is
        that of the attempt."""
        if self.judged:
            return []
        all_quiet = quiet(nodes)
        early = not self._reported and bool(self._failures) and blame(self._failures).rank == 0
        in_window = now_ns < self.failed_ns + self._spec.timeouts.blame_ns
        waits = in_window or self.suspending or (early and self._spec.master_port == 0)
        if not all_quiet and waits:  # while ranks leave, one that has left may explain a failure until the last is gone
            return []
        if self.any_left:
            self._failures = []
        reason = self._blame(layout)
        effects = self._begin_check(now_ns, nodes, all_quiet=all_quiet)
        if effects or not self._is_checked(now_ns, nodes, all_quiet=all_quiet):
            return effects
        self.judged = True
        events: list[JobEvent] = []
        self._decision = Decision(False, "")
        if not self.ends_job:
            self.verdict = self._checked(events)
            self._failure, self._decision = decide(
                self.restarts,
                self._failure,
                self.verdict,
                attempt=self._attempt,
                port_taken=self._port_taken,
                accuses=self._spec.on_failure_accuses,
                bound=not self._spec.elastic,
            )
        culprit = self.culprit if self.culprit is not None and self.culprit.attempt == self._attempt else None
        self._count_host_failure(culprit, nodes)
        if self.restarting:
            self.fatal = self._hosts.none_left(nodes)
        if self.suspended and self._failure is None:
            return []
        events.append(
            AttemptFailed(
                attempt=self._attempt,
                reason=reason,
                restarting=self.restarting,
                node=culprit.node if culprit is not None else None,
                rank=culprit.rank if culprit is not None else None,
                stopped=self.stop_signal is not None,
                kind=self._failure.kind if self._failure is not None else None,
            )
        )
        return [Log(event) for event in events]

    def _count_host_failure(self, culprit: Culprit | None, nodes: Sequence[Node]) -> None:
        if culprit is None:
            return
        if culprit.rank is None:
            self._hosts.failed(nodes[culprit.node])
        elif self.verdict == "suspect":
            self._hosts.suspect(nodes[culprit.node].host)

    def over(self, nodes: Sequence[Node]) -> bool:
        """Judged, and no rank is left."""
        return self.judged and quiet(nodes)

    def _blame(self, layout: RankLayout) -> str:
        """Finds the culprit. Returns why the attempt ended."""
        self.culprit = self._failure = None
        if self.stop_signal is not None:
            return f"stopped by {signal_name(self.stop_signal)}"
        if self._failures:
            failure = blame(self._failures)
            failure = name_the_peer(failure, self._failures, self._peer_failures, layout)
            self._failure = failure
            if failure.node >= 0:
                self.culprit = Culprit(self._attempt, failure.node, failure.rank, failure.exit_code, failure.reason)
        if self.fatal is not None:
            return self.fatal
        if self._failure is None:
            return "the job was stopped"
        if self._port_taken:
            return f"MASTER_PORT was taken by another process; {self._failure.reason}"
        return self._failure.reason

    # -- the check of a node -------------------------------------------------------------------------------------------

    def take_answer(self, event: NodeAnswered) -> None:
        self._check.take(event.node, event.incarnation, event.checked)

    def _node_to_check(self, nodes: Sequence[Node]) -> Node | None:
        failure = self._failure
        over = self.ends_job or self._port_taken
        if not self._spec.on_failure or over or failure is None or failure.rank is None or failure.node < 0:
            return None
        if self._spec.on_failure_accuses and failure.kind == "infrastructure":
            return None
        return nodes[failure.node]

    def _begin_check(self, now_ns: int, nodes: Sequence[Node], *, all_quiet: bool) -> list[Effect]:
        node, failure = self._node_to_check(nodes), self._failure
        if node is None or failure is None or failure.rank is None or self._check.asked:
            return []
        if not all_quiet or node.state is not NodeState.IDLE:
            return []
        limit_ns = self._spec.on_failure_limit_ns
        self._check = NodeCheck(self._attempt, node.number, node.incarnation, failure.rank, now_ns, limit_ns)
        return [CheckNode(node.number, node.incarnation, self._attempt, failure)]

    def _is_checked(self, now_ns: int, nodes: Sequence[Node], *, all_quiet: bool) -> bool:
        """Whether nothing is to be waited for: there is no check, or it is over."""
        if self._node_to_check(nodes) is None:
            return True
        if self._check.asked:
            return self._check.answer is not None or now_ns >= self._check.deadline_ns
        return all_quiet  # a node whose supervisor was lost since: nobody is there to ask

    def _checked(self, events: list[JobEvent]) -> NodeVerdict | None:
        check, failure = self._check, self._failure
        if not check.asked or failure is None or failure.rank != check.rank:
            return None
        verdict, reason = verdict_of(check.answer)
        events.append(NodeChecked(check.node, check.rank, self._attempt, verdict, reason))
        return verdict
