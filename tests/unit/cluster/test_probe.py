"""What a machine answers when it is asked before a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from fireflyer.cluster.schema.addresses import AddressChoice
from fireflyer.cluster.schema.hosts import HostQuestion
from fireflyer.cluster.supervisor.remote import probe


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
