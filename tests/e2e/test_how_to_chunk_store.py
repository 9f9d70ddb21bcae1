"""What docs/how-to/chunk-store.md tells people to type works."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fireflyer.fs.core.request_effects import Limits

TEXT = (Path(__file__).parents[2] / "docs/how-to/chunk-store.md").read_text()


def test_every_setting_that_is_named_exists() -> None:
    named = [name for row in re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert "senders" in named
    assert all(name in Limits.__struct_fields__ for name in named)


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
        first, second, third = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        assert "changed" in run(sys.executable, "-c", first)
        assert "4096" in run(sys.executable, "-c", second)
        if importlib.util.find_spec("torch"):
            assert run(sys.executable, "-c", third).count("torch.Size([4, 1024])") == 2
    finally:
        run(*ff, "fs", "down", "--dir", "fs")
