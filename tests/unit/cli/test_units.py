"""Units of systemd that commands print."""

from __future__ import annotations

import configparser
import getpass
import shlex
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fireflyer.cli.fs.processes import storage_command
from fireflyer.runtime.processes.service_manager import ServiceManager

CONFIG = """
cluster = "lab"
node = 7
managers = ["10.0.0.1:7000"]
host = "10.0.0.7"
port = 7100
secret_file = "/etc/fireflyer/node-secret"
[[targets]]
id = 7001
directory = "/disk1/fireflyer"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "100% of it.toml"
    path.write_text(CONFIG)
    return path


def printed(*words: str | Path) -> configparser.RawConfigParser:
    done = CliRunner().invoke(storage_command, [*map(str, words)], catch_exceptions=False)
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(done.stdout)
    return unit


def test_a_unit_runs_the_command_with_the_absolute_path_of_its_configuration(config: Path) -> None:
    unit = printed("--unit", "system", config)
    assert "%%" in unit["Service"]["ExecStart"], "a percent sign is not replaced by systemd"
    words = shlex.split(unit["Service"]["ExecStart"].replace("%%", "%"))
    assert words == [sys.executable, "-P", "-m", "fireflyer", "fs", "storage", str(config)]
    assert unit["Service"]["Type"] == "notify"
    assert unit["Install"]["WantedBy"] == "multi-user.target"
    assert unit["Service"].get("User", "root") == getpass.getuser()


def test_a_unit_of_a_user_names_no_account_and_keeps_the_log_file(config: Path, tmp_path: Path) -> None:
    unit = printed("--unit", "user", "--log", tmp_path / "log", config)
    assert "User" not in unit["Service"]
    assert f"--log {tmp_path}/log" in unit["Service"]["ExecStart"]
    assert unit["Install"]["WantedBy"] == "default.target"


def test_a_configuration_that_is_wrong_makes_no_unit(config: Path) -> None:
    config.write_text("cluster = 3")
    with pytest.raises(Exception, match="cluster"):
        printed("--unit", "user", config)


def test_the_service_manager_is_told_once_and_children_are_not_to_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        ServiceManager().ready()
        assert told.recv(100) == b"READY=1"
        ServiceManager().ready()  # the variable is gone
        told.setblocking(False)
        with pytest.raises(BlockingIOError):
            told.recv(100)


def test_a_service_manager_that_is_gone_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    ServiceManager().ready()
