"""A platform on Slurm under faults drawn from a seed, then healed: every task must end, and Slurm have nothing left."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.platform.hosts import Chances
from tests.support.platform.managers import ManagerHost
from tests.support.platform.site import ADMIN, CALM, LONGEST_DELAY_NS, Site
from tests.support.platform.slurm.controller import OURS, THEIRS, Controller, Job, Machine, SlurmChances, Step
from tests.support.platform.slurm.managers import SlurmManager
from tests.support.platform.slurm.oracle import SlurmOracle
from tests.support.platform.slurm.programs import TIMEOUT_NS
from tests.support.platform.slurm.steps import AgentStep, ForeignStep, JobAgents, JobTokens, Joining

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.platform.commands import DrainNode, ResumeNode
from fireflyer.cluster.core.slurm.request import node_of
from fireflyer.cluster.schema.tasks import After

__all__ = ["SlurmSite", "came_back", "led_on", "lost_job", "lost_node", "slurm_chaos"]

CHAOS_NS = 60 * SECOND
HEAL_NS = 900 * SECOND
LED_ON_NS = 2 * SECOND + SECOND // 2
"""A manager that cannot reach its store for so long acts no more, and still has its lease."""


class SlurmSite(Site):
    oracle: SlurmOracle

    def __init__(self, seed: int, *, managers: int = 2, nodes: int = 4) -> None:
        self._node_names = [f"n{number}" for number in range(nodes)]
        self.slots: list[str] = []
        super().__init__(seed, managers=managers, nodes=nodes)

    # --- what it is made of ---

    def _oracle(self) -> SlurmOracle:
        oracle = SlurmOracle(self.world)
        self.slurm = oracle.controller = Controller(self.world, self._node_names, self.is_cut)
        return oracle

    def _manager(self, name: str, drift_ppm: int) -> ManagerHost:
        if self.oracle.tokens is None:
            self.oracle.tokens = JobTokens(self.world, self.store)
        return SlurmManager(
            self.world, self.post, self.store, self.oracle, name, drift_ppm,
            controller=self.slurm, tokens=self.oracle.tokens, cut=self.is_cut,
        )  # fmt: skip

    def _build(self, managers: list[str], nodes: int) -> None:
        assert self.oracle.tokens is not None
        agents = JobAgents(self.grounds, self.post, managers, self.oracle.said)
        joining = Joining(
            self.grounds, agents, self.oracle.tokens, self.managers, self.store, self._drift, self._new_slot
        )

        def launch(machine: Machine, job: Job) -> Step:
            if job.uid == OURS:
                return AgentStep(joining, machine, job)
            return ForeignStep(self.world, job.lasts_ns)

        self.slurm.launch = launch

    def _places(self) -> list[str]:
        return [*(one.name for one in self.managers), "slurmctld", *self._node_names]

    # --- the network of nodes, whatever jobs call them ---

    def _divide(self, left: list[str], right: list[str], *, symmetric: bool) -> None:
        super()._divide(self._with_slots(left), self._with_slots(right), symmetric=symmetric)

    def _with_slots(self, places: list[str]) -> list[str]:
        return [*places, *(slot for slot in self.slots if node_of(slot)[0] in places)]

    def _new_slot(self, slot: str) -> None:
        node = node_of(slot)[0]
        self.slots.append(slot)
        for (a, b), cut in list(self._cut.items()):
            if cut and node in (a, b):
                pair = (slot, b) if a == node else (a, slot)
                self.net.partition([pair[0]], [pair[1]], symmetric=False)
                self._cut[pair] = True

    # --- what users and administrators do ---

    def submit_something(self) -> None:
        rng = self.rng
        client = rng.choice(self.clients)
        least = rng.choice([1, 1, 2, 2, 3, len(self._node_names)])
        fields: dict[str, object] = {"least_nodes": least, "most_nodes": least + rng.choice([0, 0, 1])}
        if rng.random() < 0.1:
            fields["array"] = 3
        if rng.random() < 0.1:
            fields["time_ns"] = rng.randrange(4, 30) * SECOND
        known = [task for tasks in client.submitted.values() for task in tasks]
        if known and rng.random() < 0.15:
            fields["after"] = (After(rng.choice(known), rng.random() < 0.5),)
        self.submit(client, **fields)

    def _drain(self) -> None:
        node = self.rng.choice(self._node_names)
        command = DrainNode(node, "to be looked at") if self.rng.random() < 0.4 else ResumeNode(node)
        self.command(self.clients[0], command, ADMIN)

    def _our_jobs(self, *states: str) -> list[Job]:
        return [job for job in self.slurm.jobs.values() if job.uid == OURS and job.state in states]

    def _cancel(self) -> None:
        jobs = self._our_jobs("PENDING", "RUNNING")
        if jobs and self.slurm.up:
            job = self.rng.choice(jobs)
            self.slurm.by_users[job.id] = None
            self.slurm.cancel(job.id, "", OURS)

    def _foreign_job(self) -> None:
        """Perhaps of the name of one of ours."""
        names = [job.name for job in self._our_jobs("PENDING", "RUNNING")] or ["other"]
        name = self.rng.choice([self.rng.choice(names), "other"])
        lasts_ns = self.rng.randrange(3, 20) * SECOND
        if self.slurm.up:
            self.slurm.submit(name=name, uid=THEIRS, least=1, most=self.rng.choice([1, 2]), lasts_ns=lasts_ns)

    # --- what Slurm does ---

    def _preempt(self) -> None:
        jobs = [job for job in self._our_jobs("RUNNING") if job.preempt_s is None]
        if jobs and self.slurm.up:
            self.slurm.preempt(self.rng.choice(jobs))

    def _time_out(self) -> None:
        jobs = self._our_jobs("RUNNING")
        if jobs and self.slurm.up:
            self.slurm.end(self.rng.choice(jobs), self.rng.choice(["TIMEOUT", "DEADLINE", "FAILED"]), 0)

    def _restart_controller(self) -> None:
        if self.slurm.up and self.rng.random() < 0.7:
            self.slurm.crash()
            self.world.call_after(self.rng.randrange(1, 12) * SECOND, self.slurm.start)
        else:
            self.slurm.start()

    def _take_down(self) -> None:
        """`scontrol update State=DOWN`, or RESUME."""
        node = self.rng.choice(self._node_names)
        if self.slurm.up and self.slurm.views[node].down:
            self.slurm.resume(node)
        elif self.slurm.up:
            self.slurm.take_down(node, "by an administrator")

    def _power(self) -> None:
        node = self.rng.choice(self._node_names)
        if self.slurm.machines[node].powered:
            self.slurm.power_cut(node)
        else:
            self.slurm.power_on(node)

    def _isolate(self) -> None:
        """A node that runs something, from slurmctld, from the managers, or from both."""
        busy = [name for name, machine in self.slurm.machines.items() if machine.steps]
        node = self.rng.choice(busy or self._node_names)
        way = self.rng.randrange(3)
        if way != 1:
            self._divide([node], ["slurmctld"], symmetric=True)
        if way != 0:
            self.cut_off_from_managers(node)

    # --- faults ---

    def roughen(self) -> None:
        self._roughen_links()
        rng = self.rng
        self.slurm.probabilities = SlurmChances(
            lost=rng.choice([0.0, 0.05, 0.15]),
            late=rng.choice([0.0, 0.1, 0.3]),
            slow=rng.choice([0.0, 0.1, 0.3]),
            refused=rng.choice([0.0, 0.1]),
            prolog=rng.choice([0.0, 0.05]),
            record_lost=rng.choice([0.0, 0.3]),
            record_twice=rng.choice([0.0, 0.5]),
            sacct_fails=rng.choice([0.0, 0.2, 1.0]),
        )
        faults = (
            self._partition,
            self._stop_or_start_manager,
            self._cut_store,
            self._isolate,
            self._power,
            self._cancel,
            self._time_out,
            self._restart_controller,
            self._take_down,
            self._foreign_job,
            self._drain,
            self.command_something,
        )
        always = [(self.submit_something, 6), (self._heal, 4), (self._preempt, 2)]
        self._faults = [*always, *((one, rng.choice([0, 1, 2])) for one in faults)]

    def heal(self) -> None:
        self._calm()
        self._start_managers()
        self.run_for(LONGEST_DELAY_NS + 5 * SECOND)
        self._start_managers()  # one that was leaving has left now
        self._calm()
        self._until(self._ended)
        assert self._ended(), f"seed {self.world.seed}: {self.describe()} {self.oracle.nothing_left()}"
        self.run_for(5 * SECOND)
        self.oracle.tables.slow = False
        self._until(self.oracle.all_copied)
        self.oracle.check_end()
        self._until(self._all_serve)  # one may be out that no task waited for
        self._check_nodes()

    def _calm(self) -> None:
        self._heal()
        self.net.set_default(CALM)
        self.store.faults = None
        self.grounds.faults, self.slurm.probabilities = Chances(), SlurmChances()
        self.slurm.start()
        for node in self._node_names:
            self.slurm.power_on(node)

    def _until(self, true: Callable[[], bool]) -> None:
        end_ns = self.world.now_ns + HEAL_NS
        while self.world.now_ns < end_ns and not true():
            self._resume_held()
            for node, view in self.slurm.views.items():
                if (view.drained or view.down) and self.clients[0].idle:
                    self.command(self.clients[0], ResumeNode(node), ADMIN)
            self.run_for(5 * SECOND)

    def _all_serve(self) -> bool:
        return all(self.slurm.state_of(name) == "idle" for name in self._node_names)

    def _ended(self) -> bool:
        return super()._ended() and not self.oracle.nothing_left()

    def _check_nodes(self) -> None:
        """Managers and Slurm agree on the nodes."""
        leader = next(one for one in self.managers if one.acts())
        shown = {view.name: view.state for view in leader.machine.nodes(leader.now_ns)}
        assert (
            shown
            == {name: self.slurm.state_of(name) for name in self._node_names}
            == dict.fromkeys(self._node_names, "idle")
        ), shown


def _with_a_run(seed: int) -> tuple[SlurmSite, str]:
    """Of one task, on the node that is named."""
    site = SlurmSite(seed)
    site.run_for(20 * SECOND)
    site.slow_tasks()
    site.submit(site.clients[0], least_nodes=1, most_nodes=1)
    site.world.run(until_ns=site.world.now_ns + 60 * SECOND, stop=lambda: bool(site.grounds.living_ranks()))
    (ranks,) = site.grounds.living_ranks()
    return site, node_of(ranks.host.name)[0]


def lost_node(seed: int) -> SlurmSite:
    """Nobody reaches the node of a run any more: Slurm soon says that its job has ended, and it lives."""
    site, node = _with_a_run(seed)
    site.cut_off(node)
    site.run_for(60 * SECOND)
    site.heal()
    return site


def lost_job(seed: int) -> SlurmSite:
    """slurmctld goes on from a state without the job of a run, whose node nobody reaches: Slurm does not know the job,
    shows the node as answering for a while, and the run lives."""
    site, node = _with_a_run(seed)
    site.slurm.crash()
    site.slurm.forget_all()
    site.cut_off(node)
    site.slurm.start()
    site.run_for(60 * SECOND)
    site.heal()
    return site


def came_back(seed: int) -> tuple[SlurmSite, list[str]]:
    """A node is cut off until its job has ended and its agent is retired; then managers reach it again, and slurmctld,
    which would have the job's processes killed, is away. And the slots that were told to go."""
    site, node = _with_a_run(seed)
    site.cut_off(node)
    site.run_for(60 * SECOND)
    tokens = site.oracle.tokens
    assert tokens is not None
    assert tokens.retired, "the job has not ended"
    assert site.slurm.machines[node].steps, "its agent does not live"
    site.slurm.crash()
    site.rejoin()
    site.run_for(20 * SECOND)
    told, lives = list(tokens.told_to_go), any(step.alive for step in site.slurm.machines[node].steps.values())
    assert not (told and lives), "it was told to go, and stays"
    site.slurm.start()
    site.heal()
    return site, told


def led_on(seed: int) -> SlurmSite:
    """The only manager does not know what became of its `sbatch`, does not lead when it would tell that, and leads on
    in the same term."""
    site = SlurmSite(seed, managers=1)
    site.run_for(20 * SECOND)
    (manager,) = site.managers
    term = manager.machine.term
    site.slurm.probabilities = SlurmChances(late=1.0)
    site.submit(site.clients[0], least_nodes=1, most_nodes=1)
    site.world.run(until_ns=site.world.now_ns + 60 * SECOND, stop=lambda: "sbatch" in site.slurm.asked)
    site.run_for(TIMEOUT_NS - LED_ON_NS)
    site.store.cut[manager.name] = True
    site.run_for(LED_ON_NS + SECOND // 50)
    assert not manager.acts(), "it leads all the time"
    site.store.cut.clear()
    site.run_for(8 * SECOND)
    assert manager.machine.term == term, "it leads in another term"
    site.heal()
    return site


def slurm_chaos(seed: int) -> SlurmSite:
    site = SlurmSite(seed, managers=3 if seed % 4 == 0 else 2, nodes=4 if seed % 3 else 5)
    site.run_for(20 * SECOND)
    site.roughen()
    end_ns = site.world.now_ns + CHAOS_NS
    while site.world.now_ns < end_ns:
        site.disturb()
        site.run_for(site.rng.randrange(3 * SECOND))
    site.heal()
    return site
