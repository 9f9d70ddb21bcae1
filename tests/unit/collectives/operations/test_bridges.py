"""Pairs of bridged GPUs: from recorded topologies, by brute force, and where nothing can be known."""

from __future__ import annotations

import itertools
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.collectives.thread_ranks import together
from torch.distributed import HashStore  # type: ignore[attr-defined] # the stub lists what is public by other means

from fireflyer.base.errors import UsageError
from fireflyer.collectives import torch_join
from fireflyer.collectives.devices.bridges import MAX_RANKS, Report, decide, links_of, match
from fireflyer.collectives.torch import bridges

BRIDGED = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNODE\tNV12\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNODE\t X \tSYS\tNV12\tNODE\t0-31\t0\t\tN/A
GPU2\tNV12\tSYS\t X \tNODE\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tNV12\tNODE\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tNODE\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
"""Cards on PCIe, each bridged to one of the other socket."""

CUBE_MESH = """\
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7    CPU Affinity
GPU0     X      NV1     NV1     NV2     NV2     SYS     SYS     SYS     0-19,40-59
GPU1    NV1      X      NV2     NV1     SYS     NV2     SYS     SYS     0-19,40-59
GPU2    NV1     NV2      X      NV2     SYS     SYS     NV1     SYS     0-19,40-59
GPU3    NV2     NV1     NV2      X      SYS     SYS     SYS     NV1     0-19,40-59
GPU4    NV2     SYS     SYS     SYS      X      NV1     NV1     NV2     20-39,60-79
GPU5    SYS     NV2     SYS     SYS     NV1      X      NV2     NV1     20-39,60-79
GPU6    SYS     SYS     NV1     SYS     NV1     NV2      X      NV2     20-39,60-79
GPU7    SYS     SYS     SYS     NV1     NV2     NV1     NV2      X      20-39,60-79
"""
"""Eight cards with one or two links to four others."""

NO_LINKS = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPHB\t0-63\t0\t\tN/A
GPU1\tPHB\t X \t0-63\t0\t\tN/A
"""

Matrix = list[list[int]]


def matrix(topology: str, gpus: int) -> Matrix:
    names = [str(number) for number in range(gpus)]
    links = links_of(topology, names)
    return [[links[one].get(other, 0) for other in names] for one in names]


@pytest.mark.parametrize(
    ("topology", "gpus", "pairs"),
    [
        (BRIDGED, 4, [(0, 2), (1, 3)]),
        (CUBE_MESH, 8, [(0, 3), (1, 2), (4, 7), (5, 6)]),
        (NO_LINKS, 2, []),
    ],
    ids=["bridges", "cube mesh", "no links"],
)
def test_pairs_of_recorded_topologies(topology: str, gpus: int, pairs: list[tuple[int, int]]) -> None:
    links = matrix(topology, gpus)
    assert match(links) == pairs
    assert all(links[one][other] == max(links[one]) for one, other in pairs)


def test_a_switch_that_links_all_to_all_gives_neighbours_and_the_odd_one_stays_alone() -> None:
    all_to_all = [[0 if one == other else 12 for other in range(16)] for one in range(16)]
    assert match(all_to_all) == [(number, number + 1) for number in range(0, 16, 2)]
    assert match([row[:5] for row in all_to_all[:5]]) == [(0, 1), (2, 3)]


def test_a_greedy_choice_would_leave_two_alone() -> None:
    line = [[0, 1, 0, 0], [1, 0, 9, 0], [0, 9, 0, 1], [0, 0, 1, 0]]
    assert match(line) == [(0, 1), (2, 3)]


@given(st.integers(0, 6).flatmap(lambda n: st.lists(st.sampled_from([0, 0, 1, 2, 4]), min_size=n * n, max_size=n * n)))
def test_no_other_choice_has_more_pairs_or_more_links(numbers: list[int]) -> None:
    size = int(len(numbers) ** 0.5)
    links = [[numbers[min(i, j) * size + max(i, j)] if i != j else 0 for j in range(size)] for i in range(size)]
    edges = [(i, j) for i in range(size) for j in range(i + 1, size) if links[i][j] > 0]

    def worth(pairs: tuple[tuple[int, int], ...] | list[tuple[int, int]]) -> tuple[int, int]:
        return len(pairs), sum(links[i][j] for i, j in pairs)

    choices = [
        chosen
        for count in range(size // 2 + 1)
        for chosen in itertools.combinations(edges, count)
        if len({place for pair in chosen for place in pair}) == 2 * count
    ]
    found = match(links)
    assert set(found) <= set(edges)
    assert len({place for pair in found for place in pair}) == 2 * len(found)
    assert worth(found) == max(map(worth, choices))


def reports(links: Matrix, *, blind: int = -1) -> list[Report]:
    """`blind` does not see the others' GPUs."""
    names = [f"gpu {number}" for number in range(len(links))]
    return [
        Report(
            name,
            {other: count for other, count in zip(names, row, strict=True) if count},
            () if number == blind else tuple(other for other in names if other != name),
        )
        for number, (name, row) in enumerate(zip(names, links, strict=True))
    ]


def test_a_group_has_pairs_where_every_rank_of_every_node_has_a_partner() -> None:
    both = reports(matrix(BRIDGED, 4)) * 2  # two nodes with the same cards
    assert decide(both, [0] * 4 + [1] * 4).pairs == ((0, 2), (1, 3), (4, 6), (5, 7))
    decision = decide(both[:7], [0] * 4 + [1] * 3)
    assert decision.pairs == ()
    assert "rank 5 (node 1) has no partner" in decision.reason


def test_ranks_that_share_a_gpu_are_pairs_before_all_others() -> None:
    two = reports([[0, 4], [4, 0]])
    assert decide([two[0], two[1], two[0], two[1]], [0] * 4).pairs == ((0, 2), (1, 3))
    assert decide([two[0], two[0], two[0]], [0] * 3).pairs == ()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (reports(matrix(BRIDGED, 4), blind=3), "rank 1 (node 0) has no partner"),
        (reports(matrix(NO_LINKS, 2)), "rank 0 (node 0) has no partner"),
        (
            [*reports([[0, 1], [1, 0]])[:1], Report(problem="no driver")],
            "NVLink bridges of rank 1 are unknown: no driver",
        ),
        (reports([[1] * (MAX_RANKS + 1)] * (MAX_RANKS + 1)), "17 ranks; pairs are only sought among up to 16"),
    ],
)
def test_without_pairs_the_reason_is_told(found: list[Report], reason: str) -> None:
    decision = decide(found, [0] * len(found))
    assert decision.pairs == ()
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("topology", "gpus"),
    [("", 1), (BRIDGED, 3), (BRIDGED, 0), (BRIDGED.replace("GPU3\tSYS", "GPU9\tSYS"), 4), ("\tGPU0\nGPU0\tNV1\n", 1)],
)
def test_a_table_that_makes_no_sense_is_refused(topology: str, gpus: int) -> None:
    with pytest.raises(UsageError):
        links_of(topology, [str(number) for number in range(gpus)])


# --- the probe; no machine with a GPU has run it ---


def test_a_process_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert bridges.probe().problem == "its process has no CUDA device"


def test_the_driver_is_asked_by_its_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a command of that name that prints what was recorded; what CUDA says is out of reach here."""
    command = tmp_path / "nvidia-smi"
    command.write_text(f'#!/bin/sh\n[ "$1" = topo ] || exit 9\ncat <<"END"\n{BRIDGED}END\n', encoding="utf-8")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert links_of(bridges._answer("topo", "-m"), ["a", "b", "c", "d"])["a"] == {"c": 12}
    with pytest.raises(UsageError, match="nvidia-smi --query-gpu=uuid exited with code 9"):
        bridges._answer("--query-gpu=uuid")


def test_ranks_that_know_nothing_agree_on_no_pairs() -> None:
    found = together([0, 0, 1], bridges.find_pairs)
    assert [decision.pairs for decision in found] == [()] * 3
    assert len({decision.reason for decision in found}) == 1


def test_ranks_tell_each_other_what_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    known = iter(reports([[0, 4], [4, 0]]))
    monkeypatch.setattr(bridges, "probe", lambda: next(known))
    assert [decision.pairs for decision in together([0, 0], bridges.find_pairs)] == [((0, 1),)] * 2


def test_a_group_of_torch_goes_without_pairs_where_none_are_found() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    joined = torch_join.join(
        HashStore(),
        rank=0,
        world_size=1,
        name="alone",
        timeout=timedelta(seconds=30),
        options=torch_join.HfreduceOptions(nvlink_pairs="auto"),
    )
    joined.communicator.close()
    with pytest.raises(UsageError, match="nvlink_pairs 'all' is not known"):
        torch_join.HfreduceOptions(nvlink_pairs="all")  # type: ignore[arg-type] # the subject
