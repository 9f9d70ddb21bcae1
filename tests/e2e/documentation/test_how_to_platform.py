"""What docs/how-to/platform.md says, typed literally."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.how_to import Shell

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "platform.md"


def test_every_command_does_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_PLATFORM", raising=False)
    text = PAGE.read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (script,) = [block for language, block in fenced if language == "python"]
    (tmp_path / "train.py").write_text(script)
    blocks = [block.splitlines() for language, block in fenced if not language]
    assert [len(block) for block in blocks] == [2, 2, 4, 4, 4]
    shell = Shell(tmp_path)
    start, first, logs, second, users = ([command.split() for command in block] for block in blocks)
    shell.run(*start[0])
    with shell.ended_platform():
        assert shell.run(*start[1]).count("idle") == 4
        assert shell.run(*first[0]).count("begin at step 0") == 2
        shown = shell.run(*first[1])
        assert "finished, succeeded" in shown
        assert "all ranks exited with code 0" in shown
        of_both = [f"[{rank}] {line}" for rank in (0, 1) for line in ("begin at step 0", "done")]
        assert shell.run(*logs[0]).splitlines() == of_both
        assert shell.run(*logs[1]).splitlines() == ["begin at step 0", "done"]
        assert shell.run(*logs[2]).count(": done") == 2
        assert sorted(shell.run(*logs[3]).splitlines()) == of_both
        shell.run(*second[0])
        shell.run(*second[1])
        assert shell.run(*second[2]).count("urgent") == 1
        assert re.search(r"^0 .*suspended", shell.run(*second[3]), re.MULTILINE)
        assert shell.run(*users[0]).startswith("fft1.")
        assert "ann has the role platform:operator" in shell.run(*users[1])
        assert re.search(r"^ann .*platform:operator", shell.run(*users[2]), re.MULTILINE)
        assert shell.run(*users[3]).count("never") == 1
        assert "admin (platform:operator, platform:admin)" in shell.run("ff", "whoami")
        assert "agent-1" in shell.run("ff", "nodes", "--tree")
        assert shell.run("ff", "submit", "--test-only", "train.py")
