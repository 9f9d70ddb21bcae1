"""`ff up FILE`: what the file says is so, at the first start and at a later one, and what of it counts meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from tests.support.health import only_program
from tests.support.platform.running import RunningPlatform, task_of, wait_for

from fireflyer.base.units import MIB, SECOND
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.commands import MoveNode
from fireflyer.cluster.schema.logs import LogText
from fireflyer.cluster.schema.tasks import Outcome

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FILE: Final = """\
agents = 1
run_logs_mib = 1
[[nodes]]
names = ["agent-1"]
group = "big"
labels = ["fast"]
[time_sharing]
usage_margin = 2.5
[health]
enabled = true
policy = "health.toml"
"""
CHANGED_MEANWHILE: Final = FILE.replace('"health.toml"', '"health-2.toml"\nperiod = "1s"').replace(
    "agents = 1", "agents = 2"
)
CHANGED: Final = """\
agents = 2
[[nodes]]
names = ["agent-2"]
zone = "west"
[time_sharing]
guarantee = "1h"
"""
LOUD: Final = "for number in range(40_000): print(f'line {number:6} ' + 60 * 'x')\n"
"""About 3 MiB."""


def places(client: Client) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    return {node.name: (node.group, node.zone, node.labels) for node in client.all_nodes()}


def check_bound_of_logs(platform: RunningPlatform, client: Client, folder: Path) -> None:
    """What a loud rank prints is cut on its node, and readers are told where."""
    (folder / "loud.py").write_text(LOUD)
    (task,) = client.submit(task_of(folder / "loud.py", "loud", node_group="big"), key="loud")
    assert platform.finished(client, task).task.outcome is Outcome.SUCCEEDED
    (log,) = platform.directory.glob("agent-1/state/runs/*/job/logs/attempt-0/rank-0.log")
    notice = "[fireflyer] logs of this run have reached 1.0 MiB: no more is kept\n"
    assert MIB < log.stat().st_size <= MIB + 1 + len(notice)
    lines = log.read_text().splitlines(keepends=True)
    assert lines[0].startswith("line      0 x")
    assert lines[-1] == notice
    assert "".join(event.text for event in client.logs(task) if isinstance(event, LogText)) == "".join(lines)


def test_what_the_file_says_is_so_and_what_it_leaves_out_stays(tmp_path: Path) -> None:
    file = tmp_path / "up.toml"
    (tmp_path / "check.sh").write_text(f"touch {tmp_path}/checked\n")
    (tmp_path / "health.toml").write_text(only_program("site", tmp_path / "check.sh"))
    (tmp_path / "check-2.sh").write_text(f"touch {tmp_path}/checked-again\n")
    (tmp_path / "health-2.toml").write_text(only_program("site", tmp_path / "check-2.sh"))
    file.write_text(FILE)
    platform = RunningPlatform(tmp_path / "platform", file=file)
    with platform:
        client = platform.client()
        assert places(client) == {"agent-1": ("big", "", ("fast",))}
        config = client.cluster().config
        assert (config.policy.usage_margin, config.guaranteed_ns) == (2.5, 0)
        check_bound_of_logs(platform, client, tmp_path)
        wait_for((tmp_path / "checked").exists, "the agent has checked its node", limit_s=60)
        file.write_text(CHANGED_MEANWHILE)
        wait_for((tmp_path / "checked-again").exists, "the changed checks are in force", limit_s=60)
        assert list(places(client)) == ["agent-1"]
        client.command(MoveNode(node="agent-1", zone="east", leaf="", group="big"))

    file.write_text(CHANGED)
    manager_log = tmp_path / "platform" / "manager" / "log"
    with manager_log.open("ab") as log:
        log.write(b"x" * 9 * MIB + b"\n")
    with platform:
        client = platform.client()
        assert places(client) == {"agent-1": ("big", "east", ("fast",)), "agent-2": ("default", "west", ())}
        config = client.cluster().config
        assert (config.policy.usage_margin, config.guaranteed_ns) == (2.5, 3600 * SECOND)
    assert manager_log.with_name("log.1").stat().st_size > 9 * MIB
    assert 0 < manager_log.stat().st_size < MIB
