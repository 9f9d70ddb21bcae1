"""Why a job failed: domains in the right order, and never the timeout alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.analytics.reliability.attribution import (
    Diagnosis,
    FlightFinding,
    JobEvidence,
    Observation,
    diagnose,
)
from fireflyer.analytics.reliability.evidence import MAX_OBSERVATIONS, evidence_of
from fireflyer.analytics.reliability.rows import EventRow, JobRow
from fireflyer.analytics.reliability.tables import TableWriter, open_tables
from fireflyer.analytics.reliability.taxonomy import SYMPTOMS, TABLE_I
from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cli.main import main

END_NS = 1_700_000_000 * SECOND


def seen(symptom: str, cause: str = "", *, at_s: float = -60, node: str = "gpu1", **more: Any) -> Observation:
    return Observation(**{
        "after_end_s": at_s, "node": node, "symptom": symptom, "cause": cause, "severity": "high", "source": "health",
        **more,
    })  # fmt: skip


def diagnosed(*observations: Observation, state: str = "FAILED", code: int = 1, **more: Any) -> Diagnosis:
    return diagnose(
        JobEvidence(
            job="7", state=state, exit_code=code, signal=0, nodes=("gpu1", "gpu2"), observations=observations, **more
        )
    )


@pytest.mark.parametrize("symptom", [key for key in TABLE_I if key != "nccl_timeout"])
def test_a_timeout_is_a_consequence_of_whatever_else_was_seen(symptom: str) -> None:
    timeout = seen("nccl_timeout", at_s=-1, node="gpu2")
    found = diagnosed(timeout, seen(symptom))
    assert found.hypotheses[0].title == SYMPTOMS[symptom].title
    assert found.domains[0].domain in SYMPTOMS[symptom].domains
    assert len(found.consequences) == 1
    assert "the timeout is a consequence" in found.summary


def test_a_timeout_alone_blames_nobody() -> None:
    found = diagnosed(seen("nccl_timeout"), state="FAILED", code=-1)
    assert "says only that a rank did not arrive" in found.summary
    assert {one.domain: round(one.share, 3) for one in found.domains} == {
        "user program": 0.333,
        "system software": 0.333,
        "hardware": 0.333,
    }


def test_pcie_xid_79_and_ipmi_are_one_fault() -> None:
    found = diagnosed(
        seen("pcie", "uncorrected"), seen("gpu_unavailable", "xid_79"), seen("platform_management", at_s=30)
    )
    first = found.hypotheses[0]
    assert (
        first.title == "PCIe bus: PCIe error, GPU unavailable and Critical event of the management controller together"
    )
    assert first.domains == ("hardware",)
    assert len(first.evidence) == 3
    assert found.domains[0].share > 0.9
    assert first.weight > diagnosed(seen("pcie", "uncorrected")).hypotheses[0].weight
    another = diagnosed(seen("pcie"), seen("gpu_unavailable", "xid_62"))
    assert "together" not in another.hypotheses[0].title


def test_an_exit_code_without_evidence_is_the_programs() -> None:
    found = diagnosed()
    assert found.domains[0].domain == "user program"
    assert found.hypotheses[0].evidence == ("it ended with code 1",)
    with_hardware = diagnosed(seen("gpu_memory", "xid_48"))
    assert with_hardware.domains[0].domain == "hardware"
    assert with_hardware.hypotheses[0].remedy == "reset the GPU or reboot the node"


def test_an_xid_of_a_program_does_not_refund_it_and_leaves_hardware_possible() -> None:
    found = diagnosed(seen("gpu_program", "xid_31", severity="warn", user_made=True))
    assert [one.domain for one in found.domains[:2]] == ["user program", "hardware"]
    assert found.domains[1].share > 0.1


@pytest.mark.parametrize(
    ("state", "code", "domain"),
    [("OUT_OF_MEMORY", 0, "user program"), ("FAILED", 139, "user program"), ("NODE_FAIL", -1, "system software")],
)
def test_how_it_ended_counts(state: str, code: int, domain: str) -> None:
    assert diagnosed(state=state, code=code).domains[0].domain == domain


def test_the_flight_recorder_names_a_bug_of_the_program() -> None:
    mismatch = FlightFinding(kind="mismatch", summary="rank 3 called broadcast, the others allreduce")
    found = diagnosed(seen("nccl_timeout"), flight=(mismatch,))
    assert found.domains[0].domain == "user program"
    assert "rank 3 called broadcast" in found.hypotheses[0].evidence[0]
    assert found.consequences


def test_nothing_seen_is_said() -> None:
    assert "nothing was seen" in diagnosed(state="TIMEOUT", code=0).summary


OBSERVATIONS = st.lists(
    st.builds(
        seen,
        st.sampled_from(sorted(SYMPTOMS)),
        st.sampled_from(["", "xid_79", "xid_", "xid_7x"]),
        at_s=st.floats(-600, 300),
        node=st.sampled_from(["gpu1", "gpu2"]),
        severity=st.sampled_from(["ok", "warn", "low", "high"]),
    ),
    max_size=12,
)


@given(OBSERVATIONS)
def test_nothing_is_lost_and_shares_add_up(observations: list[Observation]) -> None:
    found = diagnosed(*observations)
    lines = [line for one in found.hypotheses for line in one.evidence] + list(found.consequences)
    reported = [one for one in observations if one.severity != "ok"]
    more = sum(int(line.split()[1]) for line in lines if line.startswith("and "))
    shown = [line for line in lines if not line.startswith(("and ", "it ended"))]
    assert len(shown) + more == len(reported)
    assert sum(one.share for one in found.domains) == pytest.approx(1)
    assert [one.share for one in found.domains] == sorted((one.share for one in found.domains), reverse=True)


def write(directory: Path) -> None:
    jobs = TableWriter(str(directory), "jobs")
    for end_ns, state, code in ((END_NS - 9000 * SECOND, "NODE_FAIL", 0), (END_NS, "FAILED", 1)):
        start = end_ns - 3600 * SECOND
        jobs.add(JobRow("7", "ada", state, 2, 16, start, start, end_ns, code, 0, "gpu[1-2]", ""))
    jobs.finish("0" * 16)
    events = TableWriter(str(directory), "events")
    for at_s, node, symptom in (
        (-9000, "gpu2", "ib_link"),
        (-599, "gpu1", "pcie"),
        (-601, "gpu1", "nvlink"),
        (299, "gpu2", "gpu_memory"),
        (301, "gpu2", "nvlink"),
        (-10, "gpu3", "nvlink"),
        (-5, "gpu2", "nccl_timeout"),
    ):
        at_ns = END_NS + at_s * SECOND
        events.add(EventRow(at_ns, node, symptom, "", "high", "health", "check", "", "", False, "said"))
    events.finish("0" * 16)


def test_the_window_and_the_nodes_of_the_job_bound_the_evidence(tmp_path: Path) -> None:
    write(tmp_path)
    with open_tables(str(tmp_path)) as tables:
        evidence = evidence_of(tables, "7")
        assert [one.symptom for one in evidence.observations] == ["pcie", "nccl_timeout", "gpu_memory"]
        assert [one.symptom for one in evidence_of(tables, "7", attempt=1).observations] == ["ib_link"]
        with pytest.raises(UsageError, match="has 2 attempts"):
            evidence_of(tables, "7", attempt=3)
        with pytest.raises(NotFound, match="no job '8'"):
            evidence_of(tables, "8")


def test_of_a_number_that_slurm_and_the_platform_have_somebody_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (source, state) in enumerate((("slurm", "FAILED"), ("platform", "TIMEOUT"))):
        jobs = TableWriter(str(tmp_path), "jobs")
        start_ns = END_NS - 3600 * SECOND
        jobs.add(JobRow("7", "ada", state, 1, 8, start_ns, start_ns, END_NS, 1, 0, "gpu1", "", source=source))
        jobs.finish(f"{number}" * 16)
    with open_tables(str(tmp_path)) as tables:
        assert evidence_of(tables, "7", source="platform").state == "TIMEOUT"
        assert evidence_of(tables, "7", source="slurm").attempts == 1
        with pytest.raises(NotFound, match="no job '7 of run'"):
            evidence_of(tables, "7", source="run")
    assert main(["reliability", "why", "7", "--from", str(tmp_path)]) == 2
    assert "7 is a job of platform and one of slurm; say which with --source" in capsys.readouterr().err
    assert main(["reliability", "why", "7", "--from", str(tmp_path), "--source", "slurm"]) == 0


def test_many_warnings_do_not_hide_what_is_severe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    warnings = TableWriter(str(tmp_path), "events")
    for number in range(MAX_OBSERVATIONS + 100):
        at_ns = END_NS - 590 * SECOND + number
        warnings.add(EventRow(at_ns, "gpu1", "main_memory", "", "warn", "kernel", "", "", "", False, "said"))
    warnings.finish("1" * 16)
    with open_tables(str(tmp_path)) as tables:
        evidence = evidence_of(tables, "7")
    severe = [one.symptom for one in evidence.observations if one.severity == "high"]
    assert severe == ["pcie", "nccl_timeout", "gpu_memory"]
    assert (len(evidence.observations), evidence.left_out) == (MAX_OBSERVATIONS, 103)
    assert main(["reliability", "why", "7", "--from", str(tmp_path)]) == 0
    assert "Not looked at: 103 more reports" in capsys.readouterr().out


def test_the_command_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["reliability", "why", "7", "--from", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "Job 7 ended FAILED; most likely: PCIe error on gpu1 (hardware); the timeout is a consequence."
    )
    assert "Explained by the first, and no cause:" in shown
    assert "Attempt 2 of 2 ran for " in shown
    assert "on 2 nodes and ended at 2023-11-14 22:13:20 UTC." in shown
    assert main(["reliability", "why", "7", "--from", str(tmp_path), "--json"]) == 0
    assert main(["reliability", "why", "7", "--from", str(tmp_path), "--flight", str(tmp_path / "none")]) in (1, 2)
    assert main(["reliability", "why", "9", "--from", str(tmp_path)]) == 1


@pytest.mark.parametrize("code", [1, 134, 137, 143])
def test_how_ranks_end_that_waited_in_vain_does_not_explain_the_timeout(code: int) -> None:
    found = diagnosed(seen("nccl_timeout"), code=code)
    assert "which says only that a rank did not arrive" in found.summary
    assert found.consequences == ()


def test_lost_nodes_do_not_explain_themselves() -> None:
    lost = [seen("node_lost", node=f"gpu{number}") for number in range(6)]
    found = diagnose(
        JobEvidence(job="7", state="NODE_FAIL", exit_code=137, signal=9, nodes=(), observations=tuple(lost))
    )
    assert found.hypotheses[0].title == SYMPTOMS["node_lost"].title
    assert "timeout" not in found.summary


def test_reports_of_two_nodes_do_not_confirm_each_other() -> None:
    apart = diagnosed(seen("pcie"), seen("platform_management", node="gpu2"))
    assert not any("together" in one.title for one in apart.hypotheses)
    same = diagnosed(seen("pcie"), seen("platform_management"), seen("pcie", node="gpu2"))
    assert same.hypotheses[0].nodes == ("gpu1",)
    assert any(one.nodes == ("gpu2",) for one in same.hypotheses)
