"""Ranks get processors near their arena where there are several NUMA nodes, and nothing where there is one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from tests.support.collectives.thread_ranks import together
from tests.support.fake_sysfs import tree_of_nodes, write_tree

from fireflyer.collectives import Communicator
from fireflyer.collectives.bootstrap.cpu_binding import (
    MAX_MASK_TEXT,
    CpuBinding,
    bind_arena,
    cpu_binding_of,
    interleave_window_pages,
    local_machine,
    mask_text,
)
from fireflyer.native import Arena, create_window, interleave_window
from fireflyer.runtime.disk import RealDisk
from fireflyer.topology import Machine, format_list, parse_list, read_machine


def machine_of(
    directory: Path,
    nodes: list[list[int]],
    *,
    allowed: Iterable[int] | None = None,
    mems: list[int] | None = None,
    smt: bool = False,
) -> Machine:
    every = [cpu for node in nodes for cpu in node]
    write_tree(RealDisk(), str(directory), tree_of_nodes(nodes, allowed=allowed or every, mems=mems, smt=smt))
    return read_machine(RealDisk(), root=f"{directory}/sys", status=f"{directory}/proc/self/status")


def bindings(machine: Machine | None, ranks: int, masks: list[str] | None = None) -> list[CpuBinding]:
    told = [mask_text(machine)] * ranks if masks is None else masks
    return [cpu_binding_of(machine, told, local) for local in range(ranks)]


def test_two_memory_nodes_get_half_of_the_ranks_each(tmp_path: Path) -> None:
    found = bindings(machine_of(tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7]]), 4)
    assert [binding.memory_node for binding in found] == [0, 0, 1, 1]
    assert [binding.cpus for binding in found] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert str(found[0]) == ("processors 0-1, arena on NUMA node 0 (NUMA node 0, 2 of 4 cores of a last-level cache)")


def test_four_memory_nodes_and_a_rank_each(tmp_path: Path) -> None:
    found = bindings(machine_of(tmp_path, [[0, 1], [2, 3], [4, 5], [6, 7]]), 4)
    assert [binding.memory_node for binding in found] == [0, 1, 2, 3]
    assert all(binding.network_cpus == binding.cpus for binding in found), (
        "the NUMA node of the network card is unknown"
    )


def test_siblings_stay_together_and_what_is_switched_off_is_left_out(tmp_path: Path) -> None:
    found = bindings(machine_of(tmp_path, [[0, 1, 2, 3], [4, 5]], smt=True), 3)
    assert [binding.cpus for binding in found] == [(0, 1), (2, 3), (4, 5)]


def test_a_cpuset_within_one_memory_node_pins_nothing(tmp_path: Path) -> None:
    (binding, _) = bindings(machine_of(tmp_path, [[0, 1], [2, 3]], allowed=[0, 1]), 2)
    assert (binding.cpus, binding.memory_node) == ((), None)
    assert str(binding) == "not pinned: only one NUMA node is usable"


def test_memory_of_one_node_only_pins_nothing(tmp_path: Path) -> None:
    assert bindings(machine_of(tmp_path, [[0, 1], [2, 3]], mems=[1]), 2)[0].cpus == ()


def test_ranks_keep_to_what_each_was_given(tmp_path: Path) -> None:
    machine = machine_of(tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7]])
    found = bindings(machine, 3, ["4-7", "0-3", "0-3"])
    assert [binding.cpus for binding in found] == [(4, 5, 6, 7), (0, 1), (2, 3)]
    unknown = bindings(machine, 2, ["", "nonsense"])
    assert [binding.memory_node for binding in unknown] == [0, 1], "a mask that was not told is that of everybody"


def test_one_memory_node_is_seen_by_a_single_read(tmp_path: Path) -> None:
    write_tree(RealDisk(), str(tmp_path), {"sys/devices/system/node/online": "0\n"})
    assert local_machine(f"{tmp_path}/sys") is None
    assert bindings(None, 2) == [CpuBinding(), CpuBinding()]
    assert str(CpuBinding()) == "one NUMA node"


@pytest.mark.parametrize("text", ["", "garbage\n", "0-\n", "-1\n", "999999999999\n", "\x00\xff"])
def test_garbage_is_one_memory_node(tmp_path: Path, text: str) -> None:
    write_tree(RealDisk(), str(tmp_path), {"sys/devices/system/node/online": text})
    assert local_machine(f"{tmp_path}/sys") is None
    assert local_machine(f"{tmp_path}/nothing") is None


def test_two_nodes_of_which_nothing_else_is_known_pin_nothing(tmp_path: Path) -> None:
    write_tree(RealDisk(), str(tmp_path), {"sys/devices/system/node/online": "0-1\n"})
    assert bindings(local_machine(f"{tmp_path}/sys"), 2)[0].cpus == ()


def test_a_mask_too_long_to_tell_is_not_told(tmp_path: Path) -> None:
    machine = machine_of(tmp_path, [[0], [1]])
    assert mask_text(machine) == "0-1"
    sparse = tuple(range(0, 2000, 2))
    assert len(format_list(sparse)) > MAX_MASK_TEXT
    assert parse_list(format_list(sparse).encode(), 8192) == sparse
    assert mask_text(msgspec.structs.replace(machine, allowed_cpus=sparse)) == ""


def test_memory_that_does_not_exist_is_a_complaint_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    descriptor = Arena.create(1 << 20)
    arena = Arena(descriptor)
    os.close(descriptor)
    assert bind_arena(arena, CpuBinding(memory_node=None)) == ""
    assert bind_arena(arena, CpuBinding(memory_node=900)).startswith("arena: ")
    assert bind_arena(arena, CpuBinding(memory_node=1 << 20)) == "arena: there is no NUMA node 1048576"
    arena.allocate(4096)[:] = 1
    window = create_window(2, 2, 4096)
    try:
        assert interleave_window(window, [900])
        interleave_window_pages(
            window, machine_of(tmp_path, [[0], [1]])
        )  # of which the real machine has one: that serves
        interleave_window_pages(window, None)
    finally:
        os.close(window)


def test_a_machine_with_one_memory_node_is_left_alone() -> None:
    def binding(comm: Communicator) -> CpuBinding:
        return comm.cpu_binding

    if local_machine() is None:
        assert together([0, 0], binding) == [CpuBinding(), CpuBinding()]
