"""Whose tests have passed leaves nothing in the directory that they shared, while others still run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.patience import allowed_s

ROOT = Path(__file__).resolve().parents[3]
SHARED = """
import os, pytest

@pytest.fixture(scope="module")
def store(module_path):
    (module_path / "large").write_bytes(b"x")
    yield module_path
    print("closed:", os.listdir(module_path))

def test_one(store, session_path):
    (session_path / "of all").write_bytes(b"y")
    open("used", "a").write(f"{store}\\n")

def test_other(store):
    assert OTHER
"""
AFTER = """
import os

def test_what_is_left(session_path):
    used = open("used").read().split()
    assert [os.path.exists(path) for path in used] == [False, True]
    assert os.listdir(session_path) == ["of all"]
"""


def run(directory: Path) -> str:
    """What pytest says of the tests in `directory`."""
    (directory / "empty.ini").write_text("[pytest]\n")
    options = ["-c", "empty.ini", "--rootdir", ".", "-p", "no:cacheprovider", "-p", "tests.support.shared_paths", "-s"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "pytest", *options, "--basetemp", str(directory / "base")]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=allowed_s(100), check=False
    )
    return done.stdout + done.stderr


def test_a_shared_directory_goes_when_its_tests_have_passed_and_stays_when_one_has_failed(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(SHARED.replace("OTHER", "True"))
    (tmp_path / "test_b.py").write_text(SHARED.replace("OTHER", "False"))
    (tmp_path / "test_c.py").write_text(AFTER)
    said = run(tmp_path)
    assert "4 passed" in said, said
    assert "1 failed" in said, said
    assert said.count("closed: ['large']") == 2, "the fixture that used it has ended before"
    kept = [os.listdir(path) for path in (tmp_path / "base").iterdir() if path.is_dir() and not path.is_symlink()]
    assert sorted(map(sorted, kept)) == [["large"], ["of all"]]


def test_that_of_the_session_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(SHARED.replace("OTHER", "True"))
    said = run(tmp_path)
    assert "2 passed" in said, said
    assert not [path for path in (tmp_path / "base").iterdir() if path.is_dir() and not path.is_symlink()]
