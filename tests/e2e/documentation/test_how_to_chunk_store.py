"""What docs/how-to/chunk-store.md tells users to type works."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from tests.support.how_to import Shell

from fireflyer.fs.core.requests.effects import Limits

TEXT = (Path(__file__).parents[3] / "docs/how-to/chunk-store.md").read_text()


def test_every_setting_that_is_named_exists() -> None:
    named = [name for row in re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert "senders" in named
    assert all(name in Limits.__struct_fields__ for name in named)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_programs_run(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    with shell.chunk_store(TEXT):
        first, second, third = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        assert "changed" in shell.run(sys.executable, "-c", first)
        assert "4096" in shell.run(sys.executable, "-c", second)
        if importlib.util.find_spec("torch"):
            assert shell.run(sys.executable, "-c", third).count("torch.Size([4, 1024])") == 2
