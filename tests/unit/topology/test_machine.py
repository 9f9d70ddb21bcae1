"""A node is read from sysfs as it is, and whatever is shown there, a usable machine comes out."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from tests.support.disks import DISKS
from tests.support.fake_sysfs import as_list, cpu_files, node_files, status_files, tree_of_epyc, write_tree
from tests.support.patience import allowed_s

from fireflyer.base.ports import Disk
from fireflyer.runtime.disk import RealDisk
from fireflyer.topology import Machine, read_machine
from fireflyer.topology.sysfs import MAX_CPUS, MAX_FILE_BYTES, parse_list


def read(disk: Disk, root: str, files: dict[str, str]) -> Machine:
    write_tree(disk, root, files)
    return read_machine(disk, root=f"{root}/sys", status=f"{root}/proc/self/status")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("epyc")
    write_tree(RealDisk(), str(directory), tree_of_epyc())
    return directory


@pytest.fixture(scope="module")
def epyc(tree: Path) -> Machine:
    return read_machine(RealDisk(), root=f"{tree}/sys", status=f"{tree}/proc/self/status")


def part_of(tree: Path, own: Path, cpus: Iterable[int], nodes: Iterable[int]) -> Machine:
    """The same machine, of which the process may use a part."""
    write_tree(RealDisk(), str(own), status_files(cpus, nodes))
    return read_machine(RealDisk(), root=f"{tree}/sys", status=f"{own}/proc/self/status")


def test_a_two_socket_epyc_is_read_whole(epyc: Machine) -> None:
    assert epyc.cpus == epyc.allowed_cpus == tuple(range(128))
    assert len(epyc.cores) == 64
    assert epyc.cores[5] == (5, 69)
    assert [len(group) for group in epyc.l3_groups] == [8] * 16
    assert epyc.l3_groups[9] == (36, 37, 38, 39, 100, 101, 102, 103)
    assert [len(package) for package in epyc.packages] == [64, 64]
    assert [(node.node, len(node.cpus), node.memory_bytes >> 30) for node in epyc.numa_nodes] == [
        (0, 64, 256),
        (1, 64, 256),
    ]
    assert [gpu.numa_node for gpu in epyc.gpus()] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_links_are_what_remains_after_the_line_code(epyc: Machine) -> None:
    gpu, nic = epyc.gpus()[0], epyc.nics()[0]
    assert gpu.link_bytes_per_s == 4_000_000_000
    assert gpu.max_link_bytes_per_s == pytest.approx(31.5e9, rel=1e-3)
    assert nic.interfaces == ("mlx5_0", "ib0")
    assert nic.network_bytes_per_s == 25_000_000_000
    assert nic.max_link_bytes_per_s is None


def test_a_console_is_no_gpu(epyc: Machine) -> None:
    assert "0000:c3:00.0" not in [device.address for device in epyc.devices]


def test_every_disk_will_do(tmp_path: Path, epyc: Machine) -> None:
    disk, root = DISKS["sim"](tmp_path)
    assert read(disk, root, tree_of_epyc()) == epyc


def test_a_machine_can_be_stored(epyc: Machine) -> None:
    assert msgspec.json.decode(msgspec.json.encode(epyc), type=Machine) == epyc


def test_a_container_sees_all_processors_but_may_use_few(tree: Path, tmp_path: Path) -> None:
    machine = part_of(tree, tmp_path, [2, 3, 66, 67], [0])
    assert machine.cpus == tuple(range(128))
    assert machine.allowed_cpus == (2, 3, 66, 67)
    assert machine.allowed_nodes == (0,)


def test_a_virtual_machine_with_holes(tmp_path: Path) -> None:
    """Processors 0, 2 and 5 of one node, no L3 shown, processor 5 without a topology."""
    package = [0, 2]
    files = {"sys/devices/system/cpu/online": "0,2,5\n", "sys/devices/system/node/online": "0\n"}
    files |= node_files(0, cpus=[0, 1, 2, 5], memory_kib=4 << 20, distances=[10])
    for cpu in package:
        made = cpu_files(cpu, core=[cpu], l3=package, package=package)
        files |= {path: text for path, text in made.items() if "index3" not in path}
    machine = read(RealDisk(), str(tmp_path), files | status_files([0, 2, 5], [0]))
    assert machine.cpus == (0, 2, 5)
    assert machine.cores == ((0,), (2,), (5,))
    assert machine.packages == machine.l3_groups == ((0, 2), (5,))
    assert machine.numa_nodes[0].cpus == (0, 2, 5)


def test_without_sysfs_there_is_one_node_with_the_allowed_processors(tmp_path: Path) -> None:
    machine = read(RealDisk(), str(tmp_path), status_files([4, 5], [0]))
    assert machine.cpus == machine.allowed_cpus == (4, 5)
    assert [node.cpus for node in machine.numa_nodes] == [(4, 5)]
    nothing = read_machine(RealDisk(), root=f"{tmp_path}/none", status=f"{tmp_path}/none")
    assert nothing.cpus == nothing.allowed_cpus == (0,)
    assert nothing.allowed_nodes == (0,)


def test_a_memory_expander_and_a_node_without_memory(tmp_path: Path) -> None:
    files = {"sys/devices/system/cpu/online": "0-3\n", "sys/devices/system/node/online": "0-2\n"}
    files |= node_files(0, cpus=[0, 1], memory_kib=1 << 20, distances=[10, 20, 14])
    files |= node_files(1, cpus=[2, 3], memory_kib=0, distances=[20, 10, 14])
    files |= node_files(2, cpus=[], memory_kib=8 << 20, distances=[14, 14, 10])
    machine = read(RealDisk(), str(tmp_path), files | status_files(range(4), [0, 1, 2]))
    assert [machine.memory_near(node) for node in machine.numa_nodes] == [0, 2, 2]
    fenced = read_machine(RealDisk(), root=f"{tmp_path}/sys", status="/none")
    assert fenced.allowed_nodes == (0, 1, 2)


def test_memory_that_may_not_be_used_is_not_near(tree: Path, tmp_path: Path) -> None:
    machine = part_of(tree, tmp_path, range(128), [1])
    assert [machine.memory_near(node) for node in machine.numa_nodes] == [1, 1]


@pytest.mark.parametrize("garbage", ["", "\0\xff", "-3", "1-", "9-2", "0-999999999", "a,b", "0x", ",,,", "7" * 5000])
def test_garbage_counts_as_absent(tmp_path: Path, garbage: str) -> None:
    files = dict.fromkeys(tree_of_epyc(), garbage)
    machine = read(*DISKS["sim"](tmp_path), files)
    assert 1 <= len(machine.cpus) <= MAX_CPUS
    check_partition(machine)


@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_of_truth_and_garbage_gives_disjoint_groups(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    junk = ["", "no\n", "0-127\n", "3,70-80\n", "-1\n", "0\n", "12345678901\n", "5-3\n"]
    files = {
        path: rng.choice(junk) if rng.random() < 0.3 else text
        for path, text in tree_of_epyc().items()
        if rng.random() < 0.9
    }
    check_partition(read(*DISKS["sim"](tmp_path), files))


def check_partition(machine: Machine) -> None:
    for groups in (machine.packages, machine.cores, machine.l3_groups):
        assert sorted(cpu for group in groups for cpu in group) == list(machine.cpus)
    near = [cpu for node in machine.numa_nodes for cpu in node.cpus]
    assert len(near) == len(set(near))
    assert set(near) <= set(machine.cpus)
    assert machine.allowed_cpus
    assert set(machine.allowed_cpus) <= set(machine.cpus)
    assert {machine.memory_near(node) for node in machine.numa_nodes} <= {node.node for node in machine.numa_nodes}


def test_lists_are_bounded() -> None:
    assert parse_list(b"0-999999999\n", 100) == tuple(range(100))
    assert parse_list(b"98-102,7\n", 100) == (7, 98, 99)
    assert parse_list(b"1,x\n", 100) == ()
    assert parse_list(None, 100) == ()
    every_other = as_list(range(0, MAX_CPUS, 2)).encode()
    assert parse_list(every_other, MAX_CPUS) == tuple(range(0, MAX_CPUS, 2))


def test_a_file_that_is_too_long_counts_as_absent(tmp_path: Path) -> None:
    status = {"proc/self/status": "Cpus_allowed_list:\t0\n"}
    long = {"sys/devices/system/cpu/online": "0-3" + " " * MAX_FILE_BYTES}
    assert read(RealDisk(), str(tmp_path), long | status).cpus == (0,)


def test_the_largest_machine_is_read_in_bounded_time(tmp_path: Path) -> None:
    """8192 processors that say nothing of themselves: each is asked, none is waited for."""
    files = {"sys/devices/system/cpu/online": "0-999999\n"}
    write_tree(RealDisk(), str(tmp_path), files)
    begin = time.monotonic()
    machine = read_machine(RealDisk(), root=f"{tmp_path}/sys", status="/none")
    assert len(machine.cpus) == len(machine.cores) == MAX_CPUS
    assert time.monotonic() - begin < allowed_s(20)


def test_this_machine_is_readable() -> None:
    machine = read_machine(RealDisk())
    check_partition(machine)
    assert all(device.address for device in machine.devices)
