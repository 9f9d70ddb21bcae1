"""What docs/how-to/mount.md tells users to type works, with a repository of this machine in place of one elsewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
from tests.support.fs.mounts.mounting import needs_fuse
from tests.support.how_to import Shell

pytestmark = [needs_fuse, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

TEXT: Final = (Path(__file__).parents[3] / "docs/how-to/mount.md").read_text()
ELSEWHERE: Final = "https://example.org/project.git"


def test_a_project_is_cloned_into_a_mount_and_made_there(tmp_path: Path) -> None:
    project = tmp_path / "project.git"
    project.mkdir()
    (project / "Makefile").write_text("all:\n\techo made > made\n")
    git = ["git", "-C", str(project), "-c", "user.name=ann", "-c", "user.email=ann@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (block,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    assert ELSEWHERE in block
    *before, unmount = block.replace(ELSEWHERE, str(project)).splitlines()
    shell = Shell(tmp_path)
    with shell.chunk_store(TEXT):
        try:
            shell.run("sh", "-ec", "\n".join(before))
            assert (tmp_path / "here/project/made").read_text() == "made\n"
        finally:
            shell.run("sh", "-c", unmount.removeprefix("cd .. && "))
        assert not list((tmp_path / "here").iterdir())
        assert shell.run("ff", "fs", "cat", "--dir", "fs", "/project/made") == "made\n"
