"""A real Slurm whose nodes run what docs/how-to/health-with-slurm.md says: a check fails, the node drains, its job runs
on another one, the node serves again; and the records of that run."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.health import only_program
from tests.support.machines import slurm
from tests.support.machines.machines import Machines, needs_machines
from tests.support.machines.slurm import JOBCOMP, SlurmCluster, needs_slurm, slurm_cluster
from tests.support.platform.running import wait_for

from fireflyer.cli import main
from fireflyer.cluster.core.slurm.drains import is_own
from fireflyer.cluster.core.slurm.fleet import FLEET_FORMAT, REASON_FORMAT, FleetNode, parse_fleet

pytestmark = [needs_machines, needs_slurm, pytest.mark.slow, pytest.mark.processes]

PAGE: Final = (Path(__file__).parents[3] / "docs" / "how-to" / "health-with-slurm.md").read_text()
OPTIONS: Final = "--state /run/health --spacing 1s --back-off 1s"
"""Machines of tests have a /run of their own, and nothing else that may be written to."""
TRAIN: Final = """\
#!/bin/sh
hostname >> {directory}/ran
while [ ! -e {directory}/release ]; do sleep 0.1; done
"""
CHECK: Final = '[ ! -e "{directory}/broken/$(hostname)" ] || {{ echo "GPU 3 is lost"; exit 2; }}; echo "8 GPUs"\n'


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def install(machines: Machines, directory: Path) -> None:
    """The scripts of the page; only paths and how long a probe waits are others."""
    names = re.findall(r"`/etc/slurm/(ff-\w+)`", PAGE)
    assert names == ["ff-check", "ff-prolog", "ff-epilog"]
    for machine in machines.values():
        for name, script in zip(names, blocks("sh"), strict=True):
            script = script.replace("/opt/fireflyer/bin", os.path.dirname(sys.executable))
            script = script.replace("/etc/fireflyer/gpu.toml", f"{directory}/gpu.toml {OPTIONS}")
            path = machine.path(f"/etc/slurm/{name}")
            path.write_text(script)
            path.chmod(0o755)


class Site:
    """Slurm as its administrator sees it."""

    def __init__(self, machines: Machines, cluster: SlurmCluster, directory: Path) -> None:
        self.machines, self.cluster, self.directory = machines, cluster, directory

    def types(self, *command: str) -> str:
        return self.cluster.controller.run(command, env={"SLURM_TIME_FORMAT": "%s"}, check=True).stdout

    def nodes(self) -> dict[str, FleetNode]:
        asked = ("sinfo", "--noheader", "--all", "--Node")
        return parse_fleet(
            self.types(*asked, f"--format={FLEET_FORMAT}"), self.types(*asked, f"--format={REASON_FORMAT}")
        )

    def breaks(self, node: str) -> None:
        (self.directory / "broken" / node).touch()

    def repairs(self, node: str) -> None:
        (self.directory / "broken" / node).unlink()

    def job(self, number: str) -> list[str]:
        """State and node."""
        return (
            self.types("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T|%N").strip().split("|")
        )

    def until(self, node: str, state: str) -> None:
        asked = ("sinfo", "--noheader", "--partition=test", f"--nodes={node}", "--format=%T")
        wait_for(lambda: self.types(*asked).split() == [state], f"{node} is {state}", limit_s=90, pause_s=0.5)

    def until_job(self, number: str, state: str) -> str:
        wait_for(lambda: self.job(number)[0] == state, f"job {number} is {state}", limit_s=90, pause_s=0.5)
        return self.job(number)[1]

    def runs(self, node: str, *command: str, **variables: str) -> tuple[int, str]:
        done = self.machines[node].run(command, env=variables)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    (tmp_path / "broken").mkdir()
    (tmp_path / "check.sh").write_text(CHECK.format(directory=tmp_path))
    (tmp_path / "train.sh").write_text(TRAIN.format(directory=tmp_path))
    (tmp_path / "gpu.toml").write_text(only_program("site_gpus", tmp_path / "check.sh"))
    (lines,) = blocks("ini")
    assert "HealthCheckInterval=300\n" in lines
    with Machines(["a", "b", "c"], shared=[tmp_path], private=slurm.PRIVATE) as machines:
        install(machines, tmp_path)
        lines = lines.replace("Interval=300", "Interval=10").replace("nohold", "batch_sched_delay=0,nohold")
        with slurm_cluster(machines, slurmd_timeout_s=60, lines=lines.splitlines()) as cluster:
            yield Site(machines, cluster, tmp_path)
            if request.session.testsfailed:
                print(cluster.logs(8000))


def report(site: Site, node: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Of Slurm's records and of what the node's checks said while it was at fault."""
    records, tables = site.directory / "jobcomp.log", str(site.directory / "failures")
    shutil.copy(site.cluster.controller.path(JOBCOMP), records)
    said = f"{node}={site.directory / 'health.jsonl'}"
    assert main(["reliability", "import", tables, "--jobcomp", str(records), "--health", said]) == 0
    capsys.readouterr()
    assert main(["reliability", "report", tables, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_node_whose_check_fails_drains_its_job_runs_elsewhere_and_it_serves_again(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.types("scontrol", "update", "NodeName=c", "State=DRAIN", "Reason=bob looks at it")
    train = str(site.directory / "train.sh")
    job = re.findall(r"\d+", site.types("sbatch", "--requeue", "--ntasks=4", "--output=/dev/null", train))[0]
    node = site.until_job(job, "RUNNING")
    wait_for(lambda: (site.directory / "ran").exists(), "it trains")
    other = {"a": "b", "b": "a"}[node]

    site.breaks(node)
    _, said = site.runs(
        node, "ff", "health", "--policy", f"{site.directory}/gpu.toml", "--state", "/run/seen", "--json"
    )
    (site.directory / "health.jsonl").write_text(said)
    site.until_job(job, "PENDING")
    site.until(node, "drained")
    assert is_own(site.nodes()[node])
    assert site.nodes()[node].reason.startswith("ff: site_gpus: GPU 3 is lost (")

    site.types("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert site.until_job(job, "RUNNING") == other
    wait_for(lambda: (site.directory / "ran").read_text().split() == [node, other], "it trains again")
    site.breaks("c")
    site.breaks(other)
    code, held = site.runs(other, *f"ff health slurm check --policy {site.directory}/gpu.toml {OPTIONS}".split())
    assert code == 0, held
    assert "held by the breaker: of partition" in held
    code, _ = site.runs(other, "/etc/slurm/ff-prolog", SLURM_JOB_ID=job)
    assert code == 0, "nothing follows from a fault that the breaker holds"
    code, refused = site.runs(node, "/etc/slurm/ff-prolog", SLURM_JOB_ID="77")
    assert code == 1, refused
    site.repairs(other)

    site.repairs(node)
    site.until(node, "idle")
    assert site.nodes()[node].reason == ""

    site.breaks(node)
    site.until(node, "drained")
    site.repairs(node)
    shows = ("ff", "health", "slurm", "show", "--state", "/run/health")
    wait_for(
        lambda: "reboot is due, ticket 1" in site.runs(node, *shows)[1], "its second fault has a remedy", limit_s=60
    )
    site.runs(node, *f"ff health slurm check --policy {site.directory}/gpu.toml {OPTIONS}".split())
    assert site.nodes()[node].drains, "its checks pass, and nothing was done"
    code, said = site.runs(node, "ff", "health", "slurm", "repair", "reboot", "power cycled", *shows[-2:])
    assert code == 0, said
    site.until(node, "idle")
    assert "probation" in site.runs(node, *shows)[1]
    (site.directory / "release").touch()
    site.until_job(job, "COMPLETED")
    assert site.nodes()["c"].reason == "bob looks at it"
    assert site.nodes()["c"].drains

    found = report(site, node, capsys)
    states = {one["state"]: one["jobs"] for one in found["states"]}
    assert states == {"REQUEUED": 1, "COMPLETED": 1}
    (size,) = found["sizes"]
    assert (size["jobs"], size["failures"]) == (2, 1)
    assert size["mttf_h"] > 0
    assert 0 < found["training"]["ettr"] < found["training"]["goodput"] < 1
