"""The cluster manager under faults: who believes that it serves does, nothing acknowledged is lost, all serve again.

What must never be is checked after everything that happens: see `tests.support.fs.manager_sim.oracle`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from tests.support.campaigns.known_seeds import search
from tests.support.campaigns.seeds import more_seeds
from tests.support.fs.manager_sim.chaos import Cluster, chaos
from tests.support.fs.manager_sim.mutants import MUTANTS, who_is_overwritten_is_complete
from tests.support.fs.manager_sim.oracle import TORN

from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.rows import CHAINS
from fireflyer.fs.schema.manager import (
    AddMoves,
    CancelMoves,
    ChangeMembers,
    Done,
    Drain,
    GetStatus,
    ManagerError,
    NewMove,
    Override,
    OverrideWarning,
    RotateKeys,
    Status,
)
from fireflyer.fs.schema.routing import TargetState

SEEDS = range(40)
MUTANT_SEEDS = 1500
"""In which each mutant must be found."""


@pytest.mark.parametrize("seeds", [SEEDS, *more_seeds(40, 140, blocks=1, wide=3000, seed_s=0.12)])
def test_any_faults_leave_roles_with_those_who_may_have_them_and_end_with_all_serving(seeds: range) -> None:
    taken = 0
    for seed in seeds:
        try:
            taken += chaos(seed).oracle.roles_taken
        except AssertionError as error:
            raise AssertionError(f"chaos({seed}) of tests.support.fs.manager_sim.chaos: {error}") from error
    assert taken > len(seeds), "the faults are too mild to show anything"


def attempt(seed: int) -> str | None:
    try:
        chaos(seed)
    except AssertionError as error:
        return str(error)
    return None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    print(name, *search("managers", name, MUTANT_SEEDS, attempt))


def history(seed: int) -> str:
    return hashlib.sha256(chaos(seed).world.trace.to_bytes()).hexdigest()


def test_a_seed_has_one_history_whatever_the_hashes_of_python() -> None:
    code = "from tests.sim.test_fs_manager import history; print(history(5), history(6))"
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] == f"{history(5)} {history(6)}\n"


# --- single stories ---


def serving(cluster: Cluster, chain: int = 1) -> list[int]:
    return [one.target for one in cluster.oracle.chains[chain].members if one.state is TargetState.SERVING]


def begun(seed: int = 1, **settings: int) -> Cluster:
    cluster = Cluster(seed, **settings)
    cluster.begin()
    return cluster


def test_a_node_that_is_silent_loses_its_roles_after_the_timeout_and_gets_them_back() -> None:
    cluster = begun()
    cluster.net.partition(["n1"], ["m0", "m1"])
    began_ns = cluster.world.now_ns
    assert cluster.run_for(20 * SECOND, lambda: serving(cluster) == [102])
    took_ns = cluster.world.now_ns - began_ns
    assert 5 * SECOND < took_ns < 8 * SECOND
    cluster.net.heal()
    assert cluster.run_for(20 * SECOND, cluster.all_serve)
    assert serving(cluster) == [102, 101]


def test_a_process_that_starts_again_at_once_is_dead_all_the_same() -> None:
    cluster = begun()
    version = cluster.oracle.chains[1].version
    cluster.hosts[0].node.restart()
    assert cluster.run_for(3 * SECOND, lambda: serving(cluster) == [102])
    assert cluster.run_for(20 * SECOND, cluster.all_serve)
    assert cluster.oracle.chains[1].version == version + 3  # offline, syncing, serving
    assert cluster.oracle.incarnations[1] == 2


def test_when_the_primary_dies_the_next_one_leaves_all_roles_where_they_are() -> None:
    cluster = begun(managers=3)
    version = cluster.oracle.chains[1].version
    primary = next(one for one in cluster.managers if one.acts())
    primary.node.crash()
    assert cluster.run_for(6 * SECOND, lambda: any(one.acts() for one in cluster.managers))
    cluster.run_for(20 * SECOND)
    assert cluster.all_serve()
    assert cluster.oracle.chains[1].version == version


def test_without_any_manager_everything_is_fenced_and_nothing_changes() -> None:
    cluster = begun()
    rows = dict(cluster.store.contents)
    for manager in cluster.managers:
        manager.node.crash()
    cluster.run_for(4 * SECOND)
    processes = [host.process for host in cluster.hosts if host.process is not None]
    assert not any(process.serves(target) for process in processes for target in process.host.targets)
    before, after = (
        {k: v for k, v in one.items() if k.startswith(CHAINS.prefix)} for one in (rows, cluster.store.contents)
    )
    assert before == after
    cluster.managers[0].node.restart()
    assert cluster.run_for(20 * SECOND, cluster.all_serve)


def test_a_drained_node_gives_its_roles_up_one_after_the_other() -> None:
    cluster = begun()
    cluster.admin.ask(Drain(node=1))
    assert cluster.run_for(10 * SECOND, lambda: serving(cluster) == [102] and cluster.admin.idle)
    cluster.admin.ask(ChangeMembers(1, remove=101))
    assert cluster.run_for(10 * SECOND, lambda: len(cluster.oracle.chains[1].members) == 1)
    cluster.admin.ask(ChangeMembers(1, add=101), Drain(node=1, drain=False), ChangeMembers(1, add=101))
    assert cluster.run_for(20 * SECOND, lambda: len(serving(cluster)) == 2)
    refused = [answer.message for _, answer in cluster.admin.answers if isinstance(answer, ManagerError)]
    assert refused == ["target 101 is drained; run `ff fs admin undrain --target 101` first"]


def test_a_node_that_is_emptied_serves_until_others_have_taken_its_places() -> None:
    cluster = begun()
    cluster.admin.ask(Drain(node=1, at_once=False), AddMoves((NewMove(1, 101, 3),)))

    def moved() -> bool:
        assert len(serving(cluster)) >= 2, "a replica less"
        return 903 in serving(cluster) and 101 not in [one.target for one in cluster.oracle.chains[1].members]

    assert cluster.run_for(30 * SECOND, moved)
    cluster.admin.ask(AddMoves((NewMove(1, 102, 1),)), CancelMoves())
    cluster.run_for(5 * SECOND, lambda: cluster.admin.idle)
    assert [answer.note for _, answer in cluster.admin.answers if isinstance(answer, Done)][-1] == (
        "1 move cancelled, 0 running"  # no target of node 1 may be taken
    )


def test_keys_of_capabilities_change_one_step_after_the_other_whoever_is_primary() -> None:
    cluster = begun(managers=2)
    seen: list[tuple[int, ...]] = []

    def look() -> None:
        seen.extend(one.key_ids for one in cluster.managers if one.acts() and one.key_ids not in seen[-1:])

    def ends(with_keys: tuple[int, ...]) -> bool:
        look()
        return seen[-1:] == [with_keys]

    cluster.admin.ask(RotateKeys(), RotateKeys())
    assert cluster.run_for(10 * SECOND, lambda: ends((1, 2)))
    next(one for one in cluster.managers if one.acts()).node.crash()
    assert cluster.run_for(20 * SECOND, lambda: ends((2, 1)))
    assert cluster.run_for(20 * SECOND, lambda: ends((2,)))
    assert seen == [(1,), (1, 2), (2, 1), (2,)]
    cluster.admin.ask(RotateKeys(revoke=True))
    assert cluster.run_for(
        10 * SECOND, lambda: all(one.process and one.process.key_ids == (3,) for one in cluster.hosts)
    )


def test_the_last_of_a_chain_is_never_asked_to_give_up() -> None:
    cluster = begun()
    cluster.admin.ask(Drain(node=1), Drain(node=2))
    cluster.run_for(20 * SECOND)
    assert len(serving(cluster)) == 1


def test_a_broken_path_costs_one_target_its_role() -> None:
    cluster = begun()
    cluster.hosts[0].broken_to[2] = True
    assert cluster.run_for(10 * SECOND, lambda: serving(cluster) == [101])
    acknowledged = cluster.oracle.acknowledged[1]
    cluster.run_for(10 * SECOND)
    assert serving(cluster) == [101]
    assert cluster.oracle.acknowledged[1] > acknowledged
    cluster.hosts[0].broken_to.clear()
    assert cluster.run_for(50 * SECOND, cluster.all_serve)


def stand_still(cluster: Cluster, duration_ns: int) -> None:
    """Node 1 does nothing, and its neighbour complains of that after a while, and for a while longer."""
    cluster.net.partition(["n1"], ["m0", "m1"])
    cluster.run_for(duration_ns // 2)
    cluster.hosts[1].broken_to[1] = True
    cluster.run_for(duration_ns // 2)
    cluster.net.heal()
    cluster.run_for(SECOND)
    cluster.hosts[1].broken_to.clear()


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_node_that_stood_still_for_less_than_the_timeout_keeps_its_role(seed: int) -> None:
    cluster = begun(seed)
    version = cluster.oracle.chains[1].version
    stand_still(cluster, 5 * SECOND // 2)
    assert cluster.run_for(2 * SECOND, cluster.all_serve)
    assert cluster.oracle.chains[1].version == version


def test_a_node_with_a_broken_path_that_stands_still_again_and_again_loses_its_role_all_the_same() -> None:
    cluster = begun()
    for _ in range(3):
        stand_still(cluster, 3 * SECOND)
        cluster.hosts[1].broken_to[1] = True
        if cluster.run_for(SECOND, lambda: serving(cluster) == [102]):
            break
    assert serving(cluster) == [102]
    cluster.hosts[1].broken_to.clear()
    assert cluster.run_for(50 * SECOND, cluster.all_serve)


def test_who_is_not_sure_comes_back_only_when_an_administrator_has_read_what_may_be_lost() -> None:
    cluster = begun(nodes=2, chains=1)
    first, second = cluster.hosts
    first.node.crash()
    assert cluster.run_for(10 * SECOND, lambda: serving(cluster) == [102])
    assert cluster.run_for(5 * SECOND, lambda: cluster.oracle.write(1, flush=False))
    second.power_cut()
    second.node.restart()
    cluster.run_for(20 * SECOND)
    assert serving(cluster) == []
    cluster.admin.ask(Override(1, 101), Override(1, 102))
    assert cluster.run_for(20 * SECOND, lambda: serving(cluster) == [102])
    warnings = [answer.warning for _, answer in cluster.admin.answers if isinstance(answer, OverrideWarning)]
    refusals = [answer.message for _, answer in cluster.admin.answers if isinstance(answer, ManagerError)]
    assert refusals == ["target 101 on node 1 is not online; start the storage process of the node first"]
    assert len(warnings) == 1
    assert (
        "writes that it acknowledged shortly before it failed and that were not on its disk may be lost" in warnings[0]
    )
    first.node.restart()
    assert cluster.run_for(20 * SECOND, cluster.all_serve)


def test_after_a_power_cut_of_all_a_chain_does_not_wait_for_the_machine_that_stays_dark() -> None:
    """Those that come up are seen one after the other; that does not make the last one the only complete one."""
    cluster = begun(replicas=3, chains=1)
    for node in [*(one.node for one in cluster.managers), *(one.node for one in cluster.hosts)]:
        node.crash()
    cluster.run_for(SECOND)
    for node in [*(one.node for one in cluster.managers), *(one.node for one in cluster.hosts[:2])]:
        node.restart()
        cluster.run_for(2 * SECOND)
    assert cluster.run_for(20 * SECOND, lambda: sorted(serving(cluster)) == [101, 102])


def test_after_the_end_of_all_a_disk_that_was_lost_is_not_waited_for_because_it_came_up_last() -> None:
    cluster = begun(chains=1)
    cluster.run_for(5 * SECOND, lambda: cluster.oracle.write(1, flush=True))
    for node in [*(one.node for one in cluster.managers), *(one.node for one in cluster.hosts)]:
        node.crash()
    cluster.oracle.content[101] = cluster.oracle.flushed[101] = 0
    cluster.oracle._unsure[101] = True
    cluster.managers[0].node.restart()
    cluster.hosts[1].node.restart()
    cluster.run_for(3 * SECOND)
    cluster.hosts[0].node.restart()
    assert cluster.run_for(30 * SECOND, cluster.all_serve)


def overwritten_while_a_node_is_cut_off() -> Cluster:
    """Node 2 is never told that node 1 is to be synced. Node 3, the tail, is; it begins with it, and dies."""
    cluster = begun(replicas=3, chains=1)
    cluster.net.partition(["m0", "m1"], ["n2"])
    cluster.hosts[0].node.restart()
    began_ns = cluster.world.now_ns
    while cluster.oracle.content.get(101) != TORN:
        cluster.world.run(until_ns=cluster.world.now_ns + 10 * MS)
        assert cluster.world.now_ns < began_ns + 5 * SECOND, "it is not synced"
    for host in cluster.hosts[1:]:
        host.node.crash()
    return cluster


def test_who_is_being_overwritten_does_not_serve() -> None:
    cluster = overwritten_while_a_node_is_cut_off()
    cluster.run_for(30 * SECOND)
    assert serving(cluster) == []
    cluster.hosts[2].node.restart()
    assert cluster.run_for(30 * SECOND, lambda: serving(cluster) == [103, 101])


def test_it_would_if_it_counted_as_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    who_is_overwritten_is_complete(monkeypatch)
    with pytest.raises(AssertionError, match="target 101 shall serve with -1 of"):
        overwritten_while_a_node_is_cut_off().run_for(30 * SECOND)


def test_who_left_while_the_others_went_on_is_not_asked_for_what_it_missed() -> None:
    cluster = begun(replicas=3, chains=1)
    cluster.hosts[0].node.crash()
    assert cluster.run_for(20 * SECOND, lambda: len(serving(cluster)) == 2)
    assert cluster.run_for(5 * SECOND, lambda: cluster.oracle.write(1, flush=True))
    for one in cluster.hosts[1:]:
        one.node.crash()
    cluster.hosts[0].node.restart()
    cluster.run_for(20 * SECOND)
    assert serving(cluster) == []
    cluster.hosts[2].node.restart()
    assert cluster.run_for(20 * SECOND, lambda: serving(cluster) == [103, 101])


def test_what_a_new_tail_may_have_shown_is_not_forgotten_when_the_old_tail_comes_back_first() -> None:
    """Node 1 is cut off and is never told that node 3 has gone. Node 2 is told, and becomes the tail."""
    cluster = begun(replicas=3, chains=1)
    cluster.hosts[2].node.crash()
    cluster.run_for(4 * SECOND)
    cluster.net.partition(["m0", "m1"], ["n1"])
    assert cluster.run_for(4 * SECOND, lambda: serving(cluster) == [101, 102])
    cluster.run_for(SECOND)
    for host in cluster.hosts[:2]:
        host.node.crash()
    assert cluster.run_for(20 * SECOND, lambda: serving(cluster) == [])
    cluster.hosts[2].node.restart()
    cluster.run_for(20 * SECOND)
    assert serving(cluster) == []
    cluster.hosts[1].node.restart()
    assert cluster.run_for(20 * SECOND, lambda: serving(cluster) == [102, 103])


def test_status_says_who_lives_and_what_is_reported() -> None:
    cluster = begun()
    cluster.hosts[2].node.crash()
    cluster.run_for(10 * SECOND)
    cluster.admin.ask(GetStatus())
    assert cluster.run_for(5 * SECOND, lambda: cluster.admin.idle)
    status = next(answer for _, answer in cluster.admin.answers if isinstance(answer, Status))
    assert [(node.id, node.alive) for node in status.nodes] == [(1, True), (2, True), (3, False)]
    assert [(one.id, one.chain) for one in status.targets] == [
        (101, 1),
        (102, 1),
        (202, 2),
        (203, 2),
        (901, None),
        (902, None),
        (903, None),
    ]
    assert [chain.id for chain in status.chains] == [1, 2]
    assert sum(isinstance(answer, Done) for _, answer in cluster.admin.answers) == 8
