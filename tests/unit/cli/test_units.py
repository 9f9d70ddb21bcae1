"""Units of systemd that commands print."""

from __future__ import annotations

import configparser
import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fireflyer.cli.fs.processes import storage_command
from fireflyer.cli.main import main
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


CONFIGS = {
    "fs manager": ('name = "m"\ncluster = "lab"\nstore = "embedded:/x"\nlisten = "a:7000"\nsecret_file = "/s"', ()),
    "fs storage": (CONFIG, ()),
    "fs meta": (
        'name = "m"\ncluster = "lab"\nstore = "postgresql://a/b"\nlisten = "a:7001"\nmanagers = ["a:7000"]\n'
        'secret_file = "/s"',
        (),
    ),
    "manager run": (
        f'name = "m"\ncluster = "{"5f" * 16}"\nstore = "embedded:/x"\ndirectory = "/d"\nsecret_file = "/s"',
        (),
    ),
    "host run": (
        f'cluster = "{"5f" * 16}"\nstore = "postgresql://a/b"\n[[hosts]]\nname = "a"\nmanager = true',
        ("--name", "a"),
    ),
}


@pytest.mark.slow  # systemd is of the packages of slow tests
@pytest.mark.parametrize("kind", ["system", "user"])
@pytest.mark.parametrize("command", [*CONFIGS, "fs mount"])
def test_systemd_takes_every_unit(command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    analyze = shutil.which("systemd-analyze")
    assert analyze is not None, "no systemd-analyze; run scripts/system-packages systemd"
    assert main(words_of(command, kind, tmp_path)) == 0
    unit = tmp_path / "fireflyer-x.service"
    unit.write_text(capsys.readouterr().out)
    verify = [analyze, *(["--user"] if kind == "user" else []), "verify", "--man=no", str(unit)]
    done = subprocess.run(
        verify, capture_output=True, text=True, check=False, env=os.environ | {"XDG_RUNTIME_DIR": "/run"}
    )
    assert (done.returncode, done.stderr) == (0, "")


def words_of(command: str, kind: str, directory: Path) -> list[str]:
    if command == "fs mount":
        return mount_words(directory, "--unit", kind)
    text, options = CONFIGS[command]
    path = directory / "100% of it.toml"
    path.write_text(text)
    return [*command.split(), "--unit", kind, *options, str(path)]


def mount_words(directory: Path, *options: str, place: str = "a place") -> list[str]:
    (directory / "a place").mkdir(exist_ok=True)
    secret = directory / "secret"
    secret.write_bytes(bytes(32))
    secret.chmod(0o600)
    where = ("--manager", "a:7000", "--manager", "b:7000", "--secret-file", os.path.relpath(secret))
    return ["fs", "mount", *where, *options, str(directory / place)]


def test_the_unit_of_a_mount_has_its_options_with_absolute_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--allow-other", "--read-only", "--metrics", "127.0.0.1:9464", "--unit", "system")
    assert main(mount_words(tmp_path, *options)) == 0
    printed = capsys.readouterr().out
    unit = configparser.RawConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(printed)
    words = shlex.split(unit["Service"]["ExecStart"])
    where = ["--manager", "a:7000", "--manager", "b:7000", "--secret-file", str(tmp_path / "secret")]
    assert words[4:] == ["fs", "mount", *where, *options[:-2], str(tmp_path / "a place")]
    assert "NoNewPrivileges" not in unit["Service"], "a user mounts by a program with more rights"
    assert shlex.split(unit["Service"]["ExecStopPost"])[-4:] == ["fs", "umount", "--lazy", str(tmp_path / "a place")]
    assert "fireflyer-mount-" in printed.splitlines()[1]


@pytest.mark.parametrize(
    ("options", "place", "said"),
    [
        (("-d", "--unit", "system"), "a place", "--unit cannot be combined with --detach"),
        (("--log", "x", "-d", "--unit", "user"), "a place", "--unit cannot be combined with --detach"),
        (("--unit", "user"), "missing", "is no directory; make it"),
    ],
)
def test_a_mount_that_cannot_be_a_unit_is_refused(
    options: tuple[str, ...], place: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(mount_words(tmp_path, *options, place=place)) == 2
    assert said in capsys.readouterr().err
