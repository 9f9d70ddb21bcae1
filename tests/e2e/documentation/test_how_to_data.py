"""What docs/how-to/data.md tells users to type works."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from tests.support.how_to import Shell

TEXT = (Path(__file__).parents[3] / "docs/how-to/data.md").read_text()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_and_programs_run(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    (commands,) = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    records, mixture, torch = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    with shell.chunk_store(TEXT):
        said = shell.run("bash", "-e", "-c", commands)
        assert "2000 records" in said
        assert "all are as they were written" in said
        assert shell.run(sys.executable, "-c", records).split("\n") == ["2000 note 3:", "0 16", "32", ""]
        if importlib.util.find_spec("torch"):
            assert shell.run(sys.executable, "-c", mixture).split("\n") == ["(20, 64) [14, 6]", ""]
            assert shell.run(sys.executable, "-W", "ignore::DeprecationWarning", "-c", torch) == "32\n"
