"""Hosts and ranks of `ff run`: from --hosts, and from the Slurm allocation around it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.cli.jobs.hosts import JobHosts, hosts_of
from fireflyer.cli.jobs.slurm import notice_of_allocation
from fireflyer.cli.jobs.torchrun import NodeCount
from fireflyer.cluster.schema.hosts import expand_counts

ALLOCATION = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2],m", "SLURM_TASKS_PER_NODE": "1(x3)"}
NOTICE = "hosts: the 3 nodes of Slurm job 12; for this machine alone give --standalone"


def found(
    text: str | None, ranks: int | None = None, environ: dict[str, str] = ALLOCATION, nodes: NodeCount | None = None
) -> JobHosts:
    return hosts_of(text, spares=0, nodes=nodes, ranks_per_node=ranks, joining=False, environ=environ)


@pytest.mark.parametrize(
    ("text", "given", "ranks"),
    [
        ("a,b", None, 1),
        ("a,b", 4, 4),
        ("a,b:8", None, 8),
        ("a:8,b,c", None, 8),
        ("a:8,b:8", None, 8),
        ("a,b:8", 8, 8),
    ],
)
def test_a_host_without_a_number_has_the_number_of_the_others(text: str, given: int | None, ranks: int) -> None:
    hosts = found(text, given)
    assert (hosts.ranks_per_node, hosts.nodes.most) == (ranks, len(text.split(",")))


@pytest.mark.parametrize(
    ("text", "given", "ranks"),
    [
        ("a:8,b:4", None, (8, 4)),
        ("a:8,b:4", 4, (8, 4)),
        ("a:8,b", 4, (8, 4)),
        ("a,b:8", 1, (1, 8)),
        ("a:4,b:8,c", 2, (4, 8, 2)),
    ],
)
def test_hosts_may_have_different_numbers_of_ranks(text: str, given: int | None, ranks: tuple[int, ...]) -> None:
    hosts = found(text, given)
    assert (hosts.host_ranks, hosts.ranks_per_node) == (ranks, max(ranks))


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        (
            "a:4,b:8,c",
            None,
            "--hosts gives c no number of ranks, and the others have different ones; give --ranks-per-node N, for "
            "hosts without a number",
        ),
        (
            "a:8,b:8",
            4,
            "--ranks-per-node 4 contradicts --hosts, which gives each host its number; leave one of them out",
        ),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(text: str, ranks: int | None, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        found(text, ranks)
    assert str(refused.value) == said


def test_one_node_that_was_asked_for_is_not_two_hosts() -> None:
    with pytest.raises(UsageError, match="--nodes 1 and 2 --hosts with 0 --spares do not fit together"):
        found("a,b", nodes=NodeCount(1, 0))


@pytest.mark.parametrize(
    ("more", "given", "ranks"),
    [
        ({}, None, 1),
        ({"SLURM_TASKS_PER_NODE": "4(x3)"}, None, 4),
        ({"SLURM_GPUS_ON_NODE": "8"}, None, 8),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "2"}, None, 2),
        ({"SLURM_GPUS_ON_NODE": "8"}, 3, 3),
        ({"SLURM_TASKS_PER_NODE": "4,2(x2)"}, 2, 2),
        ({"SLURM_TASKS_PER_NODE": ""}, None, 1),
    ],
)
def test_an_allocation_has_hosts_and_says_how_many_ranks_each_has(
    more: dict[str, str], given: int | None, ranks: int
) -> None:
    assert found("slurm", given, ALLOCATION | more) == JobHosts(("n1", "n2", "m"), NodeCount(3, 0), ranks)


def test_an_allocation_may_have_different_numbers_of_tasks_on_its_nodes() -> None:
    hosts = found("slurm", environ=ALLOCATION | {"SLURM_TASKS_PER_NODE": "4,2(x2)"})
    assert hosts == JobHosts(("n1", "n2", "m"), NodeCount(3, 0), 4, (4, 2, 2))


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "--hosts slurm: SLURM_JOB_NODELIST is not set; start ff run inside of an allocation"),
        (
            ALLOCATION | {"SLURM_TASKS_PER_NODE": "4,2(x3)"},
            "SLURM_TASKS_PER_NODE=4,2(x3) has numbers for 4 nodes, and the allocation has 3; give --ranks-per-node N",
        ),
        (ALLOCATION | {"SLURM_NTASKS_PER_NODE": "two"}, "the counts 'two' of Slurm are not understood"),
    ],
)
def test_an_allocation_that_does_not_say_it_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        found("slurm", environ=environ)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("more", "notice"),
    [
        ({}, NOTICE),
        ({"SLURM_STEP_ID": "4294967290"}, NOTICE),  # the shell of salloc
        ({"SLURM_STEP_ID": "4294967291"}, NOTICE),  # the script of sbatch
        ({"SLURM_STEP_ID": "0"}, ""),  # a program of srun
        ({"SLURM_JOB_NODELIST": "n1"}, ""),
        ({"SLURM_JOB_NODELIST": ""}, ""),
        ({"SLURM_JOB_ID": ""}, ""),
    ],
)
def test_hosts_that_nobody_named_are_those_of_an_allocation_of_several_nodes(more: dict[str, str], notice: str) -> None:
    assert notice_of_allocation(ALLOCATION | more) == notice


@given(st.text("0123456789(x),", max_size=30))
def test_any_counts_are_expanded_or_refused(text: str) -> None:
    try:
        counts = expand_counts(text)
    except UsageError:
        return
    assert counts
    assert all(0 < count < 10_000 for count in counts)
