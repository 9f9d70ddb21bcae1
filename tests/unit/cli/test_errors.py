"""Bad input ends in one line that says what to do, and in an exit code that is not 0."""

from __future__ import annotations

import errno
import io
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec
import pytest

from fireflyer.base.errors import DataCorruption, FireflyerError, JobFailed, NoSpace, PermissionDenied, UsageError
from fireflyer.cli import main
from fireflyer.cli import version as version_verb
from fireflyer.cli.fs.connect import ClusterTarget
from fireflyer.cli.jobs.run import parse_environment, script_arguments
from fireflyer.cli.platform.connect import connection_path
from fireflyer.cluster.client import Connection
from fireflyer.cluster.local.layout import PlatformLayout, new_platform
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.ids import NodeId, RoutingVersion, TargetId
from fireflyer.fs.schema.manager import Answer, GetStatus, Request, Status, TargetStatus
from fireflyer.identity.private_files import write_private_file

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('ran')\n", encoding="utf-8")
    return tmp_path


def error_of(capsys: Capture, argv: list[str], code: int) -> str:
    assert main(argv) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.endswith("\n")
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["rnu"], "no command 'rnu'; did you mean 'ff run'?"),
        (
            ["frobnicate"],
            "commands are run, submit, ps, show, logs, history, exec, shell, stop, suspend, resume, priority, top, "
            "quota, login, whoami, webhook, report, ckpt, agent",
        ),
        (["train.py"], "to run a script: ff run train.py"),
        (["--vresion"], "No such option '--vresion'"),
        (["run"], "Missing argument 'SCRIPT'; see 'ff run --help'"),
        (["submit", "--no-snapshot", "--name", "a b", "train.py"], "--name: 'a b' is no name; a name begins with"),
        (["submit", "--no-snapshot", "--nodelist", "n1,,n2", "train.py"], "--nodelist: '' is no name"),
        (["submit", "--no-snapshot", "--group", "<x>", "train.py"], "--group: '<x>' is no name"),
        (["submit", "--no-snapshot", "--after", "0", "train.py"], "write it like --after 17, or --after 17:ok"),
        (["submit", "--no-snapshot", "--after", "17:okay", "train.py"], "--after '17:okay' is not understood"),
        (["submit", "--no-snapshot", "--array", "0", "train.py"], "0 is not in the range 1<=x<=10000"),
        (["submit", "--no-snapshot", "--watchdog", "soon", "train.py"], "'soon' is no duration; write it like 90s"),
        (["submit", "--no-snapshot", "--constraint", "a,,b", "train.py"], "--constraint: '' is no name"),
        (["submit", "--no-snapshot", "--wrap", "'", "train.py"], "is not understood: No closing quotation"),
        (["submit", "--no-snapshot"], "Missing argument 'SCRIPT'"),
        (
            ["submit", "--port", "8888", "train.py"],
            "--port and --idle belong to --interactive; leave them out, or add it",
        ),
        (["submit", "-i", "--array", "3"], "--array and --interactive contradict each other: a shell runs once"),
        (["submit", "-i", "-f"], "--follow and --interactive contradict each other"),
        (["submit", "-i", "--nodes", "1:2"], "a shell has as many nodes from its begin to its end"),
        (["submit", "--no-snapshot", "--nodes", "4:2", "train.py"], "the first number, the least, must not be above"),
        (["quota", "--all", "set", "--each", "3"], "give options of `ff quota set` after that word"),
        (["reservation", "add", "x", "--nodes", "a", "--until", "soon"], "'soon' is no time; write it like +2h"),
        (["top", "--every", "0s"], "'0s' is no duration"),
        (["logs"], "Missing argument 'TASK'; see 'ff logs --help'"),
        (["logs", "runs/train"], "'runs/train' is not a valid integer"),
        (["logs", "--rank", "-1", "1"], "-1 is not in the range x>=0"),
        (["run", "--nodse", "2", "train.py"], "'--nodes'"),
        (["run", "--nodes", "two", "train.py"], "'two' is not a valid integer"),
        (["run", "--nodes", "", "train.py"], "'' is not a valid integer; see"),
        (["run", "--name", "", "train.py"], "--name '' is empty; give one, or leave the option out for the default"),
        (["run", "--run-dir", "", "train.py"], "--run-dir '' is empty"),
        (["run", "--inject", "kill-rank=0@2min", "train.py"], "kill-rank=3@20s (20 seconds after the start)"),
        (["run", "--nodes", "0", "train.py"], "'--nodes' / '--nnodes': 0 is not in the range"),
        (["run", "--watchdog", "30", "train.py"], "'30' is no duration; write it like 90s, 30m, 2h or 90d"),
        (["run", "--nodes"], "Option '--nodes' requires an argument"),
        (["run", "--devices", "tpu", "train.py"], "'tpu' is not one of"),
        (["run", "--transport", "rdma", "train.py"], "'rdma' is not one of 'tcp', 'ucx', 'auto'"),
        (["run", "--master-port", "70000", "train.py"], "70000 is not in the range"),
        (["run", "trian.py"], "script 'trian.py' does not exist; did you mean 'train.py'?"),
        (["run", "no/such/file.py"], "give the path of a Python file, -m for a module, --no-python for a program"),
        (["run", "."], "is a directory; give a Python file in it"),
        (["run", ""], "SCRIPT is empty"),
        (["run", "-m", ""], "SCRIPT is empty"),
        (["run", "-m", "train.py"], "-m takes the name of a module, and 'train.py' is a file; leave -m out"),
        (["run", "/dev/null"], "is not a regular file"),
        (["run", "--env", "A", "train.py"], "--env 'A' is not understood; write it like --env NAME=value"),
        (["run", "--env", "1A=b", "train.py"], "--env NAME=value"),
        (
            ["run", "--inject", "kill-all", "train.py"],
            "'kill-all' is not understood; write it like kill-node=1@60",
        ),
        (["run", "-m", "--no-python", "train.py"], "exclude each other"),
        (
            ["demo", "--kill-step", "500", "--steps", "100", "--checkpoint-every", "10"],
            "each must be less than the next",
        ),
        (["version", "extra"], "unexpected extra argument"),
        (["exec", "0"], "0 is not in the range"),
        (["shell", "--idle", "0s"], "is no duration"),
        (["manager", "none.toml"], "configuration 'none.toml' is not a file"),
        (["manager", "backup", "none.toml", "kept"], "configuration 'none.toml' is not a file"),
        (["manager", "restore", "none.toml", "kept"], "configuration 'none.toml' is not a file"),
        (["manager", "backup", "none.toml"], "Missing argument 'FILE'; see 'ff manager backup --help'"),
        (
            ["login", "https://a:1", "https://b:1", "--fingerprint", "3f", "--token-file", "none"],
            "1 fingerprints for 2 managers; give --fingerprint once for each URL, or never",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    here: Path, capsys: Capture, argv: list[str], said: str
) -> None:
    assert said in error_of(capsys, argv, 2)


def test_more_ranks_than_devices_and_faults_in_nobody_are_refused_before_anything_starts(
    here: Path, capsys: Capture
) -> None:
    many = error_of(capsys, ["run", "--nodes", "1000", "--ranks-per-node", "16", "train.py"], 2)
    assert "ranks are more than this machine can hold" in many
    assert "there is no node 5; the last one is 1" in error_of(
        capsys, ["run", "--nodes", "2", "--inject", "kill-node=5@1", "train.py"], 2
    )
    assert sorted(path.name for path in here.iterdir()) == ["train.py"]


def test_a_working_directory_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    script = tmp_path / "train.py"
    script.write_text("", encoding="utf-8")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "the working directory does not exist any more" in error_of(capsys, ["run", str(script)], 2)


def test_a_run_directory_in_use_is_refused(here: Path, capsys: Capture) -> None:
    (here / "old").mkdir()
    (here / "old" / "events.jsonl").write_text("", encoding="utf-8")
    assert "choose another one with --run-dir" in error_of(capsys, ["run", "--run-dir", "old", "train.py"], 1)


def test_report_of_no_run_of_an_empty_directory_and_of_a_damaged_log(here: Path, capsys: Capture) -> None:
    assert "run directory 'nowhere' does not exist" in error_of(capsys, ["report", "nowhere"], 1)
    assert "'train.py' is not a directory; give one of ./runs" in error_of(capsys, ["report", "train.py"], 2)
    (here / "empty").mkdir()
    assert "is not the directory of a run: it has no events.jsonl; give one of" in error_of(
        capsys, ["report", "empty"], 2
    )
    (here / "empty" / "events.jsonl").write_bytes(b"{}\n{}\n")
    assert "line 1" in error_of(capsys, ["report", "empty"], 1)


@pytest.fixture
def unused_url() -> Iterator[str]:
    """Nobody listens there, and nobody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("argv", [["ps"], ["whoami"], ["submit", "--no-snapshot", "train.py"], ["quota"]])
def test_a_platform_that_does_not_run_says_how_to_start_it(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, unused_url: str, argv: list[str]
) -> None:
    monkeypatch.delenv("FIREFLYER_PLATFORM", raising=False)
    for name, start in (("platform", "ff up -d ("), ("my lab", "ff up -d --dir 'my lab' (")):
        layout = PlatformLayout(name)
        layout.make_directory()
        layout.save(new_platform(1, 1, 0))
        connection = Connection(url=unused_url, token="t")
        write_private_file(layout.connection_file, msgspec.json.encode(connection))
        said = error_of(capsys, argv if name == "platform" else [*argv[:1], "--platform", name, *argv[1:]], 1)
        assert f"{unused_url} cannot be reached" in said
        assert f"; if it does not run, start it again: {start}" in said


def test_a_platform_of_a_login_that_does_not_answer_says_to_log_in_again(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, unused_url: str
) -> None:
    monkeypatch.delenv("FIREFLYER_PLATFORM", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "config"))
    os.makedirs(os.path.dirname(connection_path()))
    write_private_file(connection_path(), msgspec.json.encode(Connection(url=unused_url, token="t")))
    said = error_of(capsys, ["ps"], 1)
    assert f"{connection_path()} names it: if it has moved, log in again (ff login URL)" in said


def test_a_platform_that_is_not_there_is_told_with_what_named_it(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREFLYER_PLATFORM", "lab")
    said = error_of(capsys, ["ps"], 2)
    assert said.startswith("error: the environment variable FIREFLYER_PLATFORM is 'lab': there is no such file")
    assert error_of(capsys, ["ps", "--platform", "x"], 2).startswith("error: --platform 'x': there is no such file")
    said = error_of(capsys, ["status"], 1)
    assert f"{here}/lab holds no platform of `ff up`; start one: ff up -d, or name its directory with --dir" in said
    assert f"{here}/x holds no platform" in error_of(capsys, ["status", "--platform", "x"], 1), "as of other commands"
    assert f"{here}/x holds no platform" in error_of(capsys, ["down", "--platform", "x", "--grace", "0s"], 1)


def test_a_platform_of_another_user_is_to_be_logged_in_to(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FIREFLYER_PLATFORM", raising=False)
    layout = PlatformLayout("platform")
    layout.make_directory()
    layout.save(new_platform(1, 1, 0))
    write_private_file(layout.connection_file, b"{}")

    def refused(path: str, _: int) -> bytes:
        raise PermissionDenied(f"read {path}: permission denied; check the owner and mode of the path")

    monkeypatch.setattr("fireflyer.cluster.local.layout.read_private_file", refused)
    monkeypatch.setattr("fireflyer.cluster.client.read_private_file", refused)
    for command in ("ps", "status", "down"):
        assert "check the owner and mode of the path" in error_of(capsys, [command], 1), "it is this user's own"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for command in ("ps", "status"):
        assert "platform was started by another user; log in to it: ff login URL" in error_of(capsys, [command], 1)
    said = error_of(capsys, ["down"], 1)
    assert "platform was started by another user, who can end it; you may stop your own tasks: ff stop TASK" in said


def test_a_directory_that_is_not_there_is_not_searched_for_a_script(here: Path, capsys: Capture) -> None:
    said = error_of(capsys, ["submit", "--directory", "nodir", "train.py"], 2)
    assert f"--directory {here}/nodir is no directory" in said


def test_a_node_is_not_added_for_a_target_that_another_one_has(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would stay without targets, and count as lost."""
    status = Status(RoutingVersion(1), 1, (), (TargetStatus(TargetId(1001), NodeId(1), None, False, None),), ())
    asked: list[Request] = []

    def answer(_: ClusterTarget, requests: list[Request]) -> list[Answer]:
        asked.extend(requests)
        return [status for _ in requests]

    monkeypatch.setattr("fireflyer.cli.fs.admin.machines.ask_all", answer)
    write_private_file(str(tmp_path / "token"), b"fft1.0123.secret")
    where = ["--manager", "127.0.0.1:1", "--token-file", str(tmp_path / "token")]
    said = error_of(capsys, ["fs", "admin", "register-node", *where, "--node", "9", "--target", "1001"], 2)
    assert "target 1001 belongs to node 1 already; give another id" in said
    assert [type(one) for one in asked] == [GetStatus]


def test_no_arguments_show_the_help(capsys: Capture) -> None:
    assert main([]) == 2
    assert "For researchers:" in capsys.readouterr().err
    assert main(["run", "--help"]) == 0
    assert "--max-restarts" in capsys.readouterr().out


def raising(error: BaseException) -> Callable[[], None]:
    def installed_versions() -> None:
        raise error

    return installed_versions


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("wrong\nargument"), 2, "error: wrong argument\n"),
        (JobFailed("rank 3 died", exit_code=137), 137, "error: rank 3 died\n"),
        (DataCorruption("shard 1 is damaged"), 1, "error: shard 1 is damaged\n"),
        (NoSpace("disk full; free some"), 1, "error: disk full; free some\n"),
        (FireflyerError("something"), 1, "error: something\n"),
        (
            OSError(28, "No space left on device", "/x/report.html"),
            1,
            "error: /x/report.html: No space left on device\n",
        ),
        (click.ClickException("clicked"), 1, "error: clicked\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (KeyError("k"), 1, "error: internal error: KeyError: 'k'; 'ff --debug …' shows where it happened\n"),
    ],
)
def test_every_error_is_one_line_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: BaseException, code: int, said: str
) -> None:
    monkeypatch.setattr(version_verb, "installed_versions", raising(error))
    assert main(["version"]) == code
    shown = capsys.readouterr().err
    assert shown.lstrip("\n") == said


def test_debug_shows_where_it_happened(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(version_verb, "installed_versions", raising(KeyError("k")))
    assert main(["--debug", "version"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("shows where it happened\n")


def test_what_belongs_to_the_script_goes_to_the_script() -> None:
    assert script_arguments(("--", "--steps", "5")) == ("--steps", "5")
    assert script_arguments(("--steps", "5", "--", "-x")) == ("--steps", "5", "--", "-x")
    assert script_arguments(("--", "--")) == ("--",)
    assert script_arguments(()) == ()


def test_environment_values_may_hold_anything() -> None:
    assert parse_environment(("A=1", "B=", "C=x=y")) == {"A": "1", "B": "", "C": "x=y"}


def test_version_names_what_matters(capsys: Capture) -> None:
    assert main(["version"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["fireflyer", "python", "torch", "kernels"]


def test_an_error_of_a_file_names_it(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise file_error(errno.ENOENT, path="/none/x")

    monkeypatch.setattr(version_verb.command, "callback", refused)
    assert error_of(capsys, ["version"], 1) == "error: /none/x: no such file or directory\n"


def test_a_join_token_that_was_never_made_is_named_as_the_cause(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    said = error_of(capsys, ["agent", "join", "head:9441"], code=2)
    assert "no token was given: the command that was to print it has failed" in said


@pytest.mark.parametrize("command", [["dump", "metadata.ffdump"], ["fsck"]])
def test_a_store_that_is_not_there_is_not_made_to_be_read(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = error_of(capsys, ["fs", "admin", *command, "--store", f"embedded:{tmp_path}/store"], code=1)
    assert f"there is no key-value store {tmp_path}/store" in said
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_rows_is_not_dumped(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    file = tmp_path / "metadata.ffdump"
    said = error_of(capsys, ["fs", "admin", "dump", "--store", f"embedded:{tmp_path}/store", str(file)], code=2)
    assert "the store is empty, so nothing was written" in said
    assert not file.exists()


def test_a_port_that_speaks_no_tls_is_said_so(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("fft1.0011223344556677.secret\n"))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as beside:
        answered = beside.submit(_answer_in_clear, server)
        address = f"https://127.0.0.1:{server.getsockname()[1]}"
        said = error_of(capsys, ["login", address, "--fingerprint", "0" * 64], code=1)
        answered.result()
    assert "what listens there speaks no TLS; give the address that `ff manager` prints first" in said


def _answer_in_clear(server: socket.socket) -> None:
    peer, _ = server.accept()
    with peer:
        peer.recv(1 << 16)
        peer.sendall(b"not TLS at all, but a protocol of our own")
