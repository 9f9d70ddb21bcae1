"""Which of a machine's addresses a job uses, and what is told where it has none."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.cli.jobs.network import read_addresses, refuse_link_local
from fireflyer.cluster.core.facts import Answer
from fireflyer.cluster.launcher.preflight import HostsRefused, check_joined, settings_for_hosts
from fireflyer.cluster.schema.addresses import AddressChoice, is_link_local
from fireflyer.cluster.schema.hosts import HostQuestion, parse_hosts
from fireflyer.cluster.schema.job import JobSpec
from fireflyer.cluster.supervisor.remote import probe
from fireflyer.runtime.interfaces import own_addresses

FOUND = [
    ("lo", "127.0.0.1"), ("eth0", "10.0.0.3"), ("eth1", "fe80::3"), ("eth1", "fd00::3"), ("eth1", "10.1.0.3"),
    ("eth1", "10.2.0.3"), ("ib0", "fd00:1::3"), ("ib1", "fe80::5"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (AddressChoice("eth0"), ("eth0", "10.0.0.3")),
        (AddressChoice("eth1"), ("eth1", "10.1.0.3")),
        (AddressChoice("eth1", "10.2.0.0/16"), ("eth1", "10.2.0.3")),
        (AddressChoice("eth1", "fd00::/16"), ("eth1", "fd00::3")),
        (AddressChoice("", "10.0.0.9/8"), ("eth0", "10.0.0.3")),
        (AddressChoice("", "fd00:1::/64"), ("ib0", "fd00:1::3")),
        (AddressChoice("", "fd00::/8"), ("eth1", "fd00::3")),
        (AddressChoice("ib0"), ("ib0", "fd00:1::3")),
        (AddressChoice("lo"), ("lo", "127.0.0.1")),
        (AddressChoice("eth"), None),
        (AddressChoice("eth0", "10.1.0.0/16"), None),
        (AddressChoice("ib1"), None),
    ],
)
def test_an_address_is_chosen_by_interface_and_subnet(choice: AddressChoice, chosen: tuple[str, str] | None) -> None:
    assert choice.choose(FOUND) == chosen


def test_a_machine_without_such_an_address_says_which_it_has() -> None:
    assert AddressChoice("eth9").fault(FOUND[:4]) == (
        "has no address of --interface eth9; it has 10.0.0.3 (eth0), fd00::3 (eth1)"
    )
    assert AddressChoice("ib1").fault(FOUND[-1:]) == (
        "has only a link-local address of --interface ib1; it has none that other machines can use"
    )
    many = [("eth0", f"10.0.0.{number}") for number in range(200)]
    assert len(AddressChoice("eth9", "10.9.0.0/16").fault(many)) < 300


def test_several_networks_are_chosen_in_order_by_interfaces_or_by_subnets() -> None:
    both = [("eth1", "10.1.0.3"), ("eth0", "10.0.0.3")]
    assert AddressChoice("eth1,eth0").choose_all(FOUND) == both
    assert AddressChoice(subnet="10.1.0.0/16,10.0.0.0/16").choose_all(FOUND) == both
    assert AddressChoice("eth1", "10.1.0.0/16").choose_all(FOUND) == both[:1]
    assert AddressChoice().choose_all(FOUND) == []


def test_the_network_that_a_machine_lacks_is_named() -> None:
    choice = AddressChoice("eth0,eth9")
    assert choice.choose_all(FOUND) == [("eth0", "10.0.0.3")]
    assert choice.fault(FOUND).startswith("has no address of --interface eth9; it has ")
    same = AddressChoice(subnet="10.0.0.0/8,10.0.0.0/16")
    assert len(same.choose_all(FOUND)) == 1
    assert same.fault(FOUND).startswith("has one address for several networks of --subnet 10.0.0.0/8,10.0.0.0/16; it")


@pytest.mark.parametrize(
    ("interface", "subnet", "said"),
    [
        ("eth0,eth0", "", "--interface eth0,eth0 names one twice; each network is used once"),
        ("eth0,", "", "--interface '' is no name of a network interface"),
        ("", "10.0.0.0/16,x", "--subnet 'x' is not understood"),
        ("eth0,eth1", "10.0.0.0/16,10.1.0.0/16", "--interface and --subnet both name several networks"),
        (",".join(f"eth{number}" for number in range(9)), "", "names 9 networks; a job uses at most 8"),
        ("eth 1", "", "--interface 'eth 1' is no name of a network interface"),
        ("x" * 16, "", "is no name of a network interface"),
        ("", "10.0.0.0/33", "--subnet '10.0.0.0/33' is not understood; write it like 10.0.0.0/16"),
        ("", "eth1", "--subnet 'eth1' is not understood"),
        ("", "fe80::/64", "--subnet fe80::/64 is link-local"),
    ],
)
def test_what_is_no_choice_is_refused(interface: str, subnet: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        AddressChoice(interface, subnet)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_choice_needs_several_machines() -> None:
    assert not read_addresses("", "", several=False)
    with pytest.raises(UsageError, match="--interface eth1 needs --hosts or --rdzv-endpoint"):
        read_addresses("eth1", "", several=False)


@pytest.mark.parametrize("host", ["fe80::1", "[fe80::1]", "fe80::1%eth0", "[FE80::1%25]", "febf::"])
def test_link_local_addresses_are_refused_in_one_line(host: str) -> None:
    assert is_link_local(host)
    with pytest.raises(UsageError, match="is a link-local address"):
        refuse_link_local("--rdzv-endpoint", host)
    with pytest.raises(UsageError, match="is a link-local address, which other hosts cannot use"):
        parse_hosts(f"a,{host if host.startswith('[') else f'[{host}]'}:8")


@pytest.mark.parametrize("host", ["a", "fe80", "10.0.0.1", "169.254.0.1", "fd00::1", "fec0::1", "::1", ""])
def test_others_are_not(host: str) -> None:
    assert not is_link_local(host)
    refuse_link_local("--rdzv-endpoint", host)


def test_the_address_of_this_machine_is_not_that_of_others() -> None:
    assert settings_for_hosts({"FF_ADDRESS": "10.0.0.1", "FF_PIN": "0", "HOME": "/"}) == {"FF_PIN": "0"}


def test_machines_that_join_and_the_launchers_have_addresses_of_one_family(tmp_path: Path) -> None:
    spec = JobSpec(
        script="x", kind="program", run_dir=str(tmp_path), nodes=2, hosts=("machine 0", "machine 1"),
        addresses=AddressChoice(subnet="127.0.0.0/8"),
    )  # fmt: skip
    facts = msgspec.structs.replace(
        probe(HostQuestion(workdir="/", script="sh", kind="program", run_dir="/", mark="m")), boot_id="another"
    )
    same = msgspec.structs.replace(facts, address="10.0.0.2", interface="eth1")
    machines = check_joined(
        spec, {1: Answer(same, same.time_ns, same.time_ns)}, {1: "10.9.0.2"}, here="a", run_dir=str(tmp_path)
    )
    assert [(one.address, one.launcher, one.interface) for one in machines.values()] == [
        ("127.0.0.1", "a", "lo"),
        ("10.0.0.2", "a", "eth1"),
    ]
    other = msgspec.structs.replace(facts, address="fd00::2", interface="eth1")
    with pytest.raises(HostsRefused) as refused:
        check_joined(
            spec, {1: Answer(other, other.time_ns, other.time_ns)}, {1: "10.9.0.2"}, here="a", run_dir=str(tmp_path)
        )
    assert refused.value.rows == [
        ("machine 1", "has fd00::2, and machine 0 has 127.0.0.1: all need IPv4, or all IPv6; choose with --subnet")
    ]


def test_the_kernel_tells_all_addresses_of_this_machine() -> None:
    found = own_addresses()
    assert ("lo", "127.0.0.1") in found
    assert {name for name, _ in found} <= {name for _, name in socket.if_nameindex()}
    for _, address in found:
        if not is_link_local(address):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            socket.create_server((address, 0), family=family).close()
