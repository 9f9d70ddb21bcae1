"""The gang on other machines: links that are cut and mended, commands and proofs that do not arrive, several clocks.

The checker knows which ranks live. At no time may ranks of two attempts of the job live, on whichever machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import pytest
from tests.sim.test_gang import Chaos, Cluster, Incarnation, check
from tests.support.campaigns.seeds import more_seeds

from fireflyer.base.events import AttemptFailed, NodeLost
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.hosts import LEASE_SLACK_NS, MAX_HOST_FAILURES, SILENT_NS
from fireflyer.cluster.core.messages import (
    Effect,
    Event,
    KillNode,
    LeaseRenewed,
    StartSupervisor,
    SupervisorGone,
    SupervisorHeartbeat,
    SupervisorUp,
)
from fireflyer.cluster.core.states import NodeState
from fireflyer.cluster.schema.job import JobSpec

RENEW_NS = SECOND
CHECK_NS = 200 * MS
CONNECT_NS = 10 * SECOND
"""After which the launcher gives up to reach a host."""
KILL_NS = 500 * MS
"""What a guard needs to kill its ranks."""
MAX_DRIFT = 0.05


@dataclass
class Guard:
    """What one incarnation's guard knows."""

    drift: float
    lease_end_ns: float
    """By its own clock."""
    broken: bool = False
    """Its connection to the launcher broke."""
    ending: bool = False
    hello_ns: float = 0
    up: bool = False
    """Its hello was answered: the first lease, in which it had to come up, has ended."""


@dataclass
class Links:
    """Chances per renewal that the link of the host is cut, and for how long at most."""

    cut: float = 0.02
    cut_ns: int = 30 * SECOND
    breaks: float = 0.5
    """A message that meets a cut link breaks the connection; otherwise it arrives when the link is mended."""
    ends: dict[int, int] = field(default_factory=dict)
    """Host: when its link is mended."""


class RemoteCluster(Cluster):
    def __init__(self, seed: int, spec: JobSpec, chaos: Chaos, links: Links, *, lives_ns: int = 20 * SECOND) -> None:
        super().__init__(seed, spec, chaos, lives_ns=lives_ns)
        self.links = links
        self.guards: dict[tuple[int, int], Guard] = {}
        self.revoked: set[tuple[int, int]] = set()
        self.hosts_used: list[tuple[int, int]] = []

    # -- the network ---------------------------------------------------------------------------------------------------

    def _send(self, one: Incarnation, arrive: Callable[[], None], *, connected: bool = True) -> None:
        """Between the launcher and the host of `one`, in either direction. `connected`: over the guard's connection,
        otherwise over one that is made again when the link is mended."""

        def there() -> None:
            guard = self.guards[one.node, one.number]
            end_ns = self.links.ends.get(one.host, 0)
            if connected and guard.broken:
                return
            if end_ns <= self.world.now_ns:
                arrive()
            elif connected and self._rng(self.links.breaks):
                guard.broken = True
            else:
                self.world.call_at(end_ns + self._upto(self.chaos.max_delay_ns), there)

        self.world.call_after(self._upto(self.chaos.max_delay_ns), there)

    def _tell(self, one: Incarnation, command: Callable[[], None]) -> None:
        self._send(one, command)

    def _say(self, event: Event) -> None:
        one = self._of(event)
        if one is None:
            super()._say(event)
        else:
            self._send(one, partial(self._feed, event), connected=not isinstance(event, SupervisorGone))

    def _of(self, event: Event) -> Incarnation | None:
        node, number = getattr(event, "node", None), getattr(event, "incarnation", None)
        if node is None or number is None:
            return None
        return next(one for one in self.incarnations if (one.node, one.number) == (node, number))

    # -- the launcher --------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, StartSupervisor):
            states = self.gang.states()
            busy = [
                one.host
                for one in self.incarnations
                if one.node != effect.node and self._is_current(one) and states[one.node] is not NodeState.DOWN
            ]
            assert effect.host not in busy, "two nodes on one host"
            self.hosts_used.append((effect.node, effect.host))
        if isinstance(effect, KillNode):
            self.revoked.add((effect.node, effect.incarnation))
        super()._perform(effect)

    def _is_current(self, one: Incarnation) -> bool:
        return self.gang.nodes[one.node].incarnation == one.number

    def _asked(self, one: Incarnation, sent_ns: float) -> None:
        self._feed(LeaseRenewed(one.node, one.number))
        granted = (one.node, one.number) not in self.revoked
        self._send(one, partial(self._answered, one, sent_ns, granted))

    # -- hosts ---------------------------------------------------------------------------------------------------------

    def _start_supervisor(self, node: int, number: int, host: int) -> None:
        one = Incarnation(node, number, host)
        self.incarnations.append(one)
        guard = Guard(1 + (2 * self.world.random.random() - 1) * MAX_DRIFT, 0)
        guard.lease_end_ns = self._clock(guard) + self.spec.timeouts.supervisor_start_ns
        self.guards[node, number] = guard
        cut = self.links.ends.get(host, 0) > self.world.now_ns
        if cut or self._rng(self.chaos.supervisor_fails):
            one.alive = False
            gone = SupervisorGone(node, number, "did not start")
            self.world.call_after(CONNECT_NS if cut else 1, lambda: self._feed(gone))
            return
        guard.hello_ns = self._clock(guard)
        self._say(SupervisorUp(node, number))
        self._beat(one)
        self._renew(one)
        self._look(one)
        if self._rng(self.chaos.supervisor_dies):
            self.world.call_after(self._upto(20 * SECOND), lambda: self._die(one))
        if self._rng(self.chaos.supervisor_hangs):
            self.world.call_after(self._upto(20 * SECOND), lambda: setattr(one, "hung", True))

    def _clock(self, guard: Guard) -> float:
        return self.world.now_ns * guard.drift

    def _beat(self, one: Incarnation) -> None:
        if one.alive and self.finish is None:
            if not one.hung:
                self._send(one, partial(self._feed, SupervisorHeartbeat(one.node, one.number)))
            self.world.call_after(self.spec.timeouts.heartbeat_ns, lambda: self._beat(one))

    def _renew(self, one: Incarnation) -> None:
        if not one.alive or self.finish is not None:
            return
        if self._rng(self.links.cut):
            self.links.ends[one.host] = self.world.now_ns + self._upto(self.links.cut_ns)
        if not one.hung:
            sent_ns = self._clock(self.guards[one.node, one.number])
            self._send(one, partial(self._asked, one, sent_ns))
        self.world.call_after(RENEW_NS, lambda: self._renew(one))

    def _answered(self, one: Incarnation, sent_ns: float, granted: bool) -> None:
        guard = self.guards[one.node, one.number]
        if not granted:
            self._end_guard(one)
        elif not one.hung:
            guard.lease_end_ns = max(guard.lease_end_ns if guard.up else 0, sent_ns + self.spec.timeouts.lease_ns)
            guard.up = True

    def _look(self, one: Incarnation) -> None:
        """The guard looks at its clock."""
        guard = self.guards[one.node, one.number]
        if not one.alive and not one.living():
            return
        if self._clock(guard) >= guard.lease_end_ns:
            self._end_guard(one)
        else:
            self.world.call_after(CHECK_NS, lambda: self._look(one))

    def _end_guard(self, one: Incarnation) -> None:
        guard = self.guards[one.node, one.number]
        if not guard.ending:
            guard.ending = True
            self.world.call_after(self._upto(KILL_NS), lambda: self._destroy(one))

    def _die(self, one: Incarnation) -> None:
        if one.alive:
            super()._die(one)
            self._end_guard(one)

    def _kill(self, one: Incarnation) -> None:
        self._send(one, partial(self._end_guard, one), connected=False)

    def _start_ranks(self, one: Incarnation, attempt: int) -> None:
        guard = self.guards[one.node, one.number]
        if not guard.up:  # the answer to its hello has come before, on the same connection
            guard.up = True
            guard.lease_end_ns = guard.hello_ns + self.spec.timeouts.lease_ns
        if one.alive and not one.hung:
            for other in self.incarnations:
                assert other.attempt == attempt or not other.living(), "two attempts of the job are alive"
        super()._start_ranks(one, attempt)


QUIET = Chaos(
    supervisor_fails=0.03, supervisor_dies=0.05, supervisor_hangs=0.05, rank_crashes=0.03, doubled=0,
    max_delay_ns=80 * MS, slow_kill=0, prepare_fails=0, port_taken=0, stopped=0.05, deaf=0.02, forgetful=0.02, undead=0,
)  # fmt: skip
CALM = Chaos(0, 0, 0, 0, 0, 5 * MS, 0, 0, 0, 0, 0, 0, 0)


def spec_of(seed: int, **changes: object) -> JobSpec:
    nodes, spares = 1 + seed % 4, seed % 3
    hosts = tuple(f"h{number}" for number in range(nodes + spares))
    base = JobSpec(
        script="x.py", run_dir="/run", nodes=nodes, hosts=hosts, ranks_per_node=1 + seed % 2, max_restarts=seed % 5
    )
    return msgspec.structs.replace(base, **changes)


def history(seed: int) -> RemoteCluster:
    cluster = RemoteCluster(seed, spec_of(seed), QUIET, Links())
    cluster.run()
    assert cluster.finish is not None, "the job never ended"
    cluster.world.run(until_ns=cluster.world.now_ns + 120 * SECOND)
    assert not [one for one in cluster.incarnations if one.living()], "ranks are left after the lease"
    if "no host is left" not in cluster.finish.reason:
        check_end(cluster)
    return cluster


def check_end(cluster: RemoteCluster) -> None:
    for one in cluster.incarnations:
        one.alive = False  # a guard that has lost its launcher ends with its lease, after the job
    check(cluster)


@pytest.mark.parametrize("block", range(4))
def test_random_histories_never_run_two_attempts(block: int) -> None:
    ended = [history(seed) for seed in range(block * 60, block * 60 + 60)]
    by_lease = [one for cluster in ended for one in cluster.guards.values() if one.broken]
    moved = [cluster for cluster in ended if len({host for node, host in cluster.hosts_used if node == 0}) > 1]
    assert by_lease, "no connection ever broke"
    assert moved, "no node ever moved to another host"


@pytest.mark.parametrize("seeds", more_seeds(20_000, 20_600, blocks=1, wide=24_000, seed_s=0.015))
def test_many_random_histories_never_run_two_attempts(seeds: range) -> None:
    for seed in seeds:
        history(seed)


def test_a_seed_gives_one_history() -> None:
    assert history(17).world.trace.to_bytes() == history(17).world.trace.to_bytes()


def cut_once(seed: int, *, spares: int, cut_ns: int) -> RemoteCluster:
    """The link of host 1 is cut for `cut_ns`, while all ranks run."""
    hosts = tuple(f"h{number}" for number in range(2 + spares))
    spec = spec_of(0, nodes=2, ranks_per_node=1, hosts=hosts, max_restarts=5)
    cluster = RemoteCluster(seed, spec, CALM, Links(cut=0, breaks=1))
    at_ns = 3 * SECOND + seed * 37 * MS
    cluster.world.call_at(at_ns, lambda: cluster.links.ends.update({1: at_ns + cut_ns}))
    cluster.run()
    assert cluster.finish is not None
    return cluster


@pytest.mark.parametrize("seed", range(20))
def test_a_spare_takes_the_place_of_a_host_that_cannot_be_reached(seed: int) -> None:
    cluster = cut_once(seed, spares=1, cut_ns=3600 * SECOND)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert cluster.hosts_used == [(0, 0), (1, 1), (1, 2)]
    assert [event.node for event in cluster.log if isinstance(event, NodeLost)] == [1]


@pytest.mark.parametrize("seed", range(20))
def test_without_a_spare_the_job_goes_on_when_the_link_is_mended(seed: int) -> None:
    cluster = cut_once(seed, spares=0, cut_ns=20 * SECOND)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 0
    assert {(0, 0), (1, 1)} == set(cluster.hosts_used)
    assert len(cluster.hosts_used) > 2


@pytest.mark.parametrize("seed", range(20))
def test_a_host_that_stays_silent_without_a_spare_ends_the_job_soon_though_restarts_are_left(seed: int) -> None:
    cluster = cut_once(seed, spares=0, cut_ns=3600 * SECOND)
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 1
    assert "h1 was lost, did not answer for 20.0 s after its lease" in cluster.finish.reason
    lost_ns = 3 * SECOND + seed * 37 * MS + cluster.spec.timeouts.node_lost_ns
    lease_ns = cluster.spec.timeouts.lease_ns + LEASE_SLACK_NS
    assert cluster.world.now_ns < lost_ns + lease_ns + SILENT_NS + CONNECT_NS + 5 * SECOND
    assert [event.restarting for event in cluster.log if isinstance(event, AttemptFailed)][-1] is False


def test_a_host_that_fails_again_and_again_is_left_out_and_the_job_ends() -> None:
    spec = spec_of(0, nodes=2, ranks_per_node=1, hosts=("h0", "h1"), max_restarts=1000)
    cluster = RemoteCluster(1, spec, CALM, Links(cut=0))
    feed = cluster._feed

    def fail(event: Event) -> None:
        feed(event)
        if isinstance(event, SupervisorUp) and event.node == 1:
            one = next(one for one in cluster.incarnations if (one.node, one.number) == (1, event.incarnation))
            cluster.world.call_after(2 * SECOND, lambda: cluster._die(one))

    cluster._feed = fail  # type: ignore[method-assign]
    cluster.run()
    assert cluster.finish is not None
    assert cluster.finish.exit_code == 1
    assert "no host is left for node 1: h1 failed 2 times" in cluster.finish.reason
    failed = [event for event in cluster.log if isinstance(event, AttemptFailed)]
    assert [event.restarting for event in failed] == [True] * (MAX_HOST_FAILURES - 1) + [False]
