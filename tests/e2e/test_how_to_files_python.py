"""What docs/how-to/files-python.md tells people to type works."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.fs.client.opening import FileOptions

TEXT = (Path(__file__).parents[2] / "docs/how-to/files-python.md").read_text()


def test_every_option_that_is_named_exists() -> None:
    named = re.findall(r"FileOptions\.(\w+)", TEXT)
    assert set(named) == {"write_bytes", "ahead_bytes"} <= set(FileOptions.__struct_fields__)


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_programs_run(tmp_path: Path) -> None:
    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ff = (sys.executable, "-P", "-m", "fireflyer")
    assert "`ff fs up --dir fs -d`" in TEXT
    run(*ff, "fs", "up", "--dir", "fs", "-d")
    try:
        first, second = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        assert run(sys.executable, "-c", first).split() == ["hello", "notes.txt", "6", "samples", "4096000"]
        if importlib.util.find_spec("torch"):
            assert run(sys.executable, "-c", second).count("torch.Size([4, 1024])") == 2
    finally:
        run(*ff, "fs", "down", "--dir", "fs")
