"""What docs/how-to/files.md tells users to type works."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from tests.support.how_to import Shell

TEXT = (Path(__file__).parents[3] / "docs/how-to/files.md").read_text()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_and_programs_run(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/small.txt").write_text("small")
    (tmp_path / "notes/large.txt").write_text("x" * 5000)
    with shell.chunk_store(TEXT):
        (commands,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
        said = shell.run("sh", "-e", "-c", commands)
        assert "\nhello\n" in said
        assert "\n/data/notes/small.txt\n" in said
        assert (tmp_path / "back/small.txt").read_text() == "small"
        assert shell.run("ff", "fs", "ls", "/data").split() == ["notes", "raw"]
        tables, checkpoints = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        if all(importlib.util.find_spec(name) for name in ("duckdb", "pandas", "pyarrow")):
            assert shell.run(sys.executable, "-c", tables) == "0.001\n(1000,)\n"
            assert shell.run("ff", "fs", "cat", "/runs/first/note.txt") == "a note"
        if importlib.util.find_spec("torch"):
            assert shell.run(sys.executable, "-c", checkpoints) == "True\n"
