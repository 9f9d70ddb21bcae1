"""`ff ckpt` on checkpoints that belong to another user: real processes, which the kernel refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints.states import SHARD, same, save_all
from tests.support.checkpoints.states import newest as restored
from tests.support.patience import allowed_s

pytestmark = pytest.mark.processes

COMMANDS = """
import contextlib, io, json, sys
from fireflyer.cli.main import main
for line in json.loads(sys.argv[1]):
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["ckpt", *line])
    for stream in (out, err):
        stream.flush()
    print(json.dumps([code, *(stream.buffer.getvalue().decode() for stream in (out, err))]), flush=True)
"""
AS_A_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Of root: modes count for it as for everybody."""


def ff(*lines: tuple[str | Path, ...]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each, by one process that modes of files count for."""
    given: list[list[str]] = [list(map(str, line)) for line in lines]
    command = [*(AS_A_USER if os.geteuid() == 0 else []), sys.executable, "-c", COMMANDS, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=allowed_s(60), check=True)
    found: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(lines), done
    return [(code, out, err) for code, out, err in found]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Two checkpoints, readable to everybody again in the end."""
    save_all(str(tmp_path / "run"), [10, 20], disk=None)
    yield tmp_path / "run"
    for path in (tmp_path, tmp_path / "run", *(tmp_path / "run").glob("step-*[0-9]")):
        path.chmod(0o755)


def refused(found: tuple[int, str, str]) -> bool:
    """In one line, as what it is."""
    code, out, err = found
    return (code, out) == (1, "") and err.count("\n") == 1 and "permission denied" in err and "damaged" not in err


@pytest.mark.parametrize("of", ["directory", "manifest"])
def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged_nor_passed_over(run: Path, of: str) -> None:
    newest = run / "step-00000020"
    (newest if of == "directory" else newest / "manifest.json").chmod(0)
    listed, as_json, verified, *others, removed = ff(
        ("ls", run), ("ls", "--json", run), ("verify", run),
        ("show", run), ("show", newest), ("export", run, run / "out"),
        ("rm", run / "step-00000010"),
    )  # fmt: skip
    assert (listed[0], listed[2]) == (0, "")
    _, row, older = listed[1].splitlines()
    assert "permission denied" in row
    assert "damaged" not in listed[1]
    assert older.endswith("-")
    assert [(one["step"], one["denied"]) for one in map(json.loads, as_json[1].splitlines())] == [
        (20, True),
        (10, False),
    ]
    assert (verified[0], verified[2]) == (1, "")
    assert verified[1].startswith("step-00000020: not read (step 20)\n  ")
    assert "permission denied" in verified[1].splitlines()[1]
    assert verified[1].splitlines()[2].startswith("step-00000010: whole")
    for one in others:
        assert refused(one), one
    assert refused(removed), removed
    assert "nobody can tell whether it is the last whole checkpoint there" in removed[2]
    newest.chmod(0o755)
    (newest / "manifest.json").chmod(0o644)
    assert same(restored(str(run), disk=None), 20)


def test_a_file_that_may_not_be_read_is_not_damaged_either(run: Path) -> None:
    newest = run / "step-00000020"
    (newest / SHARD).chmod(0)
    verified, exported, removed = ff(("verify", newest), ("export", newest, run / "out"), ("rm", newest))
    assert verified[0] == 1
    assert verified[1].startswith("step-00000020: not read (step 20")
    assert "permission denied" in verified[1].splitlines()[1]
    assert removed[0] == 0, "the older one is whole"
    assert refused(exported), exported


def test_a_directory_that_may_not_be_changed_stays_as_it_is(run: Path, tmp_path: Path) -> None:
    older, before = run / "step-00000010", sorted(os.listdir(run))
    older.chmod(0o555)
    (tmp_path / "model").mkdir(mode=0o755)
    changes = (("rm", older), ("rm", "--force", older), ("pin", older), ("export", older, run / "out"))
    assert refused(ff(changes[0])[0]), "its files are another user's"
    assert sorted(os.listdir(run)) == before
    run.chmod(0o555)
    found = ff(*changes, ("verify", run))
    for one in found[:-1]:
        assert refused(one), one
    assert found[-1][0] == 0
    run.chmod(0)
    for one in ff(("ls", run), ("show", run), ("verify", older), ("rm", older), ("pin", older), ("export", run, "out")):
        assert refused(one), one
    run.chmod(0o755)
    assert sorted(os.listdir(run)) == before
