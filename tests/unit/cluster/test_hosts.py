"""Names of hosts on the command line and in Slurm's lists; what makes a host unfit."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.jobs.hosts import hosts_of
from fireflyer.cli.jobs.torchrun import NodeCount, NodeRange
from fireflyer.cluster.core.facts import MAX_SKEW_NS, Answer, HostRequirements, faults_of, mixed_addresses, same_machine
from fireflyer.cluster.core.hosts import SILENT_NS, Hosts
from fireflyer.cluster.core.states import Node
from fireflyer.cluster.schema.hosts import Host, HostFacts, expand_nodelist, parse_hosts
from fireflyer.cluster.schema.job import JobSpec

FACTS = HostFacts(
    version="1.0", python="3.11.2", hostname="a", boot_id="x", namespace="net:[1]", uid=0, cores=2, gpus=0,
    has_workdir=True, script_sha256="ab", has_script=True, shares_run_dir=False, client="", server="", time_ns=1000,
    free_ports=4,
)  # fmt: skip
REQUIRED = HostRequirements(
    version="1.0", python="3.11.9", workdir="/work", script="train.py", kind="script", script_sha256="ab", ranks=2,
    ranks_per_core=16, devices="auto", ports="29500-29507", ports_needed=4, master_port=29500,
)  # fmt: skip


def test_a_host_may_have_any_uid_and_no_absurd_number() -> None:
    """Domains give numbers of ten digits."""
    facts = msgspec.structs.replace(FACTS, uid=2_000_200_001)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=HostFacts) == facts
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(FACTS, uid=1 << 32)), type=HostFacts)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", (Host("a"),)),
        ("a,b:8", (Host("a"), Host("b", 8))),
        ("10.0.0.1:4,[fd00::1]:4,[fd00::2]", (Host("10.0.0.1", 4), Host("fd00::1", 4), Host("fd00::2"))),
        ("trainer@node-1.example.org", (Host("trainer@node-1.example.org"),)),
    ],
)
def test_hosts_are_names_or_addresses_each_perhaps_with_ranks(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "a:0", "a:x", "-oProxyCommand=x", "a b", "a;b", "$(x)", "a,a", "a:4097"]
)
def test_what_is_no_host_is_refused(text: str) -> None:
    """Also what ssh would take for an option."""
    with pytest.raises(UsageError):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[01-03,7],gpu-a", ("n01", "n02", "n03", "n7", "gpu-a")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
    ],
)
def test_lists_of_slurm_are_expanded(text: str, names: tuple[str, ...]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "n[", "n]", "n[1-", "n[3-1]", "n[a]", "n[[1]]", "n[1-9999999]", "a,,b"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expand_nodelist(text)


@given(st.text("n0123[]-,", max_size=30))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        names = expand_nodelist(text)
    except UsageError:
        return
    assert names
    assert all(names)
    assert not any(character in name for name in names for character in "[],")


def faults(**changes: object) -> list[str]:
    facts = msgspec.structs.replace(FACTS, **changes)
    return faults_of(Answer(facts, 900, 1100), REQUIRED)


def test_a_host_that_has_everything_is_fit() -> None:
    assert faults() == []
    assert faults(time_ns=900 - MAX_SKEW_NS) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "1.1"}, "has Fire-Flyer 1.1, and this machine 1.0"),
        ({"python": "3.12.1"}, "has Python 3.12.1, and this machine 3.11.9"),
        ({"has_workdir": False}, "has no directory /work"),
        ({"has_script": False}, "has no script train.py in /work"),
        ({"script_sha256": "cd"}, "has another train.py"),
        ({"gpus": 1}, "has 1 GPUs for 2 ranks"),
        ({"time_ns": 900 - MAX_SKEW_NS - 1}, "has a clock that differs by 5 s"),
        ({"time_ns": 1100 + 2 * MAX_SKEW_NS}, "has a clock that differs by 10 s"),
        ({"free_ports": 3}, "has 3 free ports of 29500-29507 (--port-range), and needs 4"),
        ({"master_port_taken": True}, "has another process at MASTER_PORT 29500"),
        (
            {"launcher_not_reached": "10.0.0.1:4000 (No route to host)\n"},
            "does not reach the launcher at 10.0.0.1:4000 ",
        ),
        ({"no_address": "has no address of --interface eth1; it has none"}, "has no address of --interface eth1"),
        ({"server": "fe80::2%eth0"}, "was reached at a link-local address (fe80::2%eth0)"),
        ({"server": "fd00::2", "client": "fe80::1%eth0"}, "was reached at a link-local address"),
    ],
)
def test_each_fault_is_one_line_that_says_what_to_do(changes: dict[str, object], said: str) -> None:
    (fault,) = faults(**changes)
    assert fault.startswith(said)
    assert "; " in fault


def test_all_faults_of_a_host_are_told() -> None:
    assert len(faults(version="0", python="2.7.1", has_workdir=False, time_ns=10**18)) == 4


def test_a_link_local_address_over_which_nothing_goes_is_no_fault() -> None:
    facts = msgspec.structs.replace(FACTS, server="fe80::2%eth0", client="fe80::1%eth0", address="10.0.0.2")
    required = msgspec.structs.replace(REQUIRED, knows_control_address=True)
    assert faults_of(Answer(facts, 900, 1100), required) == []


def test_what_another_machine_says_of_its_addresses_cannot_control_the_terminal() -> None:
    assert faults(no_address="has \x1b[2Jno; \n") == ["has [2Jno; "]


def test_addresses_of_one_job_are_all_ipv4_or_all_ipv6() -> None:
    assert mixed_addresses({"a": ("10.0.0.1",), "b": ("10.0.0.2",), "c": ()}) == []
    ((host, fault),) = mixed_addresses({"a": (), "b": ("10.0.0.2",), "c": ("fd00::3",), "d": ("10.0.0.4",)})
    assert host == "c"
    assert fault == "has fd00::3, and b has 10.0.0.2: all need IPv4, or all IPv6; choose with --subnet"


def test_machines_of_one_job_have_addresses_in_as_many_networks() -> None:
    two = ("10.0.0.1", "10.1.0.1")
    assert mixed_addresses({"a": two, "b": ("10.0.0.2", "10.1.0.2")}) == []
    assert mixed_addresses({"a": two, "b": ("10.0.0.2",)}) == [
        ("b", "has 1 of the networks (10.0.0.2), and a has 2; name as many on each machine (--interface, --subnet)")
    ]
    ((host, fault),) = mixed_addresses({"a": two, "b": ("10.0.0.2", "fd00::2")})
    assert host == "b"
    assert fault.startswith("has fd00::2, and a has 10.0.0.1: all need IPv4, or all IPv6")


def test_two_names_of_one_machine_are_found() -> None:
    other = msgspec.structs.replace(FACTS, namespace="net:[2]")
    assert same_machine({"a": FACTS, "b": other, "c": FACTS}) == [("a", "c")]
    unknown = msgspec.structs.replace(FACTS, boot_id="")
    assert same_machine({"a": unknown, "b": unknown}) == []


@pytest.mark.parametrize(
    ("nodes", "spares", "there"),
    [
        ("2:4", 0, ("2:4", 4)),
        ("2:4", 1, ("2:3", 4)),
        ("2:8", 0, ("2:4", 4)),
        ("2:3", 0, ("2:3", 4)),
        ("4:6", 0, ("4", 4)),
        ("4:4", 0, ("4", 4)),
        (None, 1, ("3", 4)),
    ],
)
def test_a_range_of_nodes_takes_what_hosts_there_are(nodes: str | None, spares: int, there: tuple[str, int]) -> None:
    count = None if nodes is None else NodeRange().convert(nodes, None, None)
    found = hosts_of("a,b,c,d", spares=spares, nodes=count, ranks_per_node=1, joining=False)
    assert (str(found.nodes), len(found.names)) == there


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("5:6", "--nodes 5:6 and 4 --hosts with 0 --spares do not fit together; give more hosts, or a smaller range"),
        ("3", "--nodes 3 and 4 --hosts with 0 --spares do not fit together; leave --nodes out"),
    ],
)
def test_a_range_above_the_hosts_is_refused(nodes: str, said: str) -> None:
    count = NodeRange().convert(nodes, None, None)
    with pytest.raises(UsageError, match=said):
        hosts_of("a,b,c,d", spares=0, nodes=count, ranks_per_node=1, joining=False)


def test_of_machines_that_join_there_are_as_many_as_the_job_may_have_and_the_spares() -> None:
    found = hosts_of(None, spares=1, nodes=NodeCount(3, 2), ranks_per_node=1, joining=True)
    assert (found.nodes, found.names[-1]) == (NodeCount(3, 2), "machine 3")


def job_on(*, nodes: int, least: int, hosts: int) -> tuple[Hosts, list[Node]]:
    names = tuple(f"h{number}" for number in range(hosts))
    spec = JobSpec(script="x.py", run_dir="/run", nodes=nodes, min_nodes=least, hosts=names)
    return Hosts(spec), [Node(number, host=number, renewed_ns=0) for number in range(nodes)]


@pytest.mark.parametrize(
    ("nodes", "least", "hosts", "members"),
    [
        (3, 2, 3, (0, 2)),  # the job can do without it
        (2, 0, 3, (0, 2)),  # a spare is there
        (3, 0, 3, (0, 2, 1)),  # nothing but the suspect is left
        (3, 3, 4, (0, 2, 3)),
    ],
)
def test_a_suspect_host_is_avoided_where_others_are_enough(
    nodes: int, least: int, hosts: int, members: tuple[int, ...]
) -> None:
    known, all_nodes = job_on(nodes=nodes, least=least, hosts=hosts)
    known.suspect(1)
    known.begin_attempt(all_nodes)
    assert known.members() == members
    assert known.none_left(all_nodes) is None


def test_a_host_that_is_suspect_twice_is_left_out() -> None:
    known, nodes = job_on(nodes=2, least=0, hosts=2)
    known.suspect(1)
    known.suspect(1)
    assert "no host is left for node 1: h1 failed 2 times" in str(known.none_left(nodes))


def test_a_silent_host_without_which_the_job_cannot_go_on_is_waited_for_once() -> None:
    known, nodes = job_on(nodes=2, least=0, hosts=2)
    start_ns = known.start_limit_ns(1)
    known.silent(1, 5 * SECOND)
    assert known.start_limit_ns(1) == SILENT_NS < start_ns
    known.absent(1, 5 * SECOND + SILENT_NS - 1)
    assert known.none_left(nodes) is None
    known.begin_attempt(nodes)
    known.absent(1, 5 * SECOND + SILENT_NS)
    assert known.none_left(nodes) == (
        "no host is left for node 1: h1 was lost, did not answer for 20.0 s after its lease, and there is no spare; "
        "repair it, or give more hosts (--hosts, --spares)"
    )


def test_a_silent_host_that_comes_back_is_a_host_like_any_other() -> None:
    known, nodes = job_on(nodes=2, least=0, hosts=2)
    known.silent(1, 0)
    known.is_up(1)
    known.absent(1, 100 * SECOND)
    assert known.none_left(nodes) is None


def test_a_silent_host_is_not_given_up_where_the_others_are_enough() -> None:
    known, nodes = job_on(nodes=3, least=2, hosts=3)
    known.silent(1, 0)
    known.absent(1, 100 * SECOND)
    assert known.members() == (0, 2)
    assert known.none_left(nodes) is None
    known.silent(2, 0)
    known.absent(2, 100 * SECOND)
    assert "2 of 3 hosts are left" not in str(known.none_left(nodes))


def test_a_host_that_is_absent_is_passed_over_and_tried_again_in_the_next_attempt() -> None:
    known, nodes = job_on(nodes=3, least=2, hosts=3)
    known.absent(0, 0)
    assert known.members() == (1, 2)
    known.begin_attempt(nodes)
    assert known.members() == (1, 2, 0)
    known.is_up(0)
    known.begin_attempt(nodes)
    assert known.members() == (0, 1, 2)
