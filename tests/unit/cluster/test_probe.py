"""What a machine answers when it is asked before a start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fireflyer.base.port_range import PortRange
from fireflyer.cluster.schema.addresses import AddressChoice
from fireflyer.cluster.schema.hosts import HostQuestion
from fireflyer.cluster.supervisor.remote import probe
from fireflyer.runtime.port_search import reserve_port


def question(directory: Path, **more: object) -> HostQuestion:
    base = {"workdir": str(directory), "script": "train.py", "kind": "script", "run_dir": str(directory / "run")}
    return HostQuestion(**base, mark="mark", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("marked", "shares"), [((), False), (("run",), False), (("kept",), False), (("run", "kept"), True)]
)
def test_a_machine_shares_directories_only_if_it_finds_the_mark_in_each(
    tmp_path: Path, marked: tuple[str, ...], shares: bool
) -> None:
    for name in ("run", "kept"):
        (tmp_path / name).mkdir()
    for name in marked:
        (tmp_path / name / "mark").touch()
    assert probe(question(tmp_path, stream_dir=str(tmp_path / "kept"))).shares_run_dir is shares
    assert probe(question(tmp_path)).shares_run_dir is ("run" in marked)


def test_a_machine_tells_the_address_that_is_asked_for_or_why_it_has_none(tmp_path: Path) -> None:
    facts = probe(question(tmp_path, addresses=AddressChoice("lo", "127.0.0.0/8")))
    assert (facts.interface, facts.address, facts.no_address) == ("lo", "127.0.0.1", "")
    facts = probe(question(tmp_path, addresses=AddressChoice("none0")))
    assert (facts.interface, facts.address) == ("", "")
    assert facts.no_address.startswith("has no address of --interface none0; it has ")
    facts = probe(question(tmp_path))
    assert (facts.interface, facts.address, facts.no_address) == ("", "", "")


def test_a_machine_counts_the_ports_that_a_listener_could_have_and_takes_none(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reserved = reserve_port(port + 1)
        assert reserved is not None
        with reserved:
            ports = PortRange(port, port + 1)
            facts = probe(question(tmp_path, ports=ports, ports_needed=2, master_port=port))
            assert (facts.free_ports, facts.master_port_taken) == (0, True)
        wide = PortRange(port, min(65535, port + 200))
        assert probe(question(tmp_path, ports=wide, ports_needed=3)).free_ports == 3
        again = reserve_port(port + 1)
        assert again is not None, "counting has left a reservation"
        again.close()
    facts = probe(question(tmp_path, ports=PortRange(port, port), ports_needed=2, master_port=port))
    assert (facts.free_ports, facts.master_port_taken) == (1, False)


def test_a_machine_tries_to_reach_the_launcher(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        port = launcher.getsockname()[1]
        assert probe(question(tmp_path, control_port=port)).launcher_not_reached == ""
        assert probe(question(tmp_path, control_port=port, control_address="127.0.0.1")).launcher_not_reached == ""
    said = probe(question(tmp_path, control_port=port, control_address="127.0.0.1")).launcher_not_reached
    assert said == f"127.0.0.1:{port} (Connection refused)"
    assert probe(question(tmp_path)).launcher_not_reached == ""
