"""A real Slurm whose nodes run what docs/how-to/health-with-slurm.md says: a check fails, the node drains, its job runs
on another one, the node serves again; and the records of that run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.machines.machines import needs_machines
from tests.support.machines.slurm import JOBCOMP, needs_slurm
from tests.support.machines.slurm_site import OPTIONS, Site, slurm_site
from tests.support.platform.running import wait_for

from fireflyer.cli import main
from fireflyer.cluster.core.slurm.drains import is_own

pytestmark = [needs_machines, needs_slurm, pytest.mark.slow, pytest.mark.processes]


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    with slurm_site(tmp_path) as site:
        yield site
        if request.session.testsfailed:
            print(site.cluster.logs(8000))


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
    job = site.submits("--ntasks=4")
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
