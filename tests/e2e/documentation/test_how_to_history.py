"""What docs/how-to/history.md says, typed literally: commands on a manager, and SQL on its database."""

from __future__ import annotations

import re
import sqlite3
import tomllib
from pathlib import Path

import msgspec
import pytest
from tests.support.how_to import Shell
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import wait_for

from fireflyer.cluster.client import Connection
from fireflyer.cluster.core.platform.store.retention import HistoryKeep
from fireflyer.cluster.history.database import check_url
from fireflyer.cluster.schema.tasks import FINISHED, Program, TaskSpec

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "history.md"


def test_commands_and_queries_answer(tmp_path: Path) -> None:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    named, kept = [tomllib.loads(block) for language, block in fenced if language == "toml"]
    check_url(named["history"])
    assert msgspec.convert(kept["history_keep"], HistoryKeep) == HistoryKeep(), "the defaults"
    assert tuple(kept["history_keep"]) == HistoryKeep.__struct_fields__
    (commands,) = [block.splitlines() for language, block in fenced if not language]
    shell = Shell(tmp_path)
    with ManagerProcess(tmp_path / "manager") as manager:
        wait_for(lambda: manager.ask("GET", "/api/v1/health").status == 200, "it leads")
        with ScriptedAgent(manager, "gpu-1") as agent, manager.client("admin") as admin:
            (task,) = admin.submit(TaskSpec(name="kept", program=Program(script="t.py", workdir="/")), key="k")
            while admin.task(task).task.state is not FINISHED:
                agent.sync()
                agent.follow()
            wait_for(lambda: manager.ask("GET", "/api/v1/history/tasks", user="ada").status == 200, "it is open")
            wait_for(lambda: bool(admin.past_tasks().tasks), "it is copied")
        file = tmp_path / "connection.json"
        file.write_bytes(msgspec.json.encode(Connection(url=manager.url, token=manager.tokens["admin"])))
        file.chmod(0o600)
        said = [shell.run(*command.split(), "--platform", str(file)) for command in commands]
        assert "kept" in said[0]
        assert "admin" in said[1]
        assert "IssueJoinToken" in said[2]
    with sqlite3.connect(tmp_path / "manager" / "history.sqlite") as database:
        answers = [database.execute(block).fetchall() for language, block in fenced if language == "sql"]
    database.close()
    assert len(answers) == 6
    assert answers[0][0][1] == "kept"
    assert answers[1]
    assert answers[3]
