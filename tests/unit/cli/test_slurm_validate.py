"""`ff health slurm validate`: a drained node of Slurm is validated by itself, serves again, or has its next remedy."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from tests.unit.cli.test_health_slurm import RAID, XID, Capture, Slurm, cluster, kept, node, remembers, shown, slurm

from fireflyer.base.health_event import HealthEvent
from fireflyer.cli.health import slurm_validate
from fireflyer.cluster.agent.health_program import Printed, run_health_program
from fireflyer.cluster.core.slurm.drains import drain_reason

__all__ = ["cluster", "node"]  # fixtures

SLOW = HealthEvent(
    check="cpu_stress", severity="low", cause="cpu_gemm_flop_per_s", words="80 % below its peers", seen_ns=1
)
OTHER = msgspec.structs.replace(XID, check="site_event", cause="", severity="low")
WELL = HealthEvent(check="memory", severity="ok", words="as written", seen_ns=1)


def drained(cluster: Slurm, fault: HealthEvent = XID) -> None:
    cluster.set(state="drained", shown="IDLE+DRAIN", reason=drain_reason("me", fault))


def validates(node: Path, *events: HealthEvent, code: int) -> int:
    """The exit code, of validators that print these events and end with `code`."""
    (node / "said.jsonl").write_text("".join(f"{msgspec.json.encode(event).decode()}\n" for event in events))
    program = node / "validators.sh"
    program.write_text(f"#!/bin/sh\necho run >> {node}/validated\n/bin/cat {node}/said.jsonl\nexit {code}\n")
    program.chmod(0o755)
    return slurm(node, "validate", "--", str(program))


def ran(node: Path) -> bool:
    """Since it was asked before."""
    path = node / "validated"
    found = path.exists()
    path.unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("fault", [XID, RAID])
def test_a_node_whose_checks_and_validators_pass_serves_again(
    node: Path, cluster: Slurm, capsys: Capture, fault: HealthEvent
) -> None:
    drained(cluster, fault)
    assert slurm(node, "check", "--needs-validation") == 0
    assert "it is to be validated: run `ff health slurm validate` on it" in capsys.readouterr().out
    assert validates(node, WELL, code=0) == 0
    assert ran(node)
    assert cluster.told() == ["scontrol update NodeName=me State=UNDRAIN"]
    assert "probation" in shown(node, capsys)


def test_a_node_that_fails_its_validation_stays_with_its_figure_and_the_next_remedy(
    node: Path, cluster: Slurm, capsys: Capture
) -> None:
    drained(cluster, RAID)
    assert validates(node, WELL, SLOW, code=2) == 2
    assert ran(node)
    assert not [one for one in cluster.told() if "UNDRAIN" in one]
    assert cluster.reason.startswith("ff: validation: cpu_stress: 80 % below its peers; cause cpu_gemm_flop_per_s; ")
    assert kept(node).pending == (), "Slurm has it"
    assert slurm(node, "check") == 0
    assert "; reboot is due; validate it (" in cluster.reason
    assert "cpu_stress: 80 % below its peers" in shown(node, capsys)
    assert validates(node, WELL, code=0) == 0
    assert not ran(node), "its remedy comes first"
    assert slurm(node, "repair", "reboot") == 0
    assert validates(node, WELL, code=0) == 0
    assert ran(node)
    assert cluster.reason == "none"


def test_a_node_that_was_to_be_validated_has_what_its_validation_found_in_its_reason(
    node: Path, cluster: Slurm
) -> None:
    drained(cluster, XID)
    assert validates(node, WELL, SLOW, code=2) == 2
    assert cluster.reason.startswith("ff: validation: cpu_stress: 80 % below its peers; cause cpu_gemm_flop_per_s; ")
    assert not [one for one in cluster.told() if "UNDRAIN" in one]


def test_wrong_results_have_the_remedy_of_wrong_results(node: Path, cluster: Slurm, capsys: Capture) -> None:
    drained(cluster, RAID)
    wrong = msgspec.structs.replace(SLOW, severity="high", cause="wrong_result", words="1 of 9 is wrong")
    assert validates(node, SLOW, wrong, code=2) == 2
    assert "field diagnosis is due" in shown(node, capsys)


@pytest.mark.parametrize("code", [1, 3, 127])
def test_validators_that_come_to_no_result_let_no_node_serve(
    node: Path, cluster: Slurm, capsys: Capture, code: int
) -> None:
    drained(cluster)
    assert validates(node, WELL, code=code) == 1
    assert "this node could not be validated, and stays drained: " in capsys.readouterr().err
    assert cluster.told() == []


def test_nodes_that_wait_for_something_else_are_not_validated(node: Path, cluster: Slurm) -> None:
    assert validates(node, code=0) == 0, "it serves"
    cluster.set(state="drained", shown="IDLE+DRAIN", reason="bob looks at it")
    assert validates(node, code=0) == 0
    drained(cluster)
    cluster.set(used="4")
    assert validates(node, code=0) == 0, "a job is there"
    cluster.set(used="0")
    (node / "broken").touch()
    assert validates(node, code=0) == 0, "its checks fail"
    assert not ran(node)
    assert not [one for one in cluster.told() if "UNDRAIN" in one]


def test_checks_that_fail_after_the_validators_keep_the_node_out(node: Path, cluster: Slurm) -> None:
    drained(cluster)
    broken = node / "breaks.sh"
    broken.write_text(f"#!/bin/sh\necho > {node}/broken\n")
    broken.chmod(0o755)
    assert slurm(node, "validate", "--", str(broken)) == 1
    assert not [one for one in cluster.told() if "UNDRAIN" in one]


def test_without_that_option_checks_that_pass_are_enough(node: Path, cluster: Slurm) -> None:
    drained(cluster, RAID)
    assert slurm(node, "check") == 0
    assert cluster.told() == ["scontrol update NodeName=me State=UNDRAIN"]


# --- rounds of the checks, meanwhile ---


def test_a_round_lets_no_node_serve_while_validators_load_it(node: Path, cluster: Slurm, capsys: Capture) -> None:
    """Without --needs-validation its checks that pass would be enough."""
    drained(cluster, RAID)
    assert slurm(node, "check", "--needs-validation") == 0
    with open(node / "state" / "slurm" / "validate.lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert slurm(node, "check") == 0
        assert slurm(node, "resume") == 1
    assert "validators load it now: it stays" in capsys.readouterr().out
    assert cluster.told() == []
    assert slurm(node, "check") == 0
    assert cluster.told() == ["scontrol update NodeName=me State=UNDRAIN"]


@pytest.mark.parametrize(("event", "remedy"), [(XID, "reboot"), (OTHER, "")])
def test_a_fault_that_a_round_has_found_under_load_keeps_the_node_out(
    node: Path, cluster: Slurm, capsys: Capture, monkeypatch: pytest.MonkeyPatch, event: HealthEvent, remedy: str
) -> None:
    """Slurm has been told of it, and it is not found again; its remedy comes first, or another validation."""
    drained(cluster, RAID)

    async def loads(program: tuple[str, ...], limit_ns: int, state: str, *, environment: Mapping[str, str]) -> Printed:
        remembers(node, event, repair=kept(node).repair)
        assert await asyncio.to_thread(slurm, node, "check") == 0
        return await run_health_program(program, limit_ns, state, environment=environment)

    monkeypatch.setattr(slurm_validate, "run_health_program", loads)
    assert validates(node, WELL, code=0) == 1
    assert kept(node).pending == (), "the round has acted on it"
    assert not [one for one in cluster.told() if "UNDRAIN" in one]
    shown_now = shown(node, capsys)
    assert f"{remedy} is due" in shown_now if remedy else "is due" not in shown_now
    monkeypatch.undo()


def test_validators_know_the_name_that_slurm_has_for_the_node(
    node: Path, cluster: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURMD_NODENAME")
    drained(cluster)
    program = node / "named.sh"
    program.write_text(f"#!/bin/sh\necho $SLURMD_NODENAME > {node}/named\n")
    program.chmod(0o755)
    slurm(node, "validate", "--node", "me", "--", str(program))
    assert (node / "named").read_text() == "me\n"


# --- what is seen beside peers alone ---


@pytest.mark.parametrize(("cause", "needs"), [("cpu_gemm_flop_per_s", True), ("corruption", True), ("", False)])
def test_a_node_that_was_slow_beside_its_peers_is_not_let_back_by_a_validation_without_them(
    node: Path, cluster: Slurm, capsys: Capture, monkeypatch: pytest.MonkeyPatch, cause: str, needs: bool
) -> None:
    drained(cluster, slurm_validate.as_happened(msgspec.structs.replace(SLOW, cause=cause)))
    slurm(node, "check")
    slurm(node, "repair", "test")
    monkeypatch.setattr(slurm_validate, "run_health_program", passes)
    assert slurm(node, "validate") == (1 if needs else 0)
    assert ("is seen beside its peers alone" in capsys.readouterr().err) == needs
    assert slurm(node, "validate", "--", "ff", "validate", "--peers", "/shared/records.jsonl") == 0
    assert "UNDRAIN" in cluster.told()[-1]


async def passes(*_: object, **__: object) -> Printed:
    return Printed((), 0)


def test_two_timers_validate_a_node_once(node: Path, cluster: Slurm, capsys: Capture) -> None:
    drained(cluster)
    assert slurm(node, "check") == 0
    with open(node / "state" / "slurm" / "validate.lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert validates(node, code=0) == 0
    assert not ran(node)
    assert "another `ff health slurm validate` is validating this node" in capsys.readouterr().out


def test_a_timer_that_looked_before_another_one_ended_loads_no_node_that_serves(
    node: Path, cluster: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained(cluster)

    @contextlib.contextmanager
    def after_the_other(_state: str) -> Iterator[bool]:
        cluster.set(state="idle", shown="IDLE", reason="none")
        yield True

    monkeypatch.setattr(slurm_validate, "validating", after_the_other)
    assert validates(node, WELL, code=0) == 0
    assert not ran(node)
    assert cluster.told() == []
