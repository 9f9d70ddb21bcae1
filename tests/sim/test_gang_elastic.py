"""Jobs whose size may change, under the lost and late networks of `test_gang_leases`.

At no time may ranks of two attempts live, whoever is a member; an attempt has as many nodes as the job allows, on hosts
that may still be used; and nothing is started for ever."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from tests.sim.test_gang import Incarnation
from tests.sim.test_gang_leases import CALM, QUIET, Links, RemoteCluster, check_end
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds

from fireflyer.base.events import AttemptFailed, AttemptSized, NodeLost, RankExited
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.gang import Gang
from fireflyer.cluster.core.hosts import MAX_HOST_FAILURES, Hosts
from fireflyer.cluster.core.messages import (
    Effect,
    Event,
    StartRanks,
    StartSupervisor,
    StopRequested,
    SupervisorUp,
)
from fireflyer.cluster.core.restarts import MAX_PORT_RETRIES
from fireflyer.cluster.schema.job import JobSpec, Timeouts


class ElasticCluster(RemoteCluster):
    """Remembers who was started for which attempt."""

    def __init__(self, seed: int, spec: JobSpec, links: Links, *, calm: bool = False) -> None:
        super().__init__(seed, spec, CALM if calm else QUIET, links)
        self.started: dict[int, list[tuple[int, int]]] = {}
        """attempt: (node, host) whose ranks were told to start."""
        self.asked: Counter[tuple[int, int]] = Counter()
        """(attempt, host): how often a supervisor was started there."""

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, StartSupervisor):
            self.asked[self.gang.attempt, effect.host] += 1
        if isinstance(effect, StartRanks):
            host = self._find(effect.node, effect.incarnation).host
            self.started.setdefault(effect.attempt, []).append((effect.node, host))
        super()._perform(effect)


def spec_of(seed: int, **changes: object) -> JobSpec:
    least = 1 + seed % 3
    nodes, spares = least + 1 + seed % 2, seed % 5 // 3
    host_ranks = tuple(1 + (seed + host) % 3 for host in range(nodes + spares)) if seed % 4 == 3 else ()
    base = JobSpec(
        script="x.py",
        run_dir="/run",
        nodes=nodes,
        min_nodes=least,
        hosts=tuple(f"h{number}" for number in range(nodes + spares)),
        ranks_per_node=max(host_ranks, default=1 + seed % 2),
        host_ranks=host_ranks,
        max_restarts=1 + seed % 6,
        on_failure=("check",) if seed % 7 < 3 else (),
        on_failure_accuses=seed % 7 == 2,
        timeouts=Timeouts(last_call_ns=(0, 5, 30)[seed % 3] * SECOND),
    )
    return msgspec.structs.replace(base, **changes)


def history(seed: int) -> ElasticCluster:
    cluster = ElasticCluster(seed, spec_of(seed), Links())
    cluster.run()
    assert cluster.finish is not None, "the job never ended"
    cluster.world.run(until_ns=cluster.world.now_ns + 120 * SECOND)
    assert not [one for one in cluster.incarnations if one.living()], "ranks are left after the lease"
    check_members(cluster)
    check_end(cluster)
    return cluster


def check_members(cluster: ElasticCluster) -> None:
    spec = cluster.spec
    failed = {event.attempt: event for event in cluster.log if isinstance(event, AttemptFailed)}
    sized = {event.attempt: event for event in cluster.log if isinstance(event, AttemptSized)}
    failures: Counter[str] = Counter()
    for attempt in range(cluster.gang.attempts):
        event = sized.get(attempt)
        if event is not None:
            assert spec.min_nodes <= event.nodes <= spec.nodes, "a size that the job does not have"
            assert len(event.hosts) == event.nodes == len({*event.hosts}), "two nodes on one host"
            out = {host for host, count in failures.items() if count >= MAX_HOST_FAILURES}
            assert not out & {*event.hosts}, "a host that failed twice is used"
            started = [(node, spec.hosts[host]) for node, host in cluster.started.get(attempt, [])]
            assert started in ([], list(enumerate(event.hosts))), "ranks of others than the members"
            counts = tuple(spec.ranks_on(spec.hosts.index(host)) for host in event.hosts)
            assert event.node_ranks == (counts if spec.host_ranks else ()), (
                "another number of ranks than that of the host"
            )
            exits = {one.rank for one in cluster.log if isinstance(one, RankExited) and one.attempt == attempt}
            assert exits <= set(range(sum(counts))), "a rank that the attempt does not have"
        else:
            assert attempt not in cluster.started, "ranks of an attempt that has no size"
        verdict = failed.get(attempt)
        if verdict is not None and verdict.node is not None and event is not None:
            suspect = cluster.checks.get(attempt, (0, 0, 0))[2] == 2
            if verdict.rank is None or (suspect and verdict.kind == "infrastructure"):
                failures[event.hosts[verdict.node]] += verdict.rank is None
    assert max(cluster.asked.values()) <= 2 + spec.nodes, "a supervisor is started again and again"
    assert cluster.gang.attempts <= 1 + spec.max_restarts + MAX_PORT_RETRIES


def sizes(cluster: ElasticCluster) -> list[int]:
    return [event.nodes for event in cluster.log if isinstance(event, AttemptSized)]


@pytest.mark.parametrize("block", range(2))
def test_random_histories_have_the_members_that_they_may_have(block: int) -> None:
    ended = [history(seed) for seed in range(block * 40, block * 40 + 40)]
    pairs = [pair for cluster in ended for pair in zip(sizes(cluster), sizes(cluster)[1:], strict=False)]
    assert any(after < before for before, after in pairs), "no job ever went on with fewer nodes"
    assert any(after > before for before, after in pairs), "no host ever came back"


@pytest.mark.parametrize("seeds", more_seeds(30_000, 30_200, blocks=1, wide=30_400, seed_s=0.025))
def test_many_random_histories_have_the_members_that_they_may_have(seeds: range) -> None:
    for seed in seeds:
        history(seed)


def test_a_seed_gives_one_history() -> None:
    assert history(17).world.trace.to_bytes() == history(17).world.trace.to_bytes()


def of_three(seed: int, *, least: int = 2, max_restarts: int = 5, **changes: object) -> ElasticCluster:
    """Three hosts, nothing goes wrong but what the test does."""
    hosts = ("h0", "h1", "h2")
    base = JobSpec(
        script="x.py",
        run_dir="/run",
        nodes=3,
        min_nodes=least,
        hosts=hosts,
        ranks_per_node=1,
        max_restarts=max_restarts,
    )
    spec = msgspec.structs.replace(base, **changes)
    return ElasticCluster(seed, spec, Links(cut=0, breaks=1), calm=True)


def cut(cluster: ElasticCluster, host: int, at_ns: int, span_ns: int = 3600 * SECOND) -> None:
    cluster.world.call_at(at_ns, lambda: cluster.links.ends.update({host: at_ns + span_ns}))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lost", [1, 2])
def test_without_a_spare_the_job_goes_on_with_the_hosts_that_are_left(seed: int, lost: int) -> None:
    cluster = of_three(seed)
    cut(cluster, lost, 3 * SECOND + seed * 37 * MS)
    cluster.run()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert sizes(cluster) == [3, 2]
    assert cluster.started[1] == list(enumerate(host for host in range(3) if host != lost))
    assert [event.restarting for event in cluster.log if isinstance(event, AttemptFailed)] == [True]
    check_members(cluster)


def test_the_launchers_own_host_may_be_the_one_that_is_lost() -> None:
    cluster = of_three(1)
    cut(cluster, 0, 3 * SECOND)
    cluster.run()
    assert cluster.started[1] == [(0, 2), (1, 1)], "host 1 keeps its node, and host 2 gets the number that is free"


def test_a_host_that_comes_back_is_used_at_the_next_restart() -> None:
    cluster = of_three(1)
    cut(cluster, 1, 3 * SECOND, 40 * SECOND)
    cut(cluster, 2, 60 * SECOND, 1)  # what breaks then is the connection; the host is there again at once
    cluster.run()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert sizes(cluster) == [3, 2, 3] or sizes(cluster) == [3, 2]


def test_below_the_least_size_the_job_ends_and_says_so() -> None:
    cluster = of_three(1, max_restarts=2)
    for host in (1, 2):
        cut(cluster, host, 3 * SECOND)
    cluster.run()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 1
    reason = cluster.finish.reason
    assert reason.endswith("; 1 of at least 2 nodes can start; all 2 restarts are used up (--max-restarts)"), reason
    assert sizes(cluster) == [3]


def dies_when_up(cluster: ElasticCluster, *hosts: int) -> None:
    """The supervisor on such a host dies 2 s after it was up."""
    feed = cluster._feed

    def fail(event: Event) -> None:
        feed(event)
        if isinstance(event, SupervisorUp):
            one: Incarnation = cluster._find(event.node, event.incarnation)
            if one.host in hosts:
                cluster.world.call_after(2 * SECOND, lambda: cluster._die(one))

    cluster._feed = fail  # type: ignore[method-assign]


def test_a_host_that_fails_twice_is_left_out_and_the_job_goes_on_without_it() -> None:
    cluster = of_three(1, max_restarts=1000)
    dies_when_up(cluster, 1)
    cluster.run()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert sizes(cluster) == [3, 3, 2]
    check_members(cluster)


def test_when_too_many_hosts_failed_twice_the_job_ends_though_restarts_are_left() -> None:
    cluster = of_three(1, max_restarts=1000)
    dies_when_up(cluster, 1, 2)
    cluster.run()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 1
    assert "1 of 3 hosts is left, and the job needs 2 (--nodes 2:3): h1, h2 failed 2 times" in cluster.finish.reason
    assert len(sizes(cluster)) <= 2 * MAX_HOST_FAILURES


def test_a_host_that_hangs_while_it_comes_up_is_waited_for_until_the_last_call_alone() -> None:
    cluster = of_three(1, timeouts=Timeouts(last_call_ns=5 * SECOND))
    cluster.links.breaks = 0  # its hello arrives when the link is mended
    start = cluster._start_supervisor

    def starts(node: int, number: int, host: int) -> None:
        start(node, number, host)
        if host == 1:
            cluster.links.ends[1] = cluster.world.now_ns + 3600 * SECOND

    cluster._start_supervisor = starts  # type: ignore[method-assign]
    cluster.run()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert sizes(cluster) == [2]
    (lost,) = [event for event in cluster.log if isinstance(event, NodeLost)]
    assert lost.reason == "it was not there within 5.0 s (--last-call)"


@pytest.mark.parametrize("least", [1, 2])
def test_a_stop_while_a_job_shrinks_ends_it(least: int) -> None:
    for after_ms in range(3000, 20_000, 500):
        cluster = of_three(after_ms, least=least)
        cut(cluster, 0, 3 * SECOND)
        cluster.world.call_at(after_ms * MS, lambda c=cluster: c._feed(StopRequested(2)))  # type: ignore[misc]
        cluster.run()
        assert cluster.finish is not None
        assert cluster.finish.exit_code in (0, 130)


MUTANTS: dict[str, tuple[object, str, object]] = {
    "a host that failed twice is used": (Hosts, "_left_out", lambda _self, _host: False),
    "a host that is absent is not passed over": (Hosts, "absent", lambda _self, _host, _now_ns: None),
    "fewer nodes than needed are enough": (JobSpec, "least_nodes", property(lambda self: max(1, self.min_nodes - 1))),
    "the size is not that of the members": (Gang, "members", property(lambda self: self.nodes)),
}


def found_by(seed: int) -> str | None:
    try:
        history(seed)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    print(mutant, *search("gang-elastic", mutant, 200, found_by))
