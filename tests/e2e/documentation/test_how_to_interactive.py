"""What docs/how-to/interactive.md says, typed literally."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from tests.support.how_to import Shell
from tests.support.jobs.cleanup import cleaned_up_at_exit
from tests.support.platform.running import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "interactive.md"
SLEEP = "import time\ntime.sleep(3600)\n"


def test_every_command_does_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_PLATFORM", raising=False)
    text = PAGE.read_text()
    blocks = [block.splitlines() for block in re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]
    assert [len(block) for block in blocks] == [3, 2, 1]
    commands, shells, interactive = ([shlex.split(command) for command in block] for block in blocks)
    (tmp_path / "train.py").write_text(SLEEP)
    (tmp_path / ".ffignore").write_text("bin\nplatform\n")
    shell = Shell(tmp_path)
    place = ("--dir", str(tmp_path / "platform"))
    shell.run("ff", "up", "--nodes", "3", "-d")
    with cleaned_up_at_exit((sys.executable, "-P", "-m", "fireflyer", "down", "--force", *place)):
        try:
            shell.run("ff", "submit", "--nodelist", "agent-1,agent-2", "--nodes", "2", "train.py")
            wait_for(lambda: " running " in shell.run("ff", "ps"), "it runs", limit_s=60)
            assert shell.run(*commands[0]) == f"{os.uname().nodename}\n"
            assert shell.run(*commands[1]) == "I am rank 1 of 2\n"
            assert shell.run(*commands[2]) == ""
            assert shell.run(*shells[0]) == f"{SLEEP}in task 2\n"
            wait_for(lambda: len(shell.run(*shells[1]).splitlines()) == 2, "only the training is listed", limit_s=60)
            assert shell.run(*interactive[0]) == "in task 3\n"
        finally:
            shell.run("ff", "stop", "1")  # it saves nothing: `ff down` would give it a minute to
            shell.run("ff", "down")
