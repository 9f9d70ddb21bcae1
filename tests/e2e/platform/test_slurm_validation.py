"""A real Slurm: drained nodes are validated before they serve again, and idle ones every week."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
from tests.support.machines.machines import MachineProcess, needs_machines
from tests.support.machines.slurm import JOBCOMP, needs_slurm
from tests.support.machines.slurm_site import OPTIONS, Site, slurm_site
from tests.support.patience import allowed_s
from tests.support.platform.running import wait_for

from fireflyer.cluster.core.slurm.drains import is_own
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.stress.record_file import append_record, read_records
from fireflyer.validators.stress.run import model_of_node

pytestmark = [needs_machines, needs_slurm, pytest.mark.slow, pytest.mark.processes]

PROCESSOR: Final = "cpu_gemm_flop_per_s"
DISK: Final = "storage_write_bytes_per_s"
SURPASSED: Final = 1.0
UNREACHABLE: Final = 1e29
OTHER_PROCESSOR: Final = "Another Processor"
LOADS: Final = """\
#!/bin/sh
hostname >> {directory}/loaded
while [ ! -e {directory}/measured ]; do sleep 0.1; done
echo "as fast as it should be"
"""


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    loads = tmp_path / "loads.sh"
    loads.write_text(LOADS.format(directory=tmp_path))
    loads.chmod(0o755)
    with slurm_site(tmp_path, "--needs-validation") as site:
        yield site
        if request.session.testsfailed:
            print(site.cluster.logs(8000))


@pytest.fixture(scope="module")
def idle_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Of tests that leave no validation behind; a second cluster would take longer than one of them."""
    with slurm_site(tmp_path_factory.mktemp("idle")) as site:
        yield site


def peers(path: Path, figures: Mapping[str, float], model: str = "") -> str:
    """The file, with records of six nodes that have measured this."""
    for number in range(6):
        one = NodeRecord(node=f"peer-{number}", model=model or model_of_node(), seen_ns=1, figures=dict(figures))
        append_record(str(path), one)
    return str(path)


def command(site: Site, step: str, *program: str) -> list[str]:
    needs = " --needs-validation" if step == "check" else ""
    said = f"ff health slurm {step} --policy {site.directory}/gpu.toml {OPTIONS}{needs}".split()
    return [*said, *(("--", *program) if program else ())]


def validators(site: Site, peers: str = "") -> list[str]:
    """Those of the how-to, small."""
    said = f"ff validate --json --time 1s --only cpu_stress --only storage --directory {site.directory}"
    return [*said.split(), *(("--peers", peers) if peers else ())]


def waits_for_validation(site: Site, node: str) -> str:
    """Its reason, once its check has failed and passes again."""
    site.breaks(node)
    site.until(node, "drained")
    site.repairs(node)
    said = "it is to be validated: run `ff health slurm validate` on it"
    wait_for(lambda: said in site.runs(node, *command(site, "check"))[1], f"{node} waits", limit_s=90, pause_s=1.0)
    assert site.nodes()[node].drains
    return site.nodes()[node].reason


def loads(site: Site, node: str, times: int) -> MachineProcess:
    """`ff health slurm validate`, whose validators load the node now, for the `times`-th time."""
    timer = site.starts(node, *command(site, "validate", str(site.directory / "loads.sh")))
    loaded = site.directory / "loaded"
    wait_for(lambda: loaded.exists() and len(loaded.read_text().split()) == times, "validators run", limit_s=60)
    return timer


def validation_jobs(site: Site) -> list[str]:
    """Those that Slurm has not ended: state and node."""
    rows = site.types("squeue", "--noheader", "--format=%j|%T|%N").split()
    return [row.partition("|")[2] for row in rows if row.startswith("ff-validate")]


def test_a_drained_node_serves_again_when_its_validators_pass_alone(site: Site) -> None:
    site.types("scontrol", "update", "NodeName=c", "State=DRAIN", "Reason=bob looks at it")
    before = waits_for_validation(site, "b")
    slow = peers(site.directory / "slow.jsonl", {PROCESSOR: SURPASSED, DISK: UNREACHABLE})
    code, said = site.runs("b", *command(site, "validate", *validators(site, slow)))
    assert code == 2, said
    node = site.nodes()["b"]
    assert (node.state, is_own(node)) == ("drained", True)
    assert node.reason != before
    assert node.reason.startswith(f"ff: validation: storage: {DISK} is "), node.reason
    assert f"cause {DISK}; " in node.reason
    assert "peers, " in node.reason

    good = peers(site.directory / "good.jsonl", {PROCESSOR: SURPASSED, DISK: SURPASSED})
    code, said = site.runs("b", *command(site, "validate", *validators(site, good)))
    assert "this node was validated" not in said, "its remedy comes first"
    assert site.nodes()["b"].drains
    code, said = site.runs("b", "ff", "health", "slurm", "repair", "reboot", "new disk", "--state", "/run/health")
    assert code == 0, said
    code, said = site.runs("b", *command(site, "validate", *validators(site)))
    assert code == 1, said
    assert "is seen beside its peers alone" in said
    assert site.nodes()["b"].drains
    code, said = site.runs("b", *command(site, "validate", *validators(site, good)))
    assert code == 0, said
    assert "its checks and validators pass: it serves again" in said
    assert (site.nodes()["b"].state, site.nodes()["b"].reason) == ("idle", "")

    code, said = site.runs("c", *command(site, "validate", *validators(site, good)))
    assert (code, said) == (0, ""), "a person has drained it"
    assert (site.nodes()["c"].state, site.nodes()["c"].reason) == ("drained", "bob looks at it")
    job = site.submits("--nodelist=b", "--ntasks=4")
    assert site.until_job(job, "RUNNING") == "b", "it serves"


def test_a_node_is_validated_by_one_timer_and_again_where_that_was_killed(site: Site) -> None:
    before = waits_for_validation(site, "b")
    timer = loads(site, "b", 1)
    code, said = site.runs("b", *command(site, "validate", str(site.directory / "loads.sh")))
    assert code == 0, said
    assert "another `ff health slurm validate` is validating this node" in said
    assert (site.directory / "loaded").read_text().split() == ["b"]
    assert site.runs("b", *command(site, "check"))[0] == 0
    assert site.nodes()["b"].reason == before, "a round lets no node serve while it is loaded"

    site.machines["b"].kill(timer.pid_inside)
    timer.wait()
    loading = f"{site.directory}/loads.sh"
    wait_for(
        lambda: not any(loading in argv for _, argv in site.machines["b"].processes()),
        "validators end with their timer",
    )
    assert (site.nodes()["b"].state, site.nodes()["b"].reason) == ("drained", before)

    timer = loads(site, "b", 2)
    site.types("scontrol", "update", "NodeName=b", "Reason=bob keeps it")
    (site.directory / "measured").touch()
    assert timer.wait() != 0
    assert "is not drained by ff" in site.said("b")
    assert (site.nodes()["b"].state, site.nodes()["b"].reason) == ("drained", "bob keeps it")

    site.types("scontrol", "update", "NodeName=b", f"Reason={before}")
    timers = [site.starts("b", *command(site, "validate", loading)) for _ in range(2)]
    assert [timer.wait() for timer in timers] == [0, 0]
    assert (site.directory / "loaded").read_text().split() == ["b"] * 3, "by one of the two"
    assert site.said("b").count("it serves again") == 1
    site.until("b", "idle")


def test_idle_nodes_are_validated_and_the_one_with_a_job_is_left_alone(idle_site: Site) -> None:
    site = idle_site
    output, records = site.directory / "output", site.directory / "records.jsonl"
    output.mkdir(mode=0o700, exist_ok=True)
    has_other_processor(site, "b")
    usual = model_of_node()
    peers(records, {PROCESSOR: SURPASSED, DISK: SURPASSED})
    peers(records, {PROCESSOR: UNREACHABLE}, usual[: usual.rindex(" x ")] + f" x {OTHER_PROCESSOR}")
    job = site.submits("--nodelist=c", "--ntasks=4")
    assert site.until_job(job, "RUNNING") == "c"
    words = f"ff validate slurm --output {output} --records {records} --directory {site.directory} --only cpu_stress"
    validate = [*words.split(), "--partition", "test", "--drain"]

    code, said = site.runs("a", *validate, "--time", "1s", "--at-once", "2", "--wait", f"{min(allowed_s(10), 60):.0f}s")
    assert code == 2, said
    assert "\na: in order" in f"\n{said}"
    assert f"b: low: validation: {PROCESSOR} is " in said
    assert "c: not validated: its node was not idle in time" in said
    nodes = site.nodes()
    assert (nodes["a"].state, nodes["b"].state, nodes["c"].state) == ("idle", "drained", "allocated")
    assert nodes["b"].reason.startswith(f"ff: validation: {PROCESSOR} is ")
    assert is_own(nodes["b"])
    assert site.job(job) == ["RUNNING", "c"]
    assert [one.node for one in read_records(str(records))][12:] == ["a"]
    assert (validation_jobs(site), list(output.iterdir())) == ([], [])

    (site.directory / "release").touch()
    site.until_job(job, "COMPLETED")
    site.until("c", "idle")
    killed = site.starts("a", *validate, "--time", "10m", "--node", "c")
    wait_for(lambda: validation_jobs(site) == ["RUNNING|c"], "its job runs", limit_s=60, pause_s=0.5)
    site.machines["a"].kill(killed.pid_inside)
    killed.wait()
    assert validation_jobs(site) == ["RUNNING|c"]
    code, said = site.runs("a", *validate, "--time", "1s", "--node", "c", "--wait", "1m")
    assert code == 0, said
    assert "a validation that was killed left job" in said
    assert (validation_jobs(site), list(output.iterdir())) == ([], [])
    assert [one.node for one in read_records(str(records))][12:] == ["a", "c"]
    assert site.nodes()["c"].state == "idle"


def test_reserved_and_draining_nodes_keep_what_people_decided_and_slurm_says_why_it_starts_no_job(
    idle_site: Site,
) -> None:
    site, output, records = idle_site, idle_site.directory / "output", idle_site.directory / "reserved.jsonl"
    output.mkdir(mode=0o700, exist_ok=True)
    words = f"ff validate slurm --output {output} --records {records} --directory {site.directory}"
    validates = [*words.split(), "--only", "storage", "--time", "1s", "--partition", "test", "--drain"]
    (site.directory / "release").unlink(missing_ok=True)
    reservation = "ReservationName=fans StartTime=now Duration=60 Users=root Nodes=b Flags=MAINT"
    site.types("scontrol", "create", "reservation", *reservation.split())
    if site.nodes()["b"].drains:
        site.types("scontrol", "update", "NodeName=b", "State=UNDRAIN")
    job = site.submits("--nodelist=c", "--ntasks=4")
    assert site.until_job(job, "RUNNING") == "c"
    site.types("scontrol", "update", "NodeName=c", "State=DRAIN", "Reason=bob looks at it")
    other = "ReservationName=disks StartTime=now Duration=60 Users=root Nodes=a Flags=MAINT"
    site.types("scontrol", "create", "reservation", *other.split())
    site.until("b", "maint")
    site.until("a", "maint")
    site.until("c", "draining")

    code, said = site.runs("a", *validates, "--node", "b", "--node", "c", "--wait", "1s")
    assert code == 3, said
    assert "b: not validated: its node was not idle in time (maint)" in said
    assert "c: not validated: its node was not idle in time (draining)" in said
    site.breaks("c")
    code, said = site.runs("c", *command(site, "check"))
    assert "drained already, not by ff: bob looks at it" in said
    assert (site.nodes()["c"].state, site.nodes()["c"].reason) == ("draining", "bob looks at it")
    assert site.job(job) == ["RUNNING", "c"], "it ends by itself"

    code, said = site.runs("a", *validates, "--sbatch=--reservation=fans", "--wait", "1m")
    assert code == 0, said
    assert "b: in order" in said
    assert "a: " not in said, "it is of another reservation"
    code, said = site.runs("a", *validates, "--sbatch=--reservation=none", "--wait", "3s")
    assert (code, said.count("\n")) == (3, 1)
    assert "Reservation none not found" in said
    site.types("scontrol", "delete", "ReservationName=disks")
    site.until("a", "idle")
    site.breaks("b")
    site.runs("b", *command(site, "check"))
    assert is_own(site.nodes()["b"]), "a faulty node drains in a reservation, too"

    site.types("scontrol", "update", "PartitionName=test", "AllowAccounts=physics")
    for option, why in (
        ("--reservation=none", "Slurm refuses its job: sbatch: sbatch: error: Batch job submission failed: Requested"),
        ("--account", "Slurm refuses its job: sbatch: "),
        ("--account=chemistry", "Slurm did not start its job: Job's account not known"),
    ):
        code, said = site.runs("a", *validates, "--node", "a", f"--sbatch={option}", "--wait", "3s")
        assert code == 3, said
        (line,) = [one for one in said.splitlines() if one.startswith("a: ")]
        assert line.startswith(f"a: not validated: {why}")
    assert "Account=chemistry" in site.types("cat", JOBCOMP), "Slurm had it"
    assert (validation_jobs(site), list(output.iterdir())) == ([], [])


def has_other_processor(site: Site, node: str) -> None:
    """So that its model of node is another one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    other = site.directory / "cpuinfo"
    other.write_text(
        "".join(f"model name\t: {OTHER_PROCESSOR}\n" if one.startswith("model name") else f"{one}\n" for one in lines)
    )
    site.machines[node].run(["mount", "--bind", str(other), "/proc/cpuinfo"], check=True)
