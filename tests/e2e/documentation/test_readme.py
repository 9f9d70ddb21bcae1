"""The commands of README.md, typed letter for letter in a directory that has what they name: `.venv/bin/ff`, `src` and
`docs`. `make demo` and `make test` are what continuous integration runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Final

import pytest
from tests.support.fs.mounts.mounting import needs_fuse
from tests.support.how_to import Shell
from tests.support.jobs.cleanup import cleaned_up_at_exit

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT: Final = Path(__file__).parents[3]
TEXT: Final = (ROOT / "README.md").read_text()
FF: Final = (sys.executable, "-P", "-m", "fireflyer")


def blocks() -> dict[str, list[str]]:
    """Blocks of commands by the heading above them."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if not language:
                found.setdefault(title, []).append(block)
    return found


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """In a copy of the repository, as far as the commands look at it."""
    monkeypatch.delenv("FIREFLYER_PLATFORM", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("src", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    made = Shell(tmp_path)
    made.run("true")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/bin").symlink_to(tmp_path / "bin")
    return made


def typed(shell: Shell, command: str, limit_s: float = 600) -> str:
    """What a line of README prints, on both outputs."""
    return shell.run("bash", "-c", f"{command}\n", limit_s=limit_s)


def test_every_block_of_commands_is_run_here_or_by_continuous_integration() -> None:
    found = blocks()
    assert [(title, len(texts)) for title, texts in found.items()] == [
        ("Two commands", 1),
        ("Your own script", 2),
        ("Many users, few nodes", 1),
        ("A file system", 1),
        ("Shell completion", 1),
        ("The parts", 1),
    ]
    runs = (ROOT / ".ci/run").read_text().splitlines()
    made = [line.partition("#")[0].strip() for line in found["Two commands"][0].splitlines()]
    assert made == ["make demo", "make test"]
    assert set(made) <= set(runs)


def test_the_script_trains_and_survives_a_node_and_becomes_a_task(shell: Shell) -> None:
    found = blocks()
    train, kill = found["Your own script"]
    said = typed(shell, train.replace("\n.venv", " &&\n.venv"))
    assert re.search(r"Steps +200 ", said), said
    assert re.search(r"Failures +0 ", said)
    said = typed(shell, kill)
    assert re.search(r"Failures +1 ", said), said
    assert "all ranks exited with code 0" in said

    (block,) = found["Many users, few nodes"]
    up, *rest, down = block.splitlines()
    assert down == ".venv/bin/ff down"
    with cleaned_up_at_exit((*FF, "down", "--force", "--dir", str(shell.directory / "platform"))):
        assert "The platform is up: 4 nodes" in typed(shell, up)
        printed = "".join(typed(shell, line) for line in rest)
        assert "task 1 submitted" in printed
        assert "RUN  STATE" in printed
        assert "has stopped" in typed(shell, down)


@needs_fuse
def test_the_file_system_is_filled_and_mounted(shell: Shell) -> None:
    (block,) = blocks()["A file system"]
    *before, last = block.splitlines()
    with cleaned_up_at_exit((*FF, "fs", "down", "--force", "--dir", str(shell.directory / "fs"))):
        try:
            printed = typed(shell, " &&\n".join(line.partition("#")[0] for line in before))
            assert (shell.directory / "mnt/docs/README.md").read_text() == (ROOT / "docs/README.md").read_text()
            assert "3 of 3 nodes alive" in printed
        finally:
            typed(shell, last)
    assert not os.path.ismount(shell.directory / "mnt")


def test_completion_is_loaded_by_each_shell_that_is_here(shell: Shell) -> None:
    (block,) = blocks()["Shell completion"]
    lines = dict(zip(("bash", "zsh", "fish"), block.splitlines(), strict=True))
    assert shutil.which("bash")
    for program, line in lines.items():
        if shutil.which(program):
            first = "autoload -U compinit && compinit -D && " if program == "zsh" else ""
            shell.run(program, "-c", first + line)
