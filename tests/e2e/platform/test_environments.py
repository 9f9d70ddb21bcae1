"""`ff submit --lock`: each node builds the environment of the ranks once; whose fault it is where that fails."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.support.patience import allowed_s
from tests.support.platform.running import RunningPlatform

from fireflyer.cluster.schema.tasks import Cause, Outcome

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT: Final = """\
import os, sys, ours
name = f"{sys.argv[1]}/{sys.argv[2]}.{os.environ['RANK']}"
open(name + ".part", "w").write(f"{ours.X} {os.path.realpath(sys.prefix)}")
os.rename(name + ".part", name + ".result")
"""


def write_wheel(path: Path) -> str:
    """Its SHA-256."""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("ours.py", "X = 42\n")
        wheel.writestr("ours-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
        wheel.writestr(
            "ours-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("ours-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[RunningPlatform]:
    with RunningPlatform(tmp_path / "platform", nodes=2) as running:
        yield running


def submit(platform: RunningPlatform, directory: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fireflyer", "submit", "--platform", str(platform.directory), *arguments],
        cwd=directory, env={**os.environ, "XDG_CACHE_HOME": str(directory.parent / "cache")},
        capture_output=True, text=True, timeout=allowed_s(60), check=False,
    )  # fmt: skip
    assert done.returncode == code, done
    return done.stdout + done.stderr


def number_in(said: str) -> int:
    return int(said.rpartition("task ")[2].split()[0])


def test_nodes_build_what_the_lock_names_once_and_a_bad_lock_ends_the_task(
    platform: RunningPlatform, tmp_path: Path
) -> None:
    results, wheels, directory = tmp_path / "results", tmp_path / "wheels", tmp_path / "experiment"
    for path in (results, wheels, directory):
        path.mkdir()
    good = write_wheel(wheels / "ours-1.0-py3-none-any.whl")
    head = f"--no-index\n--find-links {wheels}\n"
    (directory / "train.py").write_text(SCRIPT)
    (directory / "requirements.lock").write_text(f"{head}ours==1.0 --hash=sha256:{good}\n")
    (directory / "bad.lock").write_text(f"{head}ours==1.0 --hash=sha256:{'0' * 64}\n")
    (directory / "lax.lock").write_text(f"{head}ours==1.0\n")
    client = platform.client()

    def run(name: str, lock: str, nodes: int) -> int:
        options = ("--name", name, "--lock", lock, "--nodes", str(nodes))
        return number_in(submit(platform, directory, *options, "train.py", "--", str(results), name))

    task = run("first", "requirements.lock", 2)
    platform.until(
        client, task, lambda answer: "building the environment on" in answer.why.text, "it says what it does"
    )
    for one in (task, run("second", "requirements.lock", 2)):
        answer = platform.finished(client, one)
        assert answer.task.outcome is Outcome.SUCCEEDED, answer
    places = {}
    for name in ("first", "second"):
        for rank in range(2):
            told, _, place = (results / f"{name}.{rank}.result").read_text().partition(" ")
            assert told == "42"
            places[name, rank] = place
    assert {places["first", 0], places["first", 1]} == {places["second", 0], places["second", 1]}
    assert len(set(places.values())) == 2, "each node has its own"
    said = "".join(path.read_text() for path in platform.directory.glob("**/runs/*/log"))
    assert "building the environment on node" in said, "in the log of the launcher"

    answer = platform.finished(client, run("bad", "bad.lock", 1))
    assert (answer.task.outcome, answer.task.cause) == (Outcome.FAILED, Cause.PROGRAM)
    assert answer.task.requeues == 0
    assert "DO NOT MATCH THE HASHES" in answer.task.reason

    said = submit(platform, directory, "--lock", "lax.lock", "train.py", code=2)
    assert "has no hashes" in said
    said = submit(platform, directory, "--lock", "requirements.lock", "--python", "x", "train.py", code=2)
    assert "contradict" in said
