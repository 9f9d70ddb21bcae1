"""What docs/how-to/files-python.md tells users to type works."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from tests.support.how_to import Shell

from fireflyer.fs.client.files.open_file_table import FileOptions

TEXT = (Path(__file__).parents[3] / "docs/how-to/files-python.md").read_text()


def test_every_option_that_is_named_exists() -> None:
    named = re.findall(r"FileOptions\.(\w+)", TEXT)
    assert set(named) == {"write_bytes", "ahead_bytes"} <= set(FileOptions.__struct_fields__)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_programs_run(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    with shell.chunk_store(TEXT):
        first, second = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        assert shell.run(sys.executable, "-c", first).split() == ["hello", "notes.txt", "6", "samples", "4096000"]
        if importlib.util.find_spec("torch"):
            assert shell.run(sys.executable, "-c", second).count("torch.Size([4, 1024])") == 2
