"""Paths inside a node: which there are, that they are measured on this machine, and that a wrong word is found."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fireflyer.native import page_nodes, prefer_node
from fireflyer.runtime.disk import RealDisk
from fireflyer.topology import Machine, NumaNode, read_machine
from fireflyer.validators.core.validation.paths import MAX_GPUS, MAX_SETS, CpuSet, cpu_sets, numa_sets, path_name
from fireflyer.validators.core.validation.records import Found, NodeRecord, compare_figures
from fireflyer.validators.stress import cuda_paths, paths, run
from fireflyer.validators.stress.numa_memory import Kernel, memory_on, misplaced

TWO_SOCKETS = Machine(
    cpus=tuple(range(16)),
    allowed_cpus=tuple(range(16)),
    allowed_nodes=(0, 1),
    packages=((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
    cores=tuple((cpu, cpu + 8) for cpu in range(8)),
    l3_groups=((0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)),
    numa_nodes=(
        NumaNode(node=0, cpus=(0, 1, 2, 3, 8, 9, 10, 11), memory_bytes=1 << 36),
        NumaNode(node=1, cpus=(4, 5, 6, 7, 12, 13, 14, 15), memory_bytes=1 << 36),
        NumaNode(node=2, memory_bytes=1 << 36),
    ),
)
ONE_SOCKET = msgspec.structs.replace(
    TWO_SOCKETS, numa_nodes=(NumaNode(node=0, cpus=tuple(range(16)), memory_bytes=1 << 37),)
)


def test_numa_nodes_with_processors_are_the_ends_of_paths_by_one_processor_of_each_core() -> None:
    assert cpu_sets(TWO_SOCKETS) == [CpuSet("numa0", (0, 1, 2, 3), 0), CpuSet("numa1", (4, 5, 6, 7), 1)]


def test_within_one_numa_node_the_caches_are() -> None:
    assert cpu_sets(ONE_SOCKET) == [
        CpuSet("cache0", (0, 1)), CpuSet("cache1", (2, 3)), CpuSet("cache2", (4, 5)), CpuSet("cache3", (6, 7)),
    ]  # fmt: skip
    assert [one.name for one in numa_sets(ONE_SOCKET)] == ["numa0"]


def test_processors_that_this_process_may_not_use_are_left_out() -> None:
    few = msgspec.structs.replace(TWO_SOCKETS, allowed_cpus=(9, 3))
    assert cpu_sets(few) == [CpuSet("cache0", (9,), 0), CpuSet("cache1", (3,), 0)]
    assert numa_sets(few) == [CpuSet("numa0", (3, 9), 0)]
    one = msgspec.structs.replace(TWO_SOCKETS, allowed_cpus=(9,))
    assert cpu_sets(one) == [CpuSet("numa0", (9,), 0)]


def test_a_numa_node_whose_memory_this_process_may_not_use_is_no_end_of_a_path() -> None:
    second = msgspec.structs.replace(TWO_SOCKETS, allowed_nodes=(1,))
    assert numa_sets(second) == [CpuSet("numa1", (4, 5, 6, 7))], "and there is no other memory to choose"
    assert numa_sets(msgspec.structs.replace(TWO_SOCKETS, allowed_nodes=(0, 2))) == [CpuSet("numa0", (0, 1, 2, 3), 0)]
    nodes = tuple(msgspec.structs.replace(node, memory_bytes=0) for node in TWO_SOCKETS.numa_nodes)
    untold = msgspec.structs.replace(TWO_SOCKETS, numa_nodes=nodes)
    assert [one.name for one in numa_sets(untold)] == ["numa0", "numa1"]


def test_all_figures_of_the_largest_node_fit_into_a_record() -> None:
    parts = [f"numa{number}" for number in range(MAX_SETS)]
    gpus = [f"gpu{number}" for number in range(MAX_GPUS)]
    names = {path_name(a, b) for a in parts for b in parts}
    names |= {path_name(*ends) for gpu in gpus for part in parts for ends in ((gpu, part), (part, gpu))}
    names |= {path_name(a, b, by_host=by) for a in gpus for b in gpus if a != b for by in (False, True)}
    record = NodeRecord(node="n", model="m", seen_ns=1, figures=dict.fromkeys(names, 1e9))
    assert msgspec.json.decode(msgspec.json.encode(record), type=NodeRecord) == record


def here(parts: int) -> Machine:
    """This machine, as if the processors of this test had so many NUMA nodes."""
    cpus = sorted(os.sched_getaffinity(0))
    groups = [tuple(cpus[number::parts]) or (cpus[0],) for number in range(parts)]
    return Machine(
        cpus=tuple(cpus), allowed_cpus=tuple(cpus), allowed_nodes=tuple(range(parts)), packages=(tuple(cpus),),
        cores=tuple((cpu,) for cpu in cpus), l3_groups=(tuple(cpus),),
        numa_nodes=tuple(NumaNode(node=node, cpus=group, memory_bytes=1 << 30) for node, group in enumerate(groups)),
    )  # fmt: skip


def test_paths_of_this_machine_are_measured_and_threads_of_the_program_stay_where_they_were() -> None:
    before = os.sched_getaffinity(0)
    found = paths.host_paths(0, machine=here(2), thread_bytes=1 << 16, kernel=Numa().kernel)
    assert sorted(found.figures) == [
        "numa0_to_numa0_bytes_per_s", "numa0_to_numa1_bytes_per_s",
        "numa1_to_numa0_bytes_per_s", "numa1_to_numa1_bytes_per_s",
    ]  # fmt: skip
    assert all(value > 0 for value in found.figures.values())
    assert not found.faults
    assert found.words.startswith("4 paths, the slowest numa")
    assert os.sched_getaffinity(0) == before


def test_one_word_that_changed_on_its_way_is_found_with_the_path() -> None:
    calls = iter(range(100))

    def disturb(words: NDArray[np.uint64]) -> None:
        words[17] ^= np.uint64(next(calls) == 1)

    numa = Numa()
    (fault,) = paths.host_paths(0, machine=here(2), thread_bytes=1 << 16, disturb=disturb, kernel=numa.kernel).faults
    assert (fault.severity, fault.cause) == ("high", "wrong_word")
    assert fault.words == "numa1_to_numa0: 1 word changed on the way"


# --- where memory lies ---


class Numa:
    """A kernel that has as many NUMA nodes as it is asked for."""

    def __init__(self, *, refused: str = "", moves: bool = False) -> None:
        self.refused, self.moves = refused, moves
        self.asked: list[int] = []
        self.looks = 0
        self.moved: tuple[int, int, int] | None = None
        """From the look of this number on so many pages lie on that node."""
        self._node_at: dict[int, int] = {}

    @property
    def kernel(self) -> Kernel:
        return Kernel(self.prefer_node, self.page_nodes, lambda: self.moves)

    def prefer_node(self, memory: NDArray[np.uint64], node: int) -> str:
        assert not memory.any(), "the first touch decides"
        self.asked.append(node)
        self._node_at[memory.ctypes.data] = node
        return self.refused

    def page_nodes(self, memory: NDArray[np.uint64], pages: int) -> tuple[list[int], str]:
        if self.refused:
            return [], self.refused
        nodes = [self._node_at[memory.ctypes.data]] * pages
        if self.moved is not None and self.looks >= self.moved[0]:
            nodes[: self.moved[1]] = [self.moved[2]] * self.moved[1]
        self.looks += 1
        return nodes, ""


def measured(numa: Numa) -> Found:
    return paths.host_paths(0, machine=here(2), thread_bytes=1 << 16, kernel=numa.kernel)


def test_memory_is_bound_to_the_node_of_its_processors_before_it_is_touched() -> None:
    numa = Numa()
    assert not measured(numa).could_not_run
    assert numa.asked == [0, 0, 1, 1], "what is read and what is written"


def test_within_one_numa_node_there_is_nothing_to_bind() -> None:
    numa = Numa(refused="No such system call", moves=True)
    cpus = sorted(os.sched_getaffinity(0))
    machine = msgspec.structs.replace(here(1), l3_groups=((cpus[0],), tuple(cpus[1:]) or (cpus[0],)))
    found = paths.host_paths(0, machine=machine, thread_bytes=1 << 16, kernel=numa.kernel)
    assert "cache1_to_cache0_bytes_per_s" in found.figures
    assert (numa.asked, numa.looks) == ([], 0)


def test_where_memory_cannot_be_bound_it_is_measured_only_if_the_kernel_does_not_move_it() -> None:
    assert len(measured(Numa(refused="Operation not permitted")).figures) == 4
    found = measured(Numa(refused="Operation not permitted", moves=True))
    assert (found.figures, found.could_not_run) == (
        {},
        "memory cannot be kept on NUMA node 0, as kernel.numa_balancing moves it: mbind: operation not permitted",
    )


@pytest.mark.parametrize("look", [0, 3, 4, 7])
def test_memory_that_lies_on_another_node_before_or_after_gives_no_figure(look: int) -> None:
    numa = Numa()
    numa.moved = (look, 11, 5)
    found = measured(numa)
    assert not found.figures
    node = look % 4 // 2
    assert found.could_not_run == (
        f"memory of NUMA node {node} cannot be had: 11 of 1024 pages lie on node 5; is the node full?"
    )
    numa = Numa()
    numa.moved = (look, 10, 5)
    assert measured(numa).figures, "a hundredth does not show"


def test_the_kernel_of_this_machine_says_where_memory_lies() -> None:
    memory, problem = memory_on(None, 1 << 16)
    assert problem == ""
    first = read_machine(RealDisk()).allowed_nodes[0]
    refused = prefer_node(memory, first)
    nodes, unknown = page_nodes(memory, 16)
    if "not permitted" in refused + unknown or "not implemented" in refused + unknown:
        pytest.skip("a container may not ask")
    assert (refused, nodes) == ("", [-errno.ENOENT] * 16), "nobody has touched it"
    memory[: len(memory) // 2] = 1
    nodes, _ = page_nodes(memory, 16)
    assert nodes[:8] == [first] * 8
    memory[:] = 1
    assert page_nodes(memory, 1000)[0] == [first] * 1000
    assert misplaced(first, memory) == ""
    assert misplaced(first + 1, memory).startswith(f"memory of NUMA node {first + 1} cannot be had: 1024 of 1024 pages")
    assert prefer_node(memory, -1) == "there is no NUMA node -1"
    assert page_nodes(memory, 0) == ([], "")


def test_a_processor_that_cannot_be_had_is_why_it_could_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = msgspec.structs.replace(here(1), cores=((7000,),), allowed_cpus=(7000,), cpus=(7000,))
    monkeypatch.setattr(paths, "read_machine", lambda _: gone)
    (found,) = run.validate(["paths"], run.Load(0, "/tmp", None))
    assert found.could_not_run.startswith("OSError")


def test_a_slow_path_is_named_beside_its_peers() -> None:
    name = path_name("gpu0", "gpu1")
    peers = [NodeRecord(node=f"n{n}", model="m", seen_ns=1, figures={name: 3e11 + n * 1e9}) for n in range(16)]
    slow = NodeRecord(node="slow", model="m", seen_ns=1, figures={name: 2e10})
    (finding,) = compare_figures(slow, peers)
    assert finding.words.startswith(
        "gpu0_to_gpu1_bytes_per_s is 20,000,000,000, 93.5% below the median of 16 peers, 307,500,000,000"
    )
    assert not list(compare_figures(slow, peers[1:])), "fewer say nothing of one path of many"


def test_of_hundreds_of_slow_paths_a_few_are_told() -> None:
    figures = {path_name(f"gpu{a}", f"gpu{b}"): 1e9 for a in range(8) for b in range(8) if a != b}
    fast = dict.fromkeys(figures, 1e10)
    peers = [NodeRecord(node=f"n{n}", model="m", seen_ns=1, figures=fast) for n in range(16)]
    record = NodeRecord(node="slow", model="m", seen_ns=1, figures=figures)
    twice: dict[str, tuple[float, ...]] = dict.fromkeys(figures, (1e9, 1e9))
    events = run.events_of([Found(validator="gpu_paths", figures=figures, measured=twice)], record, peers, 2)
    assert len(events) == 16
    assert {event.severity for event in events} == {"low"}
    assert events[-1].words.endswith("; and 40 more")


# --- GPUs, on a stand-in of torch ---


class Tensor:
    def __init__(self, torch: FakeTorch, words: NDArray[np.int64], place: str) -> None:
        self._torch, self.words, self.place = torch, words, place

    def __mul__(self, factor: int) -> Tensor:
        return Tensor(self._torch, self.words * np.int64(factor), self.place)

    def zero_(self) -> None:
        self.words[:] = 0

    def copy_(self, other: Tensor, *, non_blocking: bool = False) -> None:
        self._torch.copies.append((other.place, self.place))
        np.copyto(self.words, other.words)
        if (other.place, self.place) == self._torch.bad:
            self.words[3] ^= 1


class FakeTorch:
    """What `gpu_paths` uses of torch, where GPUs are arrays."""

    int64 = np.int64

    def __init__(self, gpus: int, *, apart: Sequence[tuple[int, int]] = (), bad: tuple[str, str] = ("", "")) -> None:
        self.bad = bad
        self.copies: list[tuple[str, str]] = []
        self._pinned: Iterator[int] = iter(range(100))
        self.cuda = SimpleNamespace(
            device_count=lambda: gpus,
            can_device_access_peer=lambda a, b: (a, b) not in apart,
            synchronize=lambda _device: None,
            get_device_properties=lambda device: SimpleNamespace(uuid=f"u{device}"),
        )

    def empty(self, words: int, *, dtype: Any, device: str = "", pin_memory: bool = False) -> Tensor:
        assert pin_memory or device
        return Tensor(self, np.empty(words, dtype), device or f"host{next(self._pinned) // 2}")

    def arange(self, words: int, *, dtype: Any, device: str) -> Tensor:
        return Tensor(self, np.arange(words, dtype=dtype), "computed")

    @staticmethod
    def equal(a: Tensor, b: Tensor) -> bool:
        return a.place == b.place and bool(np.array_equal(a.words, b.words))


def test_each_gpu_is_measured_with_each_numa_node_and_each_other_gpu() -> None:
    torch = FakeTorch(2, apart=[(1, 0)])
    found = cuda_paths.gpu_paths(torch, 0, machine=here(2), block_bytes=4096)
    assert sorted(found.figures) == sorted(
        f"{ends}_bytes_per_s"
        for ends in (
            "numa0_to_gpu0", "numa1_to_gpu0", "gpu0_to_numa0", "gpu0_to_numa1",
            "numa0_to_gpu1", "numa1_to_gpu1", "gpu1_to_numa0", "gpu1_to_numa1",
            "gpu0_to_gpu1", "gpu0_by_host_to_gpu1", "gpu1_by_host_to_gpu0",
        )
    )  # fmt: skip
    assert not found.faults
    assert ("cuda:1", "cuda:0") not in torch.copies, "the driver does not let GPU 1 reach GPU 0"


@pytest.mark.parametrize(
    ("bad", "said", "part"),
    [
        (("host1", "cuda:0"), {"numa1_to_gpu0"}, "gpu:0"),
        (("cuda:1", "host1"), {"gpu1_to_numa1"}, "gpu:1"),
        (("cuda:0", "cuda:1"), {"gpu0_to_gpu1"}, ""),
    ],
)
def test_a_block_that_changed_on_its_way_is_told_with_its_path(bad: tuple[str, str], said: set[str], part: str) -> None:
    found = cuda_paths.gpu_paths(FakeTorch(2, bad=bad), 0, machine=here(2), block_bytes=4096)
    assert {fault.words.partition(":")[0] for fault in found.faults} == said
    assert {(fault.part, fault.cause) for fault in found.faults} == {(part, "wrong_block")}
