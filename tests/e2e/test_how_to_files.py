"""What docs/how-to/files.md tells people to type works."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs/how-to/files.md").read_text()


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_commands_and_programs_run(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    ff = programs / "ff"
    ff.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m fireflyer "$@"\n')
    ff.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    env.pop("FIREFLYER_FS", None)

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/small.txt").write_text("small")
    (tmp_path / "notes/large.txt").write_text("x" * 5000)
    assert "`ff fs up --dir fs -d`" in TEXT
    run("ff", "fs", "up", "--dir", "fs", "-d")
    try:
        (commands,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
        said = run("sh", "-e", "-c", commands)
        assert "\nhello\n" in said
        assert "\n/data/notes/small.txt\n" in said
        assert (tmp_path / "back/small.txt").read_text() == "small"
        assert run("ff", "fs", "ls", "/data").split() == ["notes", "raw"]
        tables, checkpoints = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        if all(importlib.util.find_spec(name) for name in ("duckdb", "pandas", "pyarrow")):
            assert run(sys.executable, "-c", tables) == "0.001\n(1000,)\n"
            assert run("ff", "fs", "cat", "/runs/first/note.txt") == "a note"
        if importlib.util.find_spec("torch"):
            assert run(sys.executable, "-c", checkpoints) == "True\n"
    finally:
        run("ff", "fs", "down", "--dir", "fs")
