"""What docs/how-to/simulate-a-cluster.md tells users to type works, for a cluster of fewer nodes."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Final

import pytest
from tests.support.how_to import Shell

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TEXT: Final = (Path(__file__).parents[3] / "docs/how-to/simulate-a-cluster.md").read_text()
FEWER: Final = {"--generate --nodes 2000": "--generate --days 1 --nodes 12", "2000": "12", "2200": "14"}


def test_a_trace_is_made_replayed_and_changed(tmp_path: Path) -> None:
    commands, change = re.findall(r"^```\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    for nodes, fewer in FEWER.items():
        assert nodes in commands
        commands = commands.replace(nodes, fewer)
    generate, replay, more = commands.splitlines()
    shell = Shell(tmp_path)
    shell.run("sh", "-c", generate)
    shown = shell.run("sh", "-c", replay)
    named = re.findall(r"^- \*(\w+)\*", TEXT, re.MULTILINE)
    assert {"Utilisation", "ETTR"} <= set(named)
    assert all(name in shown for name in named), shown
    assert "<svg" in (tmp_path / "month.html").read_text()
    assert [one["policy"] for one in json.loads(shell.run("sh", "-c", more))["policies"]] == ["time sharing"]

    with open(tmp_path / "month.csv") as file:
        rows = list(csv.DictReader(file))
    columns = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE)))
    assert set(rows[0]) <= set(columns), "columns are those of the page"
    user = rows[0]["user"]
    shell.run("sh", "-c", change.replace("u007", user))
    with open(tmp_path / "changed.csv") as file:
        changed = list(csv.DictReader(file))
    assert [row["priority"] for row in changed] == [
        "30" if row["user"] == user else row["priority"] for row in rows
    ]  # fmt: skip
    shell.run("sh", "-c", more.replace("month.csv", "changed.csv"))
