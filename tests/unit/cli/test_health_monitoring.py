"""Figures of a node's checks, alert rules and the dashboard: they name metrics that there are, and rules fire when they
should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.grafana import Dashboard, faults_of, parsed

from fireflyer.base.health_event import HealthEvent, Severity
from fireflyer.base.xids import XIDS
from fireflyer.cli import main
from fireflyer.cli.health.figures import figures_of, slurm_figures
from fireflyer.cli.health.shipped import shipped
from fireflyer.runtime.metrics import exposition
from fireflyer.validators.core.checks.evidence import Evidence, Output
from fireflyer.validators.core.checks.gpu_figures import FIGURES

ROOT: Final = Path(__file__).parents[3]
REPORT: Final = ROOT / "tests/unit/validators/checks/recorded/nvidia_smi_faulty.xml"
HOW_TO: Final = (ROOT / "docs/how-to/metrics.md").read_text()
NAME: Final = re.compile(r"\b(?:fireflyer|DCGM)_\w+")
Capture = pytest.CaptureFixture[str]


def evidence() -> Evidence:
    text = REPORT.read_text().replace(
        "<uuid>", "<gpu_power_readings><power_draw>70.53 W</power_draw></gpu_power_readings>"
        "<clocks><sm_clock>1410 MHz</sm_clock></clocks><minor_number>3</minor_number><uuid>"
    )  # fmt: skip
    return Evidence(now_ns=1, outputs={"nvidia_smi": Output(text=text, exit_code=0)})


def event(check: str, severity: Severity, **fields: Any) -> HealthEvent:
    return HealthEvent(check=check, severity=severity, seen_ns=1_700_000_000_000_000_000, **fields)


EVENTS: Final = (
    event("mounts", "ok"),
    event("disk_space", "low", part="mount:/data"),
    event("disk_space", "low", part="mount:/home"),
    event("gpu_xid", "high", part="gpu:0000:1b:00.0", cause="xid_79", once=True),
    event("services", "ok", could_not_run=True),
    event("gpu_ecc", "high", could_not_run=True),
)


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {
        family.name: [(dict(sample.labels), sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


def told() -> dict[str, list[tuple[dict[str, str], float]]]:
    return samples(exposition([*figures_of(EVENTS, evidence()), slurm_figures("held")]).decode())


def known() -> set[str]:
    """Metrics of managers are those of the table, which a test compares with what a manager tells."""
    return {*re.findall(r"^\| `(fireflyer_\w+)", HOW_TO, re.MULTILINE), *told()}


# --- figures ---


def test_a_round_counts_what_it_found() -> None:
    found = told()
    assert found["fireflyer_health_round_timestamp_seconds"] == [({}, 1.7e9)]
    assert ({"check": "disk_space", "severity": "low"}, 2.0) in found["fireflyer_health_findings"]
    assert ({"check": "mounts", "severity": "high"}, 0.0) in found["fireflyer_health_findings"]
    assert [labels["check"] for labels, value in found["fireflyer_health_check_failed"] if value] == [
        "services",
        "gpu_ecc",
    ]
    required = found["fireflyer_health_required_check_failed"]
    assert [labels["check"] for labels, value in required if value] == ["gpu_ecc"]
    assert [labels for labels, value in found["fireflyer_health_events"] if value] == [
        {"check": "gpu_xid", "severity": "high"}
    ]


def test_figures_of_gpus_have_the_names_and_labels_of_dcgm_exporter() -> None:
    found = told()
    assert {name for name in found if name.startswith("DCGM_")} == {*FIGURES, "DCGM_FI_DEV_XID_ERRORS"}
    first = {
        "gpu": "3", "UUID": "GPU-00000000-0000-0000-0000-000000000027", "pci_bus_id": "0000:1b:00.0",
        "device": "nvidia3",
    }  # fmt: skip
    assert found["DCGM_FI_DEV_GPU_TEMP"][0] == (first, 93.0)
    assert found["DCGM_FI_DEV_POWER_USAGE"][0] == (first, 70.0)
    assert [value for _, value in found["DCGM_FI_DEV_ROW_REMAP_FAILURE"]] == [0.0, 1.0]
    assert [value for _, value in found["DCGM_FI_DEV_XID_ERRORS"]] == [79.0, 0.0]


def test_a_node_without_a_gpu_has_figures_of_its_checks_alone() -> None:
    broken = Evidence(now_ns=1, outputs={"nvidia_smi": Output(text="no devices", exit_code=1)})
    for seen in (None, Evidence(now_ns=1), broken):
        assert not any(one.name.startswith("DCGM") for one in figures_of(EVENTS[:2], seen))


def test_the_file_is_replaced_and_the_exit_code_is_that_of_the_checks(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "fireflyer.prom"
    options = ["health", "--state", str(tmp_path / "state"), "--check", "mounts", "--prometheus"]
    for _ in range(2):
        assert main([*options, str(path)]) in (0, 1, 2)
    assert "fireflyer_health_findings" in samples(path.read_text())
    assert [one.name for one in tmp_path.iterdir() if one.suffix == ".new"] == []
    assert "mounts" in capsys.readouterr().out
    main([*options, "-"])
    assert set(samples(capsys.readouterr().out)) == set(samples(path.read_text()))
    assert main([*options, str(tmp_path / "none" / "x.prom")]) == 3
    assert "write" in capsys.readouterr().err


# --- what is shipped ---


def test_rules_and_dashboard_name_metrics_that_there_are(capsys: Capture) -> None:
    assert main(["health", "rules"]) == 0
    rules = capsys.readouterr().out
    assert main(["health", "dashboard"]) == 0
    dashboard = parsed(capsys.readouterr().out)
    asked = [line for line in rules.splitlines() if not re.match(r"\s*(#|- alert:|summary:|description:)", line)]
    named = {*NAME.findall("\n".join(asked)), *NAME.findall("\n".join(expressions(dashboard)))}
    assert len(named) > 20
    assert {name for name in named if name.removesuffix("_bucket") not in known()} == set()


def expressions(dashboard: Dashboard) -> list[str]:
    return [target.expr for panel in dashboard.panels for target in panel.targets]


def test_the_dashboard_has_the_schema_of_grafana() -> None:
    dashboard = parsed(shipped("dashboard.json"))
    assert list(faults_of(dashboard)) == []
    assert [one.name for one in dashboard.templating.list] == ["source"]
    for panel in dashboard.panels:
        assert panel.type == "row" or NAME.search(panel.targets[0].expr), panel.title


def changed(panel: int, **fields: Any) -> str:
    dashboard = json.loads(shipped("dashboard.json"))
    dashboard["panels"][panel] |= fields
    return json.dumps(dashboard)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (changed(1, type="graph"), "type"),
        (changed(1, gridpos={}), "unknown field `gridpos`"),
        (changed(1, gridPos={"h": 8, "w": 25, "x": 0, "y": 1}), "gridPos.w"),
        (changed(1, targets=[{"refId": "A", "expr": "up", "legendFormat": ""}]), "missing required field `datasource`"),
        (changed(1, targets=[{"refId": "A", "exp": "up"}]), "unknown field `exp`"),
        (changed(1, datasource={"type": "prometheus", "uid": "my-own"}), "datasource.uid"),
        (shipped("dashboard.json").replace('"uid": "fireflyer"', '"uid": "ff"'), "uid"),
        (shipped("dashboard.json").replace('"percentunit"', '"percent of all"'), "unit"),
    ],
)
def test_a_dashboard_of_another_form_is_found(text: str, said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(said)):
        parsed(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (changed(2, id=2), "number 2 is of another panel"),
        (changed(1, gridPos={"h": 8, "w": 24, "x": 4, "y": 90}), "beyond the 24 columns"),
        (changed(1, gridPos={"h": 8, "w": 8, "x": 0, "y": 1}), "lies on"),
        (changed(1, targets=[]), "no query"),
        (changed(0, targets=json.loads(shipped("dashboard.json"))["panels"][1]["targets"]), "a row asks nothing"),
        (shipped("dashboard.json").replace('"name": "source"', '"name": "other"'), "there is no variable source"),
    ],
)
def test_a_dashboard_that_contradicts_itself_is_found(text: str, said: str) -> None:
    assert any(said in one for one in faults_of(parsed(text)))


# --- rules, by promtool ---

RULE_TESTS: Final = """\
rule_files: [alerts.yml]
evaluation_interval: 1m
tests:
  - name: two managers lead, and one does
    interval: 1m
    input_series:
      - {series: 'fireflyer_platform_leader{instance="a"}', values: '1x5 1x5 0x20'}
      - {series: 'fireflyer_platform_leader{instance="b"}', values: '0x5 1x5 1x20'}
    alert_rule_test:
      - {eval_time: 5m, alertname: FireflyerNoLeader, exp_alerts: []}
      - eval_time: 9m
        alertname: FireflyerNoLeader
        exp_alerts: [{exp_labels: {severity: critical}}]
      - {eval_time: 25m, alertname: FireflyerNoLeader, exp_alerts: []}
  - name: nobody is there to tell who leads
    interval: 1m
    input_series: []
    alert_rule_test:
      - eval_time: 2m
        alertname: FireflyerNoLeader
        exp_alerts: [{exp_labels: {severity: critical}}]
  - name: the breaker holds for long, many nodes are out, runs are moved
    interval: 1m
    input_series:
      - {series: 'fireflyer_platform_node_health{state="held"}', values: '0x10 2x60'}
      - {series: 'fireflyer_platform_node_health{state="drained"}', values: '0x10 8x60'}
      - {series: 'fireflyer_platform_node_health{state="reboot"}', values: '0x10 4x60'}
      - {series: 'fireflyer_platform_node_health{state="healthy"}', values: '100x10 86x60'}
      - {series: 'fireflyer_platform_nodes{state="known"}', values: '100x70'}
      - {series: 'fireflyer_platform_node_states{state="lost"}', values: '0x70'}
      - {series: 'fireflyer_platform_runs_told_to_leave_total{reason="node_fault"}', values: '0x10 0+1x9 9x60'}
      - {series: 'fireflyer_platform_oldest_ticket_seconds', values: '600000+60x200'}
      - {series: 'fireflyer_platform_history_failing', values: '1x200'}
    alert_rule_test:
      - {eval_time: 15m, alertname: FireflyerBreakerHolds, exp_alerts: []}
      - eval_time: 30m
        alertname: FireflyerBreakerHolds
        exp_alerts: [{exp_labels: {severity: critical}}]
      - eval_time: 30m
        alertname: FireflyerManyNodesOut
        exp_alerts: [{exp_labels: {severity: warning}}]
      - {eval_time: 30m, alertname: FireflyerNodesLost, exp_alerts: []}
      - eval_time: 30m
        alertname: FireflyerRunsMovedByFaults
        exp_alerts: [{exp_labels: {severity: warning}}]
      - {eval_time: 80m, alertname: FireflyerRepairWaits, exp_alerts: []}
      - eval_time: 180m
        alertname: FireflyerRepairWaits
        exp_alerts: [{exp_labels: {severity: info}}]
      - eval_time: 20m
        alertname: FireflyerHistoryFailing
        exp_alerts: [{exp_labels: {severity: warning}}]
  - name: a tenth of the nodes may be out, and a lost one is told
    interval: 1m
    input_series:
      - {series: 'fireflyer_platform_node_health{state="rma"}', values: '10x60'}
      - {series: 'fireflyer_platform_nodes{state="known"}', values: '100x60'}
      - {series: 'fireflyer_platform_node_states{state="lost"}', values: '1x60'}
    alert_rule_test:
      - {eval_time: 40m, alertname: FireflyerManyNodesOut, exp_alerts: []}
      - eval_time: 10m
        alertname: FireflyerNodesLost
        exp_alerts: [{exp_labels: {severity: warning}}]
  - name: nodes
    interval: 1m
    input_series:
      - {series: 'fireflyer_health_round_timestamp_seconds{instance="n1"}', values: '0x120'}
      - {series: 'fireflyer_health_round_timestamp_seconds{instance="n2"}', values: '0+60x120'}
      - {series: 'fireflyer_health_findings{instance="n1",check="mounts",severity="high"}', values: '1x60'}
      - {series: 'fireflyer_health_events{instance="n1",check="mounts",severity="high"}', values: '0x60'}
      - {series: 'fireflyer_health_findings{instance="n1",check="nvme",severity="warn"}', values: '3x60'}
      - {series: 'fireflyer_health_events{instance="n1",check="nvme",severity="warn"}', values: '0x60'}
      - {series: 'fireflyer_health_findings{instance="n1",check="gpu_xid",severity="high"}', values: '0x5 1x4 0x120'}
      - {series: 'fireflyer_health_events{instance="n1",check="gpu_xid",severity="high"}', values: '0x5 1x4 0x120'}
      - {series: 'fireflyer_health_check_failed{instance="n1",check="services"}', values: '1x120'}
      - {series: 'fireflyer_health_slurm_node{instance="n1",state="held"}', values: '0x5 1x60'}
      - {series: 'fireflyer_health_slurm_node{instance="n2",state="held"}', values: '0x65'}
      - {series: 'fireflyer_health_slurm_node{instance="n1",state="unknown"}', values: '0x5 1x60'}
      - {series: 'fireflyer_health_slurm_node{instance="n2",state="drained"}', values: '1x1500'}
      - {series: 'fireflyer_health_check_failed{instance="n1",check="gpu_dcgm"}', values: '1x120'}
      - {series: 'fireflyer_health_required_check_failed{instance="n1",check="services"}', values: '1x120'}
      - {series: 'fireflyer_health_required_check_failed{instance="n1",check="gpu_dcgm"}', values: '0x120'}
      - {series: 'DCGM_FI_DEV_GPU_TEMP{instance="n1",gpu="0"}', values: '80x5 93x20'}
      - {series: 'DCGM_FI_DEV_XID_ERRORS{instance="n1",pci_bus_id="0000:3b:00.0"}', values: '0x5 79x5 31x40 63x20'}
      - {series: 'DCGM_FI_DEV_ROW_REMAP_FAILURE{instance="n1",gpu="0"}', values: '0x5 1x50'}
    alert_rule_test:
      - {eval_time: 30m, alertname: FireflyerRoundOld, exp_alerts: []}
      - eval_time: 40m
        alertname: FireflyerRoundOld
        exp_alerts: [{exp_labels: {severity: warning, instance: n1}}]
      - eval_time: 15m
        alertname: FireflyerNodeFaulty
        exp_alerts: [{exp_labels: {severity: warning, instance: n1, check: mounts}}]
      - {eval_time: 5m, alertname: FireflyerNodeEvent, exp_alerts: []}
      - eval_time: 7m
        alertname: FireflyerNodeEvent
        exp_alerts: [{exp_labels: {severity: warning, instance: n1, check: gpu_xid}}]
      - eval_time: 60m
        alertname: FireflyerNodeEvent
        exp_alerts: [{exp_labels: {severity: warning, instance: n1, check: gpu_xid}}]
      - {eval_time: 80m, alertname: FireflyerNodeEvent, exp_alerts: []}
      - eval_time: 70m
        alertname: FireflyerCheckFails
        exp_alerts: [{exp_labels: {severity: info, instance: n1, check: services}}]
      - {eval_time: 15m, alertname: FireflyerSlurmBreakerHolds, exp_alerts: []}
      - eval_time: 17m
        alertname: FireflyerSlurmBreakerHolds
        exp_alerts: [{exp_labels: {severity: critical}}]
      - {eval_time: 20m, alertname: FireflyerSlurmAway, exp_alerts: []}
      - eval_time: 22m
        alertname: FireflyerSlurmAway
        exp_alerts: [{exp_labels: {severity: warning, instance: n1, state: unknown}}]
      - {eval_time: 23h, alertname: FireflyerSlurmNodeOut, exp_alerts: []}
      - eval_time: 1441m
        alertname: FireflyerSlurmNodeOut
        exp_alerts: [{exp_labels: {severity: info, instance: n2, state: drained}}]
      - {eval_time: 8m, alertname: FireflyerGpuHot, exp_alerts: []}
      - eval_time: 15m
        alertname: FireflyerGpuHot
        exp_alerts: [{exp_labels: {severity: warning, instance: n1, gpu: "0"}}]
      - eval_time: 8m
        alertname: FireflyerXid
        exp_alerts: [{exp_labels: {severity: critical, instance: n1, pci_bus_id: "0000:3b:00.0"}}]
      - {eval_time: 30m, alertname: FireflyerXid, exp_alerts: []}
      - {eval_time: 8m, alertname: FireflyerXidLow, exp_alerts: []}
      - eval_time: 60m
        alertname: FireflyerXidLow
        exp_alerts: [{exp_labels: {severity: warning, instance: n1, pci_bus_id: "0000:3b:00.0"}}]
      - eval_time: 8m
        alertname: FireflyerRowRemapFailed
        exp_alerts: [{exp_labels: {severity: critical, instance: n1, gpu: "0"}}]
"""


@pytest.mark.parametrize(("alert", "severity"), [("FireflyerXid", "high"), ("FireflyerXidLow", "low")])
def test_rules_name_all_xids_for_which_nodes_are_taken_out(alert: str, severity: Severity) -> None:
    rule = shipped("alerts.yml").split(f"- alert: {alert}\n")[1].split("- alert:")[0]
    named = {int(number) for number in re.findall(r"DCGM_FI_DEV_XID_ERRORS == (\d+)", rule)}
    assert named == {number for number, xid in XIDS.items() if xid.severity == severity}


def test_each_rule_has_a_test() -> None:
    assert set(re.findall(r"- alert: (\w+)", shipped("alerts.yml"))) == set(
        re.findall(r"alertname: (\w+)\n", RULE_TESTS)
    ), "one that fires"


@pytest.mark.slow
@pytest.mark.processes
def test_rules_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    """Of annotations Prometheus compares whole texts, so they are taken out: their templates are checked by the first
    command."""
    (tmp_path / "shipped.yml").write_text(shipped("alerts.yml"))
    without = re.sub(r"\n {8}annotations:\n(?: {10}.*\n)+", "\n", shipped("alerts.yml"))
    assert "summary" not in without
    (tmp_path / "alerts.yml").write_text(without)
    (tmp_path / "tests.yml").write_text(RULE_TESTS)
    promtool = shutil.which("promtool")
    assert promtool is not None, "promtool is missing; apt-get install prometheus"
    for command in (["check", "rules", "shipped.yml"], ["test", "rules", "tests.yml"]):
        done = subprocess.run(
            [promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_prometheus_reads_each_query_of_the_dashboard(tmp_path: Path) -> None:
    """As rules that record: Debian's promtool reads no expression alone. Variables of Grafana have a value there."""
    asked = expressions(parsed(shipped("dashboard.json")))
    assert len(asked) > 20
    for number, planted in (
        (0, []),
        (1, ["sum(rate(fireflyer_platform_leader)"]),
        (1, ["rate(up[$__rate_interval])("]),
    ):
        rules = [
            {"record": f"panel:{at}", "expr": re.sub(r"\$__(rate_)?interval|\$__range", "5m", one)}
            for at, one in enumerate((*asked, *planted))
        ]
        path = tmp_path / "queries.yml"
        path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
        promtool = shutil.which("promtool")
        assert promtool is not None, "promtool is missing; apt-get install prometheus"
        done = subprocess.run(
            [promtool, "check", "rules", str(path)], capture_output=True, text=True, check=False, timeout=120
        )
        assert (done.returncode != 0) == bool(number), done.stdout + done.stderr
