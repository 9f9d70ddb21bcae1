"""Logs of a run in its directory, which belongs to an account that may put there what it likes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fireflyer.cluster.agent import run_logs
from fireflyer.cluster.agent.run_logs import LauncherLog, RunLogFiles


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    for attempt in (0, 1):
        (directory / "logs" / f"attempt-{attempt}").mkdir(parents=True)
    (directory / "events.jsonl").write_bytes(b"{}\n")
    (directory / "logs" / "node-0.log").write_bytes(b"supervisor\n")
    (directory / "logs" / "attempt-0" / "rank-0.log").write_bytes(b"first\n")
    (directory / "logs" / "attempt-0" / "rank-0.check.log").write_bytes(b"disk full\n")
    (directory / "logs" / "attempt-1" / "rank-0.log").write_bytes(b"again\n")
    return directory


def test_all_logs_have_their_names(run_dir: Path) -> None:
    files = RunLogFiles(str(run_dir))
    assert files.sizes() == {
        "events": 3,
        "node-0": 11,
        "attempt-0-rank-0": 6,
        "attempt-0-rank-0-check": 10,
        "attempt-1-rank-0": 6,
    }
    assert files.read("attempt-1-rank-0", 2, 100) == b"ain\n"
    assert files.read("attempt-1-rank-0", 6, 100) == b""


def test_other_files_are_no_logs(run_dir: Path) -> None:
    before = RunLogFiles(str(run_dir)).sizes()
    (run_dir / "secret").write_bytes(b"x")
    (run_dir / "logs" / "attempt-0" / "rank-0.error.json").write_bytes(b"x")
    (run_dir / "logs" / "attempt-0" / "rank-00.log").write_bytes(b"x")
    (run_dir / "logs" / "attempt-x").mkdir()
    assert RunLogFiles(str(run_dir)).sizes() == before


def test_no_link_leads_the_agent_out_of_the_run_directory(run_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "rank-7.log").write_bytes(b"the credential of the node")
    logs = run_dir / "logs"
    (logs / "attempt-0" / "rank-1.log").symlink_to(secret / "rank-7.log")
    (logs / "attempt-2").symlink_to(secret)
    os.mkfifo(logs / "attempt-0" / "rank-2.log")
    (logs / "attempt-0" / "rank-3.log").mkdir()
    files = RunLogFiles(str(run_dir))
    found = files.sizes()
    assert not {"attempt-0-rank-1", "attempt-0-rank-2", "attempt-0-rank-3", "attempt-2-rank-7"} & set(found)
    (logs / "attempt-0" / "rank-0.log").unlink()
    (logs / "attempt-0" / "rank-0.log").symlink_to(secret / "rank-7.log")
    with pytest.raises(OSError, match="symbolic links"):
        files.read("attempt-0-rank-0", 0, 100)
    (logs / "attempt-1").rename(logs / "moved")
    (logs / "attempt-1").symlink_to(secret)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        files.read("attempt-1-rank-0", 0, 100)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which only root can")
def test_files_of_others_are_not_read(run_dir: Path) -> None:
    files = RunLogFiles(str(run_dir))
    assert "attempt-0-rank-0" in files.sizes()
    os.chown(run_dir, 65534, 65534)
    assert files.sizes() == {}, "they are root's, as a file is that the account has linked from elsewhere"
    assert files.read("attempt-0-rank-0", 0, 100) == b""


def test_the_number_of_logs_is_bounded(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_logs, "MAX_STREAMS", 3)
    assert len(RunLogFiles(str(run_dir)).sizes()) == 3


def test_attempts_long_over_are_told_once(run_dir: Path) -> None:
    files = RunLogFiles(str(run_dir))
    for attempt in (2, 10):
        (run_dir / "logs" / f"attempt-{attempt}").mkdir()
        (run_dir / "logs" / f"attempt-{attempt}" / "rank-0.log").write_bytes(b"x")
    attempts = [name for name in files.sizes() if name.endswith("rank-0")]
    assert attempts == ["attempt-0-rank-0", "attempt-1-rank-0", "attempt-2-rank-0", "attempt-10-rank-0"]
    attempts = [name for name in files.sizes() if name.endswith("rank-0")]
    assert attempts == ["attempt-2-rank-0", "attempt-10-rank-0"]
    assert files.read("attempt-0-rank-0", 0, 9) == b"first\n"


def test_a_run_directory_that_is_gone_has_no_logs(run_dir: Path, tmp_path: Path) -> None:
    assert RunLogFiles(str(tmp_path / "none")).sizes() == {}
    launcher = LauncherLog(str(tmp_path / "log"))
    assert launcher.sizes() == {}
    (tmp_path / "log").write_bytes(b"it ends\n")
    assert launcher.sizes() == {"launcher": 8}
    assert launcher.read("launcher", 3, 100) == b"ends\n"
