"""The benchmark of the chunk store runs and verifies what it reads. Its figures are not judged. The simplest cases run
for every commit, the other families take turns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from bench.report import Result
from tests.support.campaigns.shards import rotating
from tests.support.fs.mounts import mounting
from tests.support.network import namespaces
from tests.support.patience import allowed_s

REPOSITORY = Path(__file__).parents[3]


pytestmark = pytest.mark.processes

NEEDED = {"incast": namespaces.missing(), "mount": mounting.missing()}
OTHERS = [("incast", "incast"), ("recovery", "recovery"), ("growth", "growth/*"), ("names", "names/*")]
OTHERS += [("files", "files/*"), ("loading", "loading/*"), ("mount", "mount")]


def measured(directory: Path, *patterns: str) -> list[Result]:
    command = [sys.executable, "-m", "bench", "fs", "--tiny"]
    command += [word for pattern in patterns for word in ("--only", pattern)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=allowed_s(300), check=False
    )
    assert run.returncode == 0, run.stderr
    assert not namespaces.missing() or namespaces.missing() in run.stdout
    lines = (directory / "build/bench/fs.jsonl").read_bytes().splitlines()
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    for result in results:
        assert result.ours.median > 0, result
        beside_peers = result.case.startswith(("names/", "files/", "loading/"))
        beside_peers |= result.case.endswith("/memory of a chunk")
        assert beside_peers or (result.bound is not None and result.bound.value > 0)
    return results


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_reads_delays_and_writes_are_measured_beside_their_bounds(tmp_path: Path) -> None:
    results = measured(tmp_path, "read/*", "delay/*", "write/*")
    assert {result.case.split("/")[0] for result in results} == {"read", "delay", "write"}


@pytest.mark.parametrize(
    ("family", "pattern"), [pytest.param(*one, id=one[0], marks=rotating(expected_s=6)) for one in OTHERS]
)
def test_a_family_of_cases_runs_beside_its_bounds(family: str, pattern: str, tmp_path: Path) -> None:
    if missing := NEEDED.get(family, ""):
        pytest.skip(missing)
    assert {result.case.split("/")[0] for result in measured(tmp_path, pattern)} == {family}


def test_each_module_of_cases_is_run_by_a_test() -> None:
    """A new one belongs to a pattern above, or is a new family."""
    known = {"basics", "growth", "incast", "loading", "many_chunks", "many_names", "mounted", "names", "record_sets"}
    modules = {path.stem for path in (REPOSITORY / "bench/fs/cases").glob("*.py")}
    assert modules - {"__init__"} == known | {"recovery", "streams"}
