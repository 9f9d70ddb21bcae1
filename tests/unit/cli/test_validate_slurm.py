"""`ff validate slurm` before commands of Slurm that are scripts: who is validated, measured again, and drained."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fireflyer.base.errors import NoSpace
from fireflyer.cli import main
from fireflyer.cli.health.validation import held
from fireflyer.cluster.core.slurm.drains import is_own
from fireflyer.cluster.core.slurm.fleet import FleetNode
from fireflyer.validators import slurm_jobs
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.core.validation.reports import NodeReport, report_line
from fireflyer.validators.slurm_job_files import JobFiles
from fireflyer.validators.stress import record_file
from fireflyer.validators.stress.record_file import append_record, read_records

Capture = pytest.CaptureFixture[str]
FIGURE = "cpu_gemm_flop_per_s"
FAKE = """\
#!/bin/sh
cd {directory}/slurm
tool=$(/usr/bin/basename $0)
[ $tool = sinfo ] || [ $tool = squeue ] || echo "$tool $*" >> calls
case "$tool $*" in
sinfo*%C*) for node in $(/bin/cat idle); do echo "$node|p|idle|0/4/0/4"; done; echo "busy|p|allocated|4/0/0/4"
    [ ! -e reserved ] || /bin/cat reserved ;;
sinfo*) ;;
squeue*) names=${{*##*--name=}}; /bin/grep -F "|${{names%% *}}|" jobs || true ;;
sbatch*) for one in "$@"; do case $one in
      --output=*) output=${{one#*=}} ;; --nodelist=*) node=${{one#*=}} ;; --job-name=*) name=${{one#*=}} ;; esac; done
    [ ! -e late ] || /bin/cat late >> jobs
    /bin/cat > script
    /bin/cp report.$node $output
    number=$(( $(/bin/cat number) + 1 )); echo $number > number
    echo "$number|COMPLETED|0|1|1|1|1|$node|$name|None" >> jobs; echo $number ;;
*" show reservation fans") echo "ReservationName=fans StartTime=1 EndTime=2 Nodes=r,m NodeCnt=2 Users=root " ;;
*" show reservation "*) echo "Reservation none not found"; exit 1 ;;
*" show hostnames r,m") echo r; echo m ;;
esac
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its directory: two idle nodes that are as fast as the peers that the records have, and one with a job."""
    place = tmp_path / "slurm"
    place.mkdir()
    (place / "number").write_text("0\n")
    (place / "jobs").write_text("")
    (place / "idle").write_text("a b\n")
    for name in ("sinfo", "squeue", "sbatch", "scontrol", "scancel"):
        (tmp_path / name).write_text(FAKE.format(directory=tmp_path))
        (tmp_path / name).chmod(0o755)
    for number in range(6):
        append_record(str(tmp_path / "records.jsonl"), record(f"peer-{number}", 100.0 + number % 3))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(slurm_jobs, "LOOK_S", 0.0)
    measures(tmp_path, "a", 100.0)
    measures(tmp_path, "b", 101.0)
    return tmp_path


def record(node: str, value: float) -> NodeRecord:
    return NodeRecord(node=node, model="m", seen_ns=1, figures={FIGURE: value})


def measures(site: Path, node: str, value: float) -> None:
    line = report_line(NodeReport(events=(), record=record("of-the-node", value)))
    (site / "slurm" / f"report.{node}").write_text(f"{line}\n")


def validate(site: Path, *options: str) -> int:
    given = ("--records", str(site / "records.jsonl"), "--output", str(site), "--at-once", "2", "--wait", "1s")
    return main(["validate", "slurm", *given, *options])


def calls(site: Path) -> list[str]:
    path = site / "slurm" / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_idle_nodes_are_validated_once_a_week(site: Path, capsys: Capture) -> None:
    assert validate(site, "--node", "a", "--node", "b", "--partition", "p", "--sbatch=--qos=idle") == 0
    assert [one.partition(":")[0] for one in capsys.readouterr().out.splitlines()] == ["a", "b"]
    assert [one.node for one in read_records(str(site / "records.jsonl"))][-2:] == ["a", "b"]
    assert all("--nice=1000000" in one and "--partition=p --qos=idle" in one for one in calls(site))
    assert "fireflyer.validators.task node --time 60s" in (site / "slurm" / "script").read_text()
    before = len(calls(site))
    assert validate(site, "--partition", "p") == 3, "`busy` was not validated, and is not idle"
    assert "busy: not validated: its node was not idle in time" in capsys.readouterr().err
    assert len(calls(site)) == before


def test_a_slow_node_is_measured_twice_and_drained_as_its_own_checks_would(site: Path, capsys: Capture) -> None:
    measures(site, "b", 40.0)
    assert validate(site, "--node", "a", "--node", "b", "--drain") == 2
    said = calls(site)
    assert [one.split("--nodelist=")[1].split()[0] for one in said if one.startswith("sbatch")] == ["a", "b", "b"]
    assert "--only=cpu_stress" in (site / "slurm" / "script").read_text()
    (drain,) = (one for one in said if one.startswith("scontrol"))
    assert drain.startswith("scontrol update NodeName=b State=DRAIN Reason=ff: validation: cpu_gemm_flop_per_s is 40.0")
    reason = drain.partition("Reason=")[2]
    assert is_own(FleetNode(name="b", partitions=("p",), state="drained", reason=reason))
    assert "; validate it (" in reason
    assert "2 of 2 measurements are too low" in capsys.readouterr().out
    assert "b" not in [one.node for one in read_records(str(site / "records.jsonl"))], "it stays due"


def test_without_that_option_the_drain_is_proposed(site: Path, capsys: Capture) -> None:
    measures(site, "b", 40.0)
    assert validate(site, "--node", "b") == 2
    assert "proposed: scontrol update nodename=b state=drain reason='validation: cpu_gemm" in capsys.readouterr().err
    assert not [one for one in calls(site) if one.startswith("scontrol")]


def test_a_job_of_a_killed_command_that_slurm_shows_during_the_measurements_is_cancelled_at_their_end(
    site: Path, capsys: Capture
) -> None:
    killed, name = JobFiles(str(site)), "ff-validate-0000002a"
    killed.new(name)
    os.close(killed._lock)
    (site / "slurm" / "late").write_text(f"42|RUNNING|{os.geteuid()}|1|1|1|1|c|{name}|None\n")
    assert validate(site, "--node", "a") == 0
    order = [one.split()[0] for one in calls(site)]
    assert order == ["sbatch", "scancel"], "Slurm did not show it before"
    assert calls(site)[1] == f"scancel --name={name} 42"
    assert "a validation that was killed left job 42: cancelled" in capsys.readouterr().err
    assert not list(site.glob("ff-validate-*"))


def test_wrong_words_are_refused_before_anything_is_submitted(site: Path, capsys: Capture) -> None:
    for options, said in (
        (("--only", "gpu_heat"), "no validator 'gpu_heat'"),
        (("--node", "nope"), "Slurm knows no node nope"),
        (("--partition", "nope"), "Slurm has no node in a partition nope"),
        (("--output", str(site / "none")), "is no directory; give one that the nodes have, too"),
    ):
        assert validate(site, *options) == 3
        assert said in capsys.readouterr().err
    assert calls(site) == []


def test_with_a_reservation_the_nodes_that_are_reserved_are_validated(site: Path, capsys: Capture) -> None:
    assert validate(site, "--sbatch=--reservation=fans") == 3
    assert "no node of the reservation is idle now" in capsys.readouterr().err
    assert validate(site, "--sbatch=--reservation=none") == 3
    assert capsys.readouterr().err == "error: scontrol: Reservation none not found\n"
    (site / "slurm" / "reserved").write_text("r|p|reserved|0/4/0/4\nm|p|maint|0/4/0/4\nother|p|maint|0/4/0/4\n")
    measures(site, "r", 100.0)
    measures(site, "m", 100.0)
    assert validate(site, "--sbatch=--reservation=fans") == 0
    assert [one.partition(":")[0] for one in capsys.readouterr().out.splitlines()] == ["m", "r"]
    assert all("--reservation=fans" in one for one in calls(site) if one.startswith("sbatch"))


def test_a_node_at_fault_is_drained_also_where_nothing_can_be_recorded(
    site: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def full(_path: str, one: NodeRecord) -> None:
        asked.append(one.node)
        raise NoSpace("write records.jsonl: no space left on device")

    monkeypatch.setattr(record_file, "append_record", full)
    (site / "slurm" / "idle").write_text("a b c\n")
    measures(site, "b", 40.0)
    measures(site, "c", 100.0)
    assert validate(site, "--node", "a", "--node", "b", "--node", "c", "--drain", "--at-once", "3") != 0
    assert asked == ["a", "c"]
    assert [one for one in calls(site) if one.startswith("scontrol update NodeName=b State=DRAIN")]
    assert "no space left on device" in capsys.readouterr().err


def test_whoever_may_write_the_records_may_lock_them(site: Path, capsys: Capture) -> None:
    records = site / "records.jsonl"
    os.chmod(records, 0o660)
    with held(str(records)):
        assert stat.S_IMODE(os.stat(f"{records}.lock").st_mode) == 0o660
        assert validate(site, "--node", "a") != 0
    assert f"another `ff validate` uses {records}" in capsys.readouterr().err
