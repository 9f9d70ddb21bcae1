"""Ranks go to whole caches near their memory, and nowhere where pinning could only harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_sysfs import status_files, tree_of_epyc, write_tree

from fireflyer.base.errors import UsageError
from fireflyer.runtime.disk import RealDisk
from fireflyer.topology import Machine, NumaNode, Placement, network_placement, rank_placement, read_machine

PartOf = Callable[..., Machine]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("epyc")
    write_tree(RealDisk(), str(directory), tree_of_epyc())
    return directory


@pytest.fixture(scope="module")
def epyc(tree: Path) -> Machine:
    return machine_of(tree, tree)


def machine_of(tree: Path, own: Path) -> Machine:
    return read_machine(RealDisk(), root=f"{tree}/sys", status=f"{own}/proc/self/status")


@pytest.fixture
def part_of(tree: Path, tmp_path: Path) -> PartOf:
    """The same machine, of which the process may use a part."""

    def part(allowed: range | list[int], nodes: tuple[int, ...] = (0, 1)) -> Machine:
        write_tree(RealDisk(), str(tmp_path), status_files(allowed, nodes))
        return machine_of(tree, tmp_path)

    return part


def test_eight_ranks_have_a_cache_each_four_on_every_socket(epyc: Machine) -> None:
    placed = rank_placement(epyc, 8)
    assert [placement.rank for placement in placed] == list(range(8))
    assert [placement.memory_node for placement in placed] == [0] * 4 + [1] * 4
    assert [placement.cpus[0] for placement in placed] == [0, 8, 16, 24, 32, 40, 48, 56]
    assert all(placement.cpus in epyc.l3_groups for placement in placed)
    assert placed[4].reason == "NUMA node 1, a last-level cache of its own (4 cores)"


def test_more_ranks_than_caches_share_them_evenly(epyc: Machine) -> None:
    placed = rank_placement(epyc, 32)
    assert [len(placement.cpus) for placement in placed] == [4] * 32  # two cores, with siblings
    assert placed[1].cpus == (2, 3, 66, 67)
    assert all(any(set(placement.cpus) <= set(group) for group in epyc.l3_groups) for placement in placed)
    assert "2 of 4 cores" in placed[1].reason


def test_one_memory_node_pins_nothing(part_of: PartOf) -> None:
    placed = rank_placement(part_of(range(32)), 4)
    assert not any(placement.pinned for placement in placed)
    assert {placement.memory_node for placement in placed} == {None}
    assert placed[0].reason == "not pinned: only one NUMA node is usable"


def test_memory_of_one_node_only_pins_nothing(part_of: PartOf) -> None:
    assert not rank_placement(part_of(range(128), nodes=(0,)), 4)[0].pinned


def test_fewer_cores_than_ranks_pins_nothing(part_of: PartOf) -> None:
    narrow = part_of([0, 64, 32, 96])  # two cores, four processors
    assert rank_placement(narrow, 2)[0].pinned
    assert rank_placement(narrow, 3)[0].reason == "not pinned: 3 ranks on 2 cores"


def test_the_affinity_mask_is_respected(part_of: PartOf) -> None:
    uneven = part_of([*range(12), *range(32, 36)])
    placed = rank_placement(uneven, 4)
    assert [placement.memory_node for placement in placed] == [0, 0, 0, 1]
    assert all(set(placement.cpus) <= set(uneven.allowed_cpus) for placement in placed)


def test_ranks_that_the_launcher_has_placed_stay_where_they_are(epyc: Machine) -> None:
    masks = [range(32, 40), range(8), range(40, 48), range(8)]
    placed = rank_placement(epyc, 4, masks=masks)
    assert [placement.memory_node for placement in placed] == [1, 0, 1, 0]
    assert [placement.cpus for placement in placed] == [(32, 33, 34, 35), (0, 1, 2, 3), (40, 41, 42, 43), (4, 5, 6, 7)]


def test_ranks_follow_their_gpus(epyc: Machine) -> None:
    near = [gpu.numa_node for gpu in reversed(epyc.gpus())]
    placed = rank_placement(epyc, 8, near=near)
    assert [placement.memory_node for placement in placed] == [1] * 4 + [0] * 4
    assert len({placement.cpus for placement in placed}) == 8
    assert [placement.memory_node for placement in rank_placement(epyc, 3, near=[1, None, 7])] == [1, 0, 0]


def test_the_network_thread_is_near_the_card(epyc: Machine, part_of: PartOf) -> None:
    placed = network_placement(epyc)
    assert placed.memory_node == 1
    assert placed.cpus == epyc.numa_nodes[1].cpus
    assert placed.reason == "near mlx5_0, ib0 on NUMA node 1"
    assert not network_placement(part_of(range(32))).pinned


def test_lists_of_a_wrong_length_are_refused(epyc: Machine) -> None:
    with pytest.raises(UsageError, match="masks has 1 entries for 2 ranks"):
        rank_placement(epyc, 2, masks=[range(4)])
    with pytest.raises(UsageError, match="at least 1 rank"):
        rank_placement(epyc, 0)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Up to four NUMA nodes, each with up to six caches of up to four cores, some of which may not be used."""
    caches_of_node = draw(st.lists(st.lists(st.integers(1, 4), min_size=0, max_size=6), min_size=1, max_size=4))
    cores: list[tuple[int, ...]] = []
    caches: list[tuple[int, ...]] = []
    nodes: list[NumaNode] = []
    cpu = 0
    for number, sizes in enumerate(caches_of_node):
        first = cpu
        for size in sizes:
            caches.append(tuple(range(cpu, cpu + 2 * size)))
            cores += [(cpu + 2 * at, cpu + 2 * at + 1) for at in range(size)]
            cpu += 2 * size
        memory = draw(st.sampled_from([0, 1 << 30]))
        nodes.append(NumaNode(node=2 * number, cpus=tuple(range(first, cpu)), memory_bytes=memory))
    if cpu == 0:
        cores, caches, cpu = [(0,)], [(0,)], 1
        nodes = [NumaNode(node=0, cpus=(0,), memory_bytes=1)]
    allowed = draw(st.sets(st.integers(0, cpu - 1), min_size=1))
    return Machine(
        cpus=tuple(range(cpu)),
        allowed_cpus=tuple(sorted(allowed)),
        allowed_nodes=tuple(node.node for node in nodes),
        packages=(tuple(range(cpu)),),
        cores=tuple(cores),
        l3_groups=tuple(caches),
        numa_nodes=tuple(nodes),
    )


@given(machines(), st.integers(1, 12), st.data())
def test_any_machine(machine: Machine, ranks: int, data: st.DataObject) -> None:
    near = data.draw(st.none() | st.lists(st.sampled_from([None, 0, 2, 99]), min_size=ranks, max_size=ranks))
    placed = rank_placement(machine, ranks, near=near)
    assert [placement.rank for placement in placed] == list(range(ranks))
    assert len({placement.pinned for placement in placed}) == 1
    if placed[0].pinned:
        check_pinned(machine, placed)


def check_pinned(machine: Machine, placed: tuple[Placement, ...]) -> None:
    taken: list[int] = []
    for placement in placed:
        taken += placement.cpus
        assert set(placement.cpus) <= set(machine.allowed_cpus)
        assert any(set(placement.cpus) <= set(group) for group in machine.l3_groups)
        home = next(node for node in machine.numa_nodes if placement.cpus[0] in node.cpus)
        assert placement.memory_node == machine.memory_near(home)
    assert len(taken) == len(set(taken)), "no processor belongs to two ranks"
