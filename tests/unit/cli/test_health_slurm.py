"""`ff health slurm` while Slurm is away: no job is harmed, and what happened once is not forgotten."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.support.health import only_program

from fireflyer.base.health_event import HealthEvent
from fireflyer.cli import main
from fireflyer.cluster.core.slurm.drains import DrainRecord

Capture = pytest.CaptureFixture[str]
XID = HealthEvent(check="gpu_xid", severity="high", cause="xid_79", words="Xid 79", seen_ns=1, at_once=True, once=True)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its directory; the check finds a fault while `broken` is there, and no command of Slurm is found."""
    (tmp_path / "check.sh").write_text(f'if [ -e {tmp_path}/broken ]; then echo "disk 3 failed"; exit 2; fi; echo ok\n')
    (tmp_path / "policy.toml").write_text(only_program("site_raid", tmp_path / "check.sh"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def slurm(node: Path, step: str, *options: str) -> int:
    given = ["--policy", str(node / "policy.toml"), "--state", str(node / "state"), "--probes", "1"]
    return main(["health", "slurm", step, *given, *options])


def test_a_node_without_a_fault_starts_its_jobs_without_asking_slurm(node: Path, capsys: Capture) -> None:
    assert slurm(node, "prolog") == slurm(node, "epilog") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("step", ["prolog", "epilog"])
def test_a_job_starts_where_slurm_cannot_be_asked_or_the_policy_is_wrong(
    node: Path, capsys: Capture, step: str
) -> None:
    (node / "broken").touch()
    assert slurm(node, step) == 0
    assert f"ff health slurm {step}: there is no sinfo here" in capsys.readouterr().err
    (node / "policy.toml").write_text("nonsense = 1\n")
    assert slurm(node, step) == 0
    assert "nonsense" in capsys.readouterr().err


def test_the_program_of_slurm_says_why_it_did_nothing(node: Path, capsys: Capture) -> None:
    assert slurm(node, "check") == 1
    assert "there is no sinfo here" in capsys.readouterr().err


def test_what_happened_once_is_kept_until_slurm_can_be_told(node: Path, capsys: Capture) -> None:
    slurm(node, "epilog")
    kept = node / "state" / "slurm.json"
    kept.write_bytes(msgspec.json.encode(DrainRecord(pending=(XID,))))
    for _ in range(2):
        assert slurm(node, "epilog") == 0
        assert "there is no sinfo" in capsys.readouterr().err, "it is not at peace"
        assert msgspec.json.decode(kept.read_bytes(), type=DrainRecord).pending == (XID,)
    kept.write_bytes(b'{"at_s": "yesterday"}')
    assert slurm(node, "epilog") == 0
    assert capsys.readouterr().err == ""


def test_options_stand_behind_the_command_that_takes_them(capsys: Capture) -> None:
    assert main(["health", "--check", "mounts", "slurm", "check"]) == 2
    assert "give the options of 'slurm' behind it" in capsys.readouterr().err
