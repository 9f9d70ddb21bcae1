"""What docs/how-to/own-script.md says, typed letter for letter: from a plain loop to a task on a platform."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from tests.support.how_to import Shell

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

TEXT: Final = (Path(__file__).parents[3] / "docs/how-to/own-script.md").read_text()
END: Final = re.compile(r"rank (\d): step 200, weights (-?\d+\.\d{12})$", re.MULTILINE)


def write_scripts(directory: Path) -> list[str]:
    """Their names, as their first lines have them."""
    scripts = re.findall(r"^```python\n(# (\S+).*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    for text, name in scripts:
        (directory / name).write_text(text)
    return [name for _, name in scripts]


def commands() -> list[list[list[str]]]:
    """By block, as words."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [[line.split() for line in block.splitlines()] for language, block in blocks if not language]


def weights(printed: str) -> set[str]:
    """What both ranks end with; one value where they agree."""
    found = END.findall(printed)
    assert sorted(rank for rank, _ in found) == ["0", "1"], printed
    return {value for _, value in found}


def test_a_plain_loop_becomes_a_task_that_survives_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREFLYER_PLATFORM", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert write_scripts(tmp_path) == ["plain.py", "parallel.py", "train.py"]
    plain, parallel, train, death, platform = commands()
    shell = Shell(tmp_path)

    assert re.fullmatch(r"step 200, loss 0\.0\d+\n", shell.run(*plain[0]))
    assert (
        len(re.findall(r"rank [01]: step 200, loss of its part 0\.0\d+$", shell.run(*parallel[0]), re.MULTILINE)) == 2
    )

    undisturbed = weights(shell.run(*train[0]))
    assert len(undisturbed) == 1, "both ranks have the same weights"
    assert [line.split()[1] for line in shell.run(*train[1]).splitlines()[1:]] == ["200", "180"]
    assert weights(shell.run(*train[0])) == undisturbed, "the same again has no steps left"

    killed = shell.run(*death[0])
    assert weights(killed) == undisturbed
    assert re.search(r"Resumed +from step 140 ", killed)

    shell.run(*platform[0])
    with shell.ended_platform():
        assert weights(shell.run(*platform[1])) == undisturbed
        assert "finished, succeeded" in shell.run(*platform[2])
        assert "step-00000200" in shell.run(*platform[3])
        assert platform[4:] == [["ff", "down"]]
