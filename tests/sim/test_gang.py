"""The gang machine under thousands of random histories.

Supervisors die and hang, ranks crash, messages are late, doubled and out of order, SIGKILL is slow. Simulated nodes
keep the truth about which process lives; the checker compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds

from fireflyer.base.events import (
    AttemptFailed,
    AttemptStarted,
    JobEvent,
    JobFinished,
    JobStarted,
    NodeChecked,
    NodeLost,
    RankExited,
    Report,
    StepReport,
)
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core import judgement, node_check
from fireflyer.cluster.core.blame import Failure
from fireflyer.cluster.core.gang import TICK_NS, Gang
from fireflyer.cluster.core.messages import (
    AttemptPrepared,
    Begin,
    CheckNode,
    Effect,
    Event,
    Finish,
    Inject,
    KillNode,
    Log,
    NodeAnswered,
    PrepareAttempt,
    PrepareFailed,
    RankEnded,
    RankReported,
    RanksGone,
    ShutDownSupervisor,
    StartRanks,
    StartSupervisor,
    StopRanks,
    StopRequested,
    SupervisorGone,
    SupervisorHeartbeat,
    SupervisorLost,
    SupervisorUp,
    Tick,
)
from fireflyer.cluster.core.restarts import MAX_PORT_RETRIES, Decision, Restarts
from fireflyer.cluster.schema.job import Fault, JobSpec
from fireflyer.cluster.schema.wire import Checked, RankEnd, RankError
from fireflyer.sim.world import World

HORIZON_NS = 3600 * SECOND
CODES = (1, 1, 1, 7, 7, 137, 139)
"""A rank that crashes with 1 has raised an exception, at one of two lines."""


@dataclass
class Chaos:
    """Chances per occasion."""

    supervisor_fails: float = 0.05
    supervisor_dies: float = 0.1
    supervisor_hangs: float = 0.05
    rank_crashes: float = 0.1
    doubled: float = 0.2
    max_delay_ns: int = 80 * MS
    slow_kill: float = 0.02
    prepare_fails: float = 0.01
    port_taken: float = 0.05
    stopped: float = 0.15
    deaf: float = 0.03
    """The supervisor is alive but does not stop its ranks."""
    forgetful: float = 0.03
    """The supervisor does not know how one of its ranks ended."""
    undead: float = 0.01
    """SIGKILL does not work (a process stuck in the kernel)."""


CALM = Chaos(0, 0, 0, 0, 0, 5 * MS, 0, 0, 0, 0, 0, 0, 0)


@dataclass
class Incarnation:
    """One supervisor and what it started: the truth."""

    node: int
    number: int
    host: int
    alive: bool = True
    hung: bool = False
    attempt: int = -1
    ranks: dict[int, bool] = field(default_factory=dict)
    """Ranks of the attempt: whether each is alive."""
    ends: dict[int, RankEnd] = field(default_factory=dict)
    told: bool = False

    def living(self) -> list[int]:
        return [rank for rank, alive in self.ranks.items() if alive]


class Cluster:
    def __init__(
        self,
        seed: int,
        spec: JobSpec,
        chaos: Chaos,
        *,
        lives_ns: int = 3 * SECOND,
        restarts: type[Restarts] = Restarts,
    ) -> None:
        self.world = World(seed)
        self.spec = spec
        self.chaos = chaos
        self.lives_ns = lives_ns
        self.gang = Gang(spec)
        self.gang._judgement.restarts = restarts(spec.max_restarts)
        self.advances = self._rng(0.5)
        self.log: list[JobEvent] = []
        self.finish: Finish | None = None
        self.incarnations: list[Incarnation] = []
        self.deadly: list[tuple[int, int | None]] = []
        """(node, rank) of what really broke by itself, in order."""
        self.causes: dict[tuple[int, int | None, int], str] = {}
        """(node, rank, attempt) of what really broke: what the infrastructure did is empty, else what would repeat."""
        self.steps: list[tuple[int, int]] = []
        """(attempt, step): the progress that ranks made; some scripts come further in a later attempt, some do not."""
        self.checks: dict[int, tuple[int, int, int]] = {}
        """attempt: (node, rank, exit code) of the check of a node."""
        self.stuck: set[int] = set()
        """Attempts in which a rank crashed: the others wait for it in a collective and end only when told."""

    def run(self) -> None:
        self._feed(Begin(0.0))
        self._tick()
        if self._rng(self.chaos.stopped):
            for _ in range(self.world.random.randint(1, 3)):
                self.world.call_after(self._upto(8 * SECOND), lambda: self._feed(StopRequested(2)))
        self.world.run(until_ns=HORIZON_NS, stop=lambda: self.finish is not None)

    # -- chance --------------------------------------------------------------------------------------------------------

    def _rng(self, probability: float) -> bool:
        return self.world.random.random() < probability

    def _upto(self, limit_ns: int) -> int:
        return self.world.random.randint(1, limit_ns)

    # -- between the machine and the nodes -----------------------------------------------------------------------------

    def _tick(self) -> None:
        self._feed(Tick())
        if self.finish is None:
            self.world.call_after(TICK_NS, self._tick)

    def _feed(self, event: Event) -> None:
        if not isinstance(event, Tick | SupervisorHeartbeat):
            self.world.record("event", type(event).__name__, repr(event))
        for effect in self.gang.handle(self.world.now_ns, event):
            assert self.finish is None, "an effect after the last one"
            self.world.record("effect", type(effect).__name__, repr(effect))
            self._perform(effect)

    def _say(self, event: Event) -> None:
        """Late, perhaps twice, perhaps out of order."""
        for _ in range(2 if self._rng(self.chaos.doubled) else 1):
            self.world.call_after(self._upto(self.chaos.max_delay_ns), lambda: self._feed(event))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Log(event):
                self.log.append(event)
            case StartSupervisor(node, number, host):
                self._start_supervisor(node, number, host)
            case PrepareAttempt(attempt):
                failed = self._rng(self.chaos.prepare_fails)
                self._say(PrepareFailed(attempt, "port taken") if failed else AttemptPrepared(attempt))
            case StartRanks(node, number, attempt):
                one = self._find(node, number)
                self._tell(one, partial(self._start_ranks, one, attempt))
            case StopRanks(node, number, stop):
                one = self._find(node, number)
                self._tell(one, partial(self._stop_ranks, one, stop.attempt, stop.settle_ns, stop.grace_ns))
            case CheckNode():
                self._check_node(effect)
            case KillNode(node, number):
                self._kill(self._find(node, number))
            case ShutDownSupervisor(node, number):
                one = self._find(node, number)
                self._tell(one, partial(self._destroy, one))
            case Inject(fault):
                self._inject(fault)
            case Finish():
                self.finish = effect

    def _tell(self, _one: Incarnation, command: Callable[[], None]) -> None:
        """A command on its way to the supervisor."""
        self.world.call_after(self._upto(self.chaos.max_delay_ns), command)

    def _inject(self, fault: Fault) -> None:
        for one in self.incarnations:
            if fault.kind == "kill-node" and one.node == fault.target and one.alive:
                self._die(one)

    def _check_node(self, effect: CheckNode) -> None:
        one = self._find(effect.node, effect.incarnation)
        assert not one.living(), "a node is checked beside ranks"
        assert effect.failure.rank is not None
        code = self.world.random.choice([0, 2, 2, 1, 137])
        self.checks[effect.attempt] = (effect.node, effect.failure.rank, code)
        if one.alive and not one.hung and not self._rng(self.chaos.deaf):
            self._say(NodeAnswered(effect.node, effect.incarnation, Checked(effect.attempt, code)))

    def _find(self, node: int, number: int) -> Incarnation:
        return next(one for one in self.incarnations if (one.node, one.number) == (node, number))

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _start_supervisor(self, node: int, number: int, host: int) -> None:
        assert not [one for one in self.incarnations if one.node == node and (one.alive or one.living())]
        one = Incarnation(node, number, host)
        self.incarnations.append(one)
        if self._rng(self.chaos.supervisor_fails):
            one.alive = False
            self._say(SupervisorGone(node, number, "did not start"))
            return
        self._say(SupervisorUp(node, number))
        self._beat(one)
        if self._rng(self.chaos.supervisor_dies):
            self.world.call_after(self._upto(6 * SECOND), lambda: self._die(one))
        if self._rng(self.chaos.supervisor_hangs):
            self.world.call_after(self._upto(6 * SECOND), lambda: setattr(one, "hung", True))

    def _beat(self, one: Incarnation) -> None:
        if one.alive and self.finish is None:
            if not one.hung:
                self.world.call_after(
                    self._upto(self.chaos.max_delay_ns), lambda: self._feed(SupervisorHeartbeat(one.node, one.number))
                )
            self.world.call_after(self.spec.timeouts.heartbeat_ns, lambda: self._beat(one))

    def _die(self, one: Incarnation) -> None:
        """By itself. Its ranks live on until they are killed."""
        if one.alive:
            one.alive = False
            self.deadly.append((one.node, None))
            self._say(SupervisorLost(one.node, one.number, "died"))

    def _kill(self, one: Incarnation) -> None:
        if not self._rng(self.chaos.undead):
            slow = self._rng(self.chaos.slow_kill)
            delay_ns = self._upto(2 * self.spec.timeouts.kill_ns if slow else 50 * MS)
            self.world.call_after(delay_ns, lambda: self._destroy(one))

    def _destroy(self, one: Incarnation) -> None:
        one.alive = False
        for rank in one.living():
            one.ranks[rank] = False
        self._say(SupervisorGone(one.node, one.number, "gone"))

    def _start_ranks(self, one: Incarnation, attempt: int) -> None:
        for other in self.incarnations:
            assert other.node != one.node or not other.living(), "two attempts alive in one node"
        if not one.alive or one.hung:
            return
        one.attempt, one.told = attempt, False
        one.ranks = dict.fromkeys(self.gang.layout.ranks(one.node), True)
        one.ends = {}
        for rank in one.ranks:
            crash = self._rng(self.chaos.rank_crashes)
            code = self.world.random.choice(CODES) if crash else 0
            delay_ns = self._upto(self.lives_ns) if crash else self.lives_ns + self._upto(SECOND)
            self.world.call_after(delay_ns, partial(self._end, one, attempt, rank, code))
            self._report(rank, attempt, 1 + attempt if self.advances else 1)

    def _report(self, rank: int, attempt: int, step: int) -> None:
        self.steps.append((attempt, step))
        self._say(RankReported(StepReport(rank, attempt, step, 1, 1, None, 1)))

    def _stop_ranks(self, one: Incarnation, attempt: int, settle_ns: int, grace_ns: int) -> None:
        if one.alive and not one.hung and one.attempt == attempt and not self._rng(self.chaos.deaf):
            for rank in one.living():
                if settle_ns and self._rng(0.3):  # it notices that another one broke
                    delay_ns = self._upto(settle_ns)
                    self.world.call_after(delay_ns, partial(self._end, one, attempt, rank, 1, of_another=True))
            self.world.call_after(settle_ns, lambda: self._end_ranks(one, attempt, grace_ns))

    def _end_ranks(self, one: Incarnation, attempt: int, grace_ns: int) -> None:
        if one.alive and not one.hung and one.attempt == attempt:
            one.told = True
            for rank in one.living():
                delay_ns = grace_ns if self._rng(0.2) else self._upto(grace_ns)
                self.world.call_after(
                    delay_ns, partial(self._end, one, attempt, rank, self.world.random.choice([143, 137]))
                )

    def _end(self, one: Incarnation, attempt: int, rank: int, code: int, *, of_another: bool = False) -> None:
        if one.attempt != attempt or not one.ranks.get(rank) or (code == 0 and attempt in self.stuck):
            return
        if code:
            self.stuck.add(attempt)
        one.ranks[rank] = False
        error = None
        if code == 1 and not one.told:
            error = RankError(
                "ValueError", f"of rank {rank}", "x.py", 9 if of_another else self.world.random.choice([3, 4])
            )
        if code and not one.told and not of_another:
            self.deadly.append((one.node, rank))
        if code and not one.told:
            repeats = f"line {error.line}" if error is not None else f"code {code}"
            self.causes[one.node, rank, attempt] = "" if code == 137 else repeats
        end = one.ends[rank] = RankEnd(attempt, rank, code, one.told, error=error)
        if one.alive and not one.hung:
            forgotten = not one.living() and self._rng(self.chaos.forgetful)
            if not forgotten:
                self._say(RankEnded(one.node, one.number, end))
            if not one.living():
                taken = one.node == 0 and code != 0 and self._rng(self.chaos.port_taken)
                ends = tuple(one.ends.values())[: -1 if forgotten else None]
                self._say(RanksGone(one.node, one.number, attempt, ends, port_taken=taken))


def check(cluster: Cluster) -> None:
    """What must be true of every history."""
    log, finish, spec = cluster.log, cluster.finish, cluster.spec
    assert finish is not None, "the job never ended"
    if "processes" not in finish.reason:
        assert not [one for one in cluster.incarnations if one.alive or one.living()], "somebody is left"
    assert isinstance(log[0], JobStarted)
    assert isinstance(log[-1], JobFinished)
    assert sum(isinstance(event, JobFinished) for event in log) == 1
    assert (log[-1].exit_code, log[-1].reason) == (finish.exit_code, finish.reason)
    attempts = [event.attempt for event in log if isinstance(event, AttemptStarted)]
    assert attempts == list(range(len(attempts)))
    assert len(attempts) <= 1 + spec.max_restarts + MAX_PORT_RETRIES
    assert cluster.gang.attempts == len(attempts)
    exits = [(event.attempt, event.rank) for event in log if isinstance(event, RankExited)]
    assert len(exits) == len(set(exits)), "a rank ended twice"
    failures = [event for event in log if isinstance(event, AttemptFailed)]
    assert [event.attempt for event in failures] == attempts[: len(failures)]
    assert all(event.restarting for event in failures[:-1])
    if finish.exit_code == 0:
        ranks = cluster.gang.world_size
        assert len(exits) >= ranks
        assert finish.culprit is None
        last = [event for event in log if isinstance(event, RankExited) and event.attempt == attempts[-1]]
        assert sorted(event.rank for event in last) == list(range(ranks))
        assert all(event.exit_code == 0 for event in last)
    elif finish.exit_code != 128 + 2 and not finish.reason.startswith(("port taken", "node ")):
        assert finish.culprit is not None
    check_restarts(cluster, failures)
    if finish.culprit is not None:
        named = (finish.culprit.node, finish.culprit.rank)
        lost = [(event.node, None) for event in log if isinstance(event, NodeLost)]
        assert named in cluster.deadly or named in lost, "somebody is blamed who did nothing"


def check_restarts(cluster: Cluster, failures: list[AttemptFailed]) -> None:
    """A failure that repeats is not restarted again, and no other is refused while the budget lasts."""
    verdicts = {event.attempt: event.verdict for event in cluster.log if isinstance(event, NodeChecked)}
    for event in cluster.log:
        if isinstance(event, NodeChecked):
            node, rank, code = cluster.checks[event.attempt]
            if cluster.spec.on_failure_accuses:
                assert cluster.causes.get((node, rank, event.attempt)), "it is clear whose fault that is"
            assert (event.node, event.rank) == (node, rank)
            assert event.verdict in ({0: "sound", 2: "suspect"}.get(code, "unknown"), "unknown")
    budget, seen = cluster.spec.max_restarts, dict[str, int]()
    free = MAX_PORT_RETRIES
    for failed in failures:
        best = max((step for attempt, step in cluster.steps if attempt <= failed.attempt), default=0)
        if failed.stopped or failed.node is None:
            continue
        cause = cluster.causes.get((failed.node, failed.rank, failed.attempt), "")
        verdict = verdicts.get(failed.attempt, "unknown")
        if verdict == "suspect":
            cause = ""
        if failed.reason.startswith("MASTER_PORT") and free:
            assert failed.restarting or "processes" in cluster_reason(cluster)
            free -= 1
            continue
        repeats = cause != "" and seen.get(cause) == best
        fatal = cluster.gang._judgement.fatal is not None
        if verdict == "sound" and cluster.spec.on_failure_accuses:
            verdict = "unknown"
        moves = verdict == "suspect" and cluster.spec.on_failure_accuses and not cluster.spec.elastic
        expected = budget > 0 and not repeats and verdict != "sound" and not moves
        assert failed.restarting == expected or fatal, (failed, seen, best, budget)
        kind = "infrastructure" if not cause else "user" if "line" in cause else "unknown"
        assert failed.kind == ("user" if verdict == "sound" else kind)
        budget -= failed.restarting
        if cause:
            seen[cause] = best


def cluster_reason(cluster: Cluster) -> str:
    return cluster.finish.reason if cluster.finish is not None else ""


def spec_of(seed: int, **changes: object) -> JobSpec:
    base = JobSpec(
        script="x.py",
        run_dir="/run",
        nodes=1 + seed % 4,
        ranks_per_node=1 + seed % 3,
        max_restarts=seed % 5,
        on_failure=("check",) if seed % 7 < 3 else (),
        on_failure_accuses=seed % 7 == 2,
    )
    return msgspec.structs.replace(base, **changes)


def history(seed: int, restarts: type[Restarts] = Restarts) -> Cluster:
    cluster = Cluster(seed, spec_of(seed), Chaos(), restarts=restarts)
    cluster.run()
    check(cluster)
    return cluster


@pytest.mark.parametrize("block", range(4))
def test_random_histories_end_in_order(block: int) -> None:
    codes = {finish.exit_code for seed in range(block * 100, block * 100 + 100) if (finish := history(seed).finish)}
    assert {0, 1, 7, 130} <= codes, "the schedules are too tame to mean anything"


@pytest.mark.parametrize("seeds", more_seeds(10_000, 12_000, blocks=1, wide=20_000, seed_s=0.003))
def test_many_random_histories_end_in_order(seeds: range) -> None:
    for seed in seeds:
        history(seed)


class _NeverTheSame(Restarts):
    def begin_attempt(self) -> None:
        super().begin_attempt()
        self._seen.clear()


class _SeesNoProgress(Restarts):
    def report(self, report: Report) -> None:
        pass


class _ComparesLinesNot(Restarts):
    def decide(self, failure: Failure | None, *, attempt: int, port_taken: bool) -> Decision:
        if failure is not None and failure.kind == "user":
            failure = msgspec.structs.replace(failure, identity="ValueError")
        return super().decide(failure, attempt=attempt, port_taken=port_taken)


class _BlamesTheUserForAll(Restarts):
    def decide(self, failure: Failure | None, *, attempt: int, port_taken: bool) -> Decision:
        if failure is not None and failure.kind == "infrastructure":
            failure = msgspec.structs.replace(failure, kind="user", identity="killed")
        return super().decide(failure, attempt=attempt, port_taken=port_taken)


class _CountsTakenPorts(Restarts):
    def decide(self, failure: Failure | None, *, attempt: int, port_taken: bool) -> Decision:
        return super().decide(failure, attempt=attempt, port_taken=False)


class _ForgetsTheBudget(Restarts):
    def begin_attempt(self) -> None:
        super().begin_attempt()
        self.used = 0


MUTANTS = {
    "failures are never the same": _NeverTheSame,
    "steps are no progress": _SeesNoProgress,
    "errors at other lines are the same": _ComparesLinesNot,
    "a killed rank is an error of the script": _BlamesTheUserForAll,
    "a taken port costs a restart": _CountsTakenPorts,
    "the budget is not used up": _ForgetsTheBudget,
}


def _takes_sound_for_suspect(answer: Checked | None) -> tuple[str, str]:
    verdict, why = node_check.verdict_of(answer)
    return ("suspect" if verdict == "sound" else verdict), why


def _hears_no_verdict(
    restarts: Restarts, failure: Failure | None, _verdict: str | None, *, attempt: int, port_taken: bool, **_: bool
) -> tuple[Failure | None, Decision]:
    return node_check.decide(restarts, failure, None, attempt=attempt, port_taken=port_taken)


def _stays(*args: Any, **kwargs: Any) -> tuple[Failure | None, Decision]:
    return node_check.decide(*args, **kwargs | {"bound": False})


def _believes_all(*args: Any, **kwargs: Any) -> tuple[Failure | None, Decision]:
    return node_check.decide(*args, **kwargs | {"accuses": False})


PATCHES: dict[str, tuple[object, str, object]] = {
    "a sound node is suspect": (judgement, "verdict_of", _takes_sound_for_suspect),
    "the verdict on a node decides nothing": (judgement, "decide", _hears_no_verdict),
    "a job of the platform stays on a node that is at fault": (judgement, "decide", _stays),
    "a sound node ends a job of the platform": (judgement, "decide", _believes_all),
    "a check that is not answered is waited for": (node_check, "ANSWER_SLACK_NS", HORIZON_NS),
    "a node is checked while its ranks run": (judgement, "quiet", lambda _nodes: True),
}


def found_by(seed: int, mutant: type[Restarts] = Restarts) -> str | None:
    try:
        history(seed, mutant)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_restarts_is_found(mutant: str) -> None:
    print(mutant, *search("gang", mutant, 400, lambda seed: found_by(seed, MUTANTS[mutant])))


@pytest.mark.parametrize("mutant", PATCHES)
def test_a_mutant_of_the_checks_of_nodes_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PATCHES[mutant])
    print(mutant, *search("gang", mutant, 400, found_by))


@pytest.mark.parametrize("seed", [3, 47, 201])
def test_a_seed_gives_one_history(seed: int) -> None:
    assert history(seed).world.trace.to_bytes() == history(seed).world.trace.to_bytes()


@pytest.mark.parametrize("seed", range(40))
def test_a_killed_node_is_named_noticed_and_replaced(seed: int) -> None:
    """The only fault is the injected one, so the job must come back and succeed with one restart."""
    spec = spec_of(seed, nodes=2, ranks_per_node=2, max_restarts=1, inject=(Fault("kill-node", 1, 1),))
    cluster = Cluster(seed, spec, CALM)
    cluster.run()
    check(cluster)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    failed = [event for event in cluster.log if isinstance(event, AttemptFailed)]
    assert [(event.node, event.rank, event.restarting) for event in failed] == [(1, None, True)]
    assert cluster.gang.attempts == 2


@pytest.mark.parametrize("seed", range(40))
def test_a_hung_supervisor_is_given_up_within_two_seconds(seed: int) -> None:
    spec = spec_of(seed, nodes=3, ranks_per_node=1, max_restarts=1)
    cluster = Cluster(seed, spec, CALM, lives_ns=20 * SECOND)
    hung_ns: list[int] = []

    def hang() -> None:
        cluster.incarnations[1].hung = True
        hung_ns.append(cluster.world.now_ns)

    lost_ns: list[int] = []
    feed = cluster._feed

    def watch(event: Event) -> None:
        before = len(cluster.log)
        feed(event)
        if any(isinstance(entry, NodeLost) for entry in cluster.log[before:]):
            lost_ns.append(cluster.world.now_ns)

    cluster._feed = watch  # type: ignore[method-assign]
    cluster.world.call_after(2 * SECOND + seed * 7 * MS, hang)
    cluster.run()
    check(cluster)
    assert len(lost_ns) == 1
    assert lost_ns[0] - hung_ns[0] < 2 * SECOND
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
