"""What a manager tells Prometheus, read as Prometheus reads it."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.patience import allowed_s
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import wait_for

from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.commands import DrainNode
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Program, TaskSpec, TaskState

pytestmark = pytest.mark.processes

HOW_TO: Final = Path(__file__).parents[3] / "docs" / "how-to" / "metrics.md"
LABELS: Final = {
    "state", "kind", "outcome", "cause", "reason", "method", "route", "status", "table", "le", "check", "severity",
}  # fmt: skip
"""None of them is a user, a task or a node."""

Found = dict[str, dict[tuple[tuple[str, str], ...], float]]


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with ManagerProcess(tmp_path_factory.mktemp("metrics") / "manager", metrics_listen="127.0.0.1:0") as running:
        wait_for(lambda: running.ask("GET", "/api/v1/health").status == 200, "it leads")
        yield running


def scraped(manager: ManagerProcess) -> Found:
    """Samples by name and labels. Every line is parsed; the parser refuses what is no metric."""
    address = re.findall(r"metrics at (\S+)", manager.log())[-1]
    with urllib.request.urlopen(address, timeout=allowed_s(30)) as answer:
        text = answer.read().decode()
    found: Found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        if not family.samples:
            found[family.name] = {}  # as of what no node has
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), f"twice: {sample}"
            found[sample.name][labels] = sample.value
    assert len([line for line in text.splitlines() if not line.startswith("#")]) == sum(map(len, found.values()))
    return found


def one(found: Found, name: str, **labels: str) -> float:
    return found[f"fireflyer_platform_{name}"][tuple(sorted(labels.items()))]


def submitted(client: Client, name: str) -> int:
    (task,) = client.submit(TaskSpec(name=name, program=Program(script="x.py", workdir="/")), key=name)
    return task


def until_ended(agent: ScriptedAgent, client: Client, task: int, cause: Cause) -> None:
    def ended() -> bool:
        agent.sync()
        agent.follow(cause)
        state = client.task(task).task.state
        return state is FINISHED or (cause is Cause.INFRASTRUCTURE and client.task(task).task.requeues == 1)

    wait_for(ended, f"task {task} ends")


def test_figures_of_a_manager_are_those_of_what_happened(manager: ManagerProcess) -> None:
    with (
        manager.client("ada") as ada,
        ScriptedAgent(manager, "gpu-1") as agent,
        ScriptedAgent(manager, "gpu-2") as idle,
    ):
        agent.appear(ada)
        idle.appear(ada)
        with manager.client("admin") as admin:
            admin.command(DrainNode("gpu-2", "cleaning"))
        for number, cause in enumerate((Cause.SUCCEEDED, Cause.PROGRAM, Cause.INFRASTRUCTURE)):
            until_ended(agent, ada, submitted(ada, f"task-{number}"), cause)
        last = submitted(ada, "last")
        assert ada.task(last).task.state in (TaskState.QUEUED, TaskState.SCHEDULED), "as soon as the manager looks"
        for path in ("/api/v1/tasks/999", "/api/v1/tasks/998", "/no/such/page", "/<script>"):
            manager.ask("GET", path, user="ada")
        found = scraped(manager)

    assert one(found, "leader") == one(found, "leads_begun_total") == 1
    assert one(found, "term") >= 1
    assert one(found, "agents_heard") == 2
    assert one(found, "node_states", state="drained") == 1
    assert one(found, "tasks", state="finished") == 2
    assert one(found, "tasks_submitted_total") == 4
    assert one(found, "tasks_finished_total", outcome="succeeded") == 1
    assert one(found, "tasks_finished_total", outcome="failed") == 1
    assert one(found, "requeues_total", cause="infrastructure") == 1
    runs = one(found, "runs_scheduled_total")
    assert runs == one(found, "queue_wait_seconds_count") == one(found, "queue_wait_seconds_bucket", le="+Inf") >= 3
    for cause in (Cause.SUCCEEDED, Cause.PROGRAM, Cause.INFRASTRUCTURE):
        assert one(found, "runs_ended_total", cause=cause.value) == 1
    assert one(found, "node_seconds", kind="healthy") > 0
    assert 0 <= one(found, "utilisation_ratio") <= 1
    assert one(found, "goodput_ratio") == 0, "no run told how it spent its time"
    assert one(found, "transactions_total", outcome="committed") == one(found, "transaction_seconds_count") > 4
    assert one(found, "outbox") >= 0
    assert one(found, "requests_total", method="POST", route="/api/v1/tasks", status="201") == 4
    not_found = one(found, "requests_total", method="GET", route="/api/v1/tasks/{number}", status="404")
    assert not_found == 2, "a task is no label"
    assert one(found, "request_seconds_count", route="/api/v1/tasks") >= 4
    assert not any(
        "script" in str(labels) or "such" in str(labels) for labels in found["fireflyer_platform_requests_total"]
    )
    assert {name for series in found.values() for labels in series for name, _ in labels} <= LABELS


def test_every_series_is_in_the_table_and_none_else(manager: ManagerProcess) -> None:
    wait_for(lambda: "fireflyer_platform_history_rows" in scraped(manager), "the history is measured")
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in scraped(manager)}
    table = set(re.findall(r"^\| `(fireflyer_platform_\w+)", HOW_TO.read_text(), re.MULTILINE))
    assert {name for name in families if not name.endswith("_created")} == table
