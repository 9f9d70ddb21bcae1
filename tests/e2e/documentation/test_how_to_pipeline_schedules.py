"""What docs/how-to/pipeline-schedules.md tells users to type works, and prints what it shows."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from fireflyer.cli.main import main

TEXT = (Path(__file__).parents[3] / "docs/how-to/pipeline-schedules.md").read_text()


def test_the_commands_and_the_program_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = []
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL):
        assert main(shlex.split(block)[1:]) == 0
        printed.append(capsys.readouterr().out)
    every, overlapped, unequal, shared, picture = printed
    (shown,) = re.findall(r"```\n(schedule .*?)```", TEXT, re.DOTALL)
    assert [line.rstrip() for line in every.splitlines()] == shown.splitlines()
    assert re.search(r"dualpipe +89 ", overlapped)
    assert "layers of the stages 4 4" in unequal
    assert "1f1b: offset takes 1.06 of the time without messages" in shared
    assert "Picture: " in picture
    assert (tmp_path / "zbv.svg").read_text().startswith("<svg ")
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(program, {})
    assert re.fullmatch(r"\((\d+, ){7}\d+\) 1\d\d\.\d\n", out.getvalue())
