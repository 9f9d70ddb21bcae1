"""`ff validate nodes` and `ff validate links`: idle nodes alone, compared with others, drained or proposed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.health import only_program
from tests.support.patience import allowed_s
from tests.support.platform.running import RunningPlatform, task_of, wait_for

from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.views import HealthView
from fireflyer.cluster.schema.tasks import Outcome, TaskState
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.stress.record_file import append_record, read_records
from fireflyer.validators.stress.run import model_of_node

pytestmark = [pytest.mark.processes, pytest.mark.slow]
FAST = 1e15
"""Products a second, of which no processor is capable."""
HEALTHY = HealthView(state="healthy", since_ns=0, reason="", hold="none", until_ns=None, faults=0, policy=0)
QUICK = ("--time", "1s", "--only", "cpu_stress")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    with RunningPlatform(tmp_path_factory.mktemp("validate") / "platform", nodes=3, storage=3) as running:
        yield running


def start(platform: RunningPlatform, cwd: Path, *words: str, storage: bool = True) -> subprocess.Popen[str]:
    place = ("--platform", str(platform.directory))
    target = ("--fs", f"ff://{platform.directory / 'storage'}") if storage and "links" not in words else ()
    command = [sys.executable, "-P", "-m", "fireflyer", "validate", *words, *place, *target]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FIREFLYER_")}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ended(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    out, err = process.communicate(timeout=allowed_s(240))
    assert process.returncode == code, (out, err)
    return out, err


def tasks(client: Client, name: str) -> list[tuple[str, Outcome | None]]:
    found = [task for task in client.tasks(name=name).tasks if task.name == name]
    return [(task.state.value, task.outcome) for task in sorted(found, key=lambda task: task.id)]


def test_each_idle_node_is_validated_once_a_week(platform: RunningPlatform, tmp_path: Path) -> None:
    out, err = ended(start(platform, tmp_path, "nodes", "--at-once", "3", *QUICK), 0)
    assert [line.partition(":")[0] for line in out.splitlines()] == ["agent-1", "agent-2", "agent-3"]
    assert sorted(record.node for record in read_records(str(tmp_path / "validation.jsonl"))) == [
        "agent-1", "agent-2", "agent-3",
    ]  # fmt: skip
    out, err = ended(start(platform, tmp_path, "nodes", *QUICK), 0)
    assert (out, err) == ("", "all 3 nodes were validated within 168 h 00 min\n")


def test_nodes_slower_than_their_peers_are_drained_up_to_the_limit(platform: RunningPlatform, tmp_path: Path) -> None:
    client = platform.client()
    for number in range(5):
        peer = NodeRecord(
            node=f"peer-{number}", model=model_of_node(), seen_ns=1, figures={"cpu_gemm_flop_per_s": FAST}
        )
        append_record(str(tmp_path / "validation.jsonl"), peer)
    chosen = ("--node", "agent-1", "--node", "agent-2")
    try:
        out, err = ended(start(platform, tmp_path, "nodes", "--drain", *chosen, *QUICK), 2)
        nodes = [client.node(name) for name in ("agent-1", "agent-2")]
    finally:
        client.resume_node("agent-1")
    assert "agent-1: low: validation: cpu_gemm_flop_per_s is" in out
    assert "below the median of" in out
    assert out.count("; 2 of 2 measurements are too low") == 2
    assert [node.state for node in nodes] == ["drained", "idle"]
    assert nodes[0].drain_reason.startswith("validation: cpu_gemm_flop_per_s is")
    assert "proposed; a twentieth of the nodes is drained: ff node drain agent-2 'validation: cpu_gemm" in err
    left = {record.node for record in read_records(str(tmp_path / "validation.jsonl"))}
    assert not left & {"agent-1", "agent-2"}, "what is at fault is no measure for others, and stays due"


def test_where_nodes_are_checked_a_slow_node_has_a_ticket_with_its_figure(tmp_path: Path) -> None:
    (tmp_path / "check.sh").write_text("echo in order")
    (tmp_path / "policy.toml").write_text(only_program("site", tmp_path / "check.sh"))
    file = tmp_path / "up.toml"
    file.write_text('agents = 2\n[health]\nenabled = true\npolicy = "policy.toml"\n')
    for number in range(5):
        peer = NodeRecord(
            node=f"peer-{number}", model=model_of_node(), seen_ns=1, figures={"cpu_gemm_flop_per_s": FAST}
        )
        append_record(str(tmp_path / "validation.jsonl"), peer)
    with RunningPlatform(tmp_path / "platform", file=file) as running:
        words = ("nodes", "--drain", "--node", "agent-1", "--fs", "none", *QUICK)
        _, err = ended(start(running, tmp_path, *words, storage=False), 2)
        client = running.client()
        wait_for(lambda: (client.node("agent-1").health or HEALTHY).state == "reboot", "its remedy is due")
        node = client.node("agent-1")
    assert "agent-1 is drained: validation (cpu_gemm_flop_per_s): cpu_gemm_flop_per_s is" in err
    assert node.health is not None
    ticket = node.health.ticket
    assert ticket is not None
    assert ticket.fault.words.startswith("cpu_gemm_flop_per_s is")
    assert "below the median of" in ticket.fault.words
    assert (node.state, node.drain_reason) == ("drained", "")


def test_a_task_interrupts_a_validation_which_begins_again(platform: RunningPlatform, tmp_path: Path) -> None:
    client = platform.client()
    process = start(platform, tmp_path, "nodes", "--node", "agent-1", "--time", "20s", "--only", "cpu_stress")
    name = "validate-agent-1"
    before = len(tasks(client, name))
    wait_for(lambda: tasks(client, name)[before:] == [("running", None)], "it validates", limit_s=90)
    script = tmp_path / "user.py"
    script.write_text("print('done')")
    task = task_of(script, "user", nodes=3, priority=1)
    (user,) = client.submit(task, key="user")
    assert platform.finished(client, user).task.outcome is Outcome.SUCCEEDED, "it did not wait for the validation"
    assert tasks(client, name)[before] == ("finished", Outcome.STOPPED)
    ended(process, 0)
    assert tasks(client, name)[before + 1 :] == [("finished", Outcome.SUCCEEDED)]


def test_a_command_that_is_ended_keeps_what_was_measured_and_stops_the_rest(
    platform: RunningPlatform, tmp_path: Path
) -> None:
    client = platform.client()
    names = ("validate-agent-1", "validate-agent-2")
    before = [len(tasks(client, name)) for name in names]
    chosen = ("--node", "agent-1", "--node", "agent-2")
    process = start(platform, tmp_path, "nodes", *chosen, "--time", "10s", "--only", "cpu_stress")
    wait_for(lambda: tasks(client, names[1])[before[1] :] == [("running", None)], "the second one runs", limit_s=120)
    process.terminate()
    process.communicate(timeout=allowed_s(60))
    wait_for(lambda: tasks(client, names[1])[before[1] :] == [("finished", Outcome.STOPPED)], "it is stopped")
    assert tasks(client, names[0])[before[0] :] == [("finished", Outcome.SUCCEEDED)]
    assert [record.node for record in read_records(str(tmp_path / "validation.jsonl"))] == ["agent-1"]


def test_a_second_command_with_the_same_records_validates_nothing(platform: RunningPlatform, tmp_path: Path) -> None:
    before = len(platform.client().tasks(name="validate").tasks)
    with open(tmp_path / "validation.jsonl.lock", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _, err = ended(start(platform, tmp_path, "nodes", *QUICK), 3)
    assert err.startswith("error: another `ff validate` uses validation.jsonl; wait for its end")
    assert len(platform.client().tasks(name="validate").tasks) == before


def test_who_may_not_drain_hears_it_before_anything_is_validated(platform: RunningPlatform, tmp_path: Path) -> None:
    place = tmp_path / "ada.json"
    admin = platform.client()
    admin.create_user("ada")
    connection = msgspec.structs.replace(admin.connection, token=admin.issue_token("ada").token)
    place.write_bytes(msgspec.json.encode(connection))
    place.chmod(0o600)
    command = [sys.executable, "-P", "-m", "fireflyer", "validate", "nodes", "--drain", "--platform", str(place)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=allowed_s(60), check=False)
    assert (done.returncode, done.stderr) == (
        3, "error: --drain is for operators; leave it out, and the commands for them are printed\n",
    )  # fmt: skip


def test_a_node_that_is_not_idle_in_time_is_said_and_left(platform: RunningPlatform, tmp_path: Path) -> None:
    client = platform.client()
    script = tmp_path / "long.py"
    script.write_text("import time; time.sleep(3600)")
    (user,) = client.submit(task_of(script, "long", nodes=3), key="long")
    platform.until(client, user, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    _, err = ended(start(platform, tmp_path, "nodes", "--node", "agent-1", "--wait", "2s", *QUICK), 3)
    assert "agent-1: not validated: its nodes were not idle in time" in err
    client.stop(user)
    platform.finished(client, user)


def test_links_are_measured_in_pairs(platform: RunningPlatform, tmp_path: Path) -> None:
    out, err = ended(start(platform, tmp_path, "links", "--time", "1s", "--json"), 0)
    found = [msgspec.json.decode(line) for line in out.splitlines()]
    pairs = [["agent-1", "agent-2"], ["agent-1", "agent-3"], ["agent-2", "agent-3"]]
    assert [one["nodes"] for one in found] == pairs
    assert {(one["check"], one["severity"]) for one in found} == {("link", "ok")}
    assert len(err.splitlines()) == 3
