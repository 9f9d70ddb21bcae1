"""`ff health`: tables, JSON, exit codes; and rounds without end."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.support.patience import allowed_s

from fireflyer.base.errors import TransientError
from fireflyer.base.health_event import HealthEvent
from fireflyer.cli import main
from fireflyer.validators.checks import capture, rounds
from fireflyer.validators.checks.commands import SEARCH_PATH
from fireflyer.validators.checks.journal import Journal
from fireflyer.validators.checks.kernel_log import from_journal
from fireflyer.validators.checks.state_file import StateFile
from fireflyer.validators.core.checks.catalogue import CHECKS
from fireflyer.validators.core.checks.evidence import Output
from fireflyer.validators.core.checks.policy import HealthPolicy

Capture = pytest.CaptureFixture[str]
SITE = """\
version = 1
group = "test"

[[programs]]
name = "site_raid"
argv = ["{program}", "3"]
"""


def site(tmp_path: Path, text: str) -> str:
    program = tmp_path / "check_raid"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    policy = tmp_path / "policy.toml"
    policy.write_text(SITE.format(program=program))
    return str(policy)


def health(tmp_path: Path, *arguments: str) -> int:
    return main(["health", "--state", str(tmp_path / "state"), *arguments])


def test_a_round_says_something_of_each_check(tmp_path: Path, capsys: Capture) -> None:
    code = health(tmp_path, "--json")
    events = [msgspec.json.decode(line, type=HealthEvent) for line in capsys.readouterr().out.splitlines()]
    off = {"gpu_dcgm", "places", "versions", "system", "memory_left", "machine_checks"}
    on = {check.name for check in CHECKS if check.name not in off}
    assert {event.check for event in events} == on
    assert not [event for event in events if "the check failed" in event.words]
    assert code in (0, 1, 2), "of whatever this machine has"
    assert (tmp_path / "state/counters.json").exists()


@pytest.mark.parametrize(("ends", "code", "result"), [("exit 0", 0, "ok"), ("exit 1", 1, "warn"), ("exit 2", 2, "low")])
def test_exit_codes_follow_the_worst_finding(
    tmp_path: Path, capsys: Capture, ends: str, code: int, result: str
) -> None:
    policy = site(tmp_path, f'echo "md0: $1 disks | disks=$1"; {ends}')
    assert health(tmp_path, "--policy", policy, "--check", "site_raid") == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["CHECK", "RESULT", "PART", "WHAT", "WAS", "FOUND"]
    assert lines[1].split()[:3] == ["site_raid", result, "-"]
    assert "md0: 3 disks (disks 3)" in lines[1]


def test_a_check_that_was_asked_for_and_could_not_run(tmp_path: Path, capsys: Capture) -> None:
    assert health(tmp_path, "--policy", site(tmp_path, "exit 3"), "--check", "site_raid") == 3
    assert "not run" in capsys.readouterr().out


def test_the_list_says_what_each_check_reads(tmp_path: Path, capsys: Capture) -> None:
    assert health(tmp_path, "--list", "--policy", site(tmp_path, "")) == 0
    text = capsys.readouterr().out
    for line in (
        "disk_space: ",
        "  runs   nvidia-smi -q -x",
        "  warn_used_share = 0.9",
        "site_raid: ",
        "gpu_dcgm (disabled): ",
        "versions (off until the policy gives a threshold): ",
    ):
        assert f"\n{line}" in text
    of_log = {part.partition(":")[0].strip() for part in re.split(r"\n(?=\S)", text) if "/dev/kmsg" in part}
    assert of_log == {"gpu_xid", "kernel_errors"}, "mounts reads links of mount points"
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--check", "gpu_heat"), "no check 'gpu_heat'; checks are mounts, "),
        (("--policy", "/nothing.toml"), "health policy '/nothing.toml' is not a file"),
        (("--follow", "--check", "mounts"), "--follow runs all enabled checks"),
        (("--no-rounds",), "--no-rounds goes with --follow"),
        (("--chekc", "mounts"), "No such option"),
        (("--every", "soon"), "--every"),
        (("chekc",), "No such command 'chekc'"),
        (("--prometheus", "/nothing/x.prom", "--check", "mounts"), "/nothing"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_is_no_fault_of_the_node(
    tmp_path: Path, capsys: Capture, arguments: tuple[str, ...], said: str
) -> None:
    """UNKNOWN of Nagios: exit code 2 of the validation of a node that is tested says that the node is at fault."""
    assert health(tmp_path, *arguments) == 3
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["group = 7\n", "[health", "[gpu_heat]\nenabled = true\n", "version = 2\n", "\x00"])
@pytest.mark.parametrize("command", [("health",), ("health", "--list"), ("health", "--follow"), ("validate",)])
def test_a_policy_that_is_wrong_is_no_fault_of_the_node(
    tmp_path: Path, capsys: Capture, text: str, command: tuple[str, ...]
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(text)
    assert main([*command, "--policy", str(policy)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [("--only", "nothing"), ("--olny", "memory"), ("--time", "soon"), ("--peers", "/nothing"), ("nodes", "--bad"),
     ("links", "--time", "soon"), ("nodse",)],
)  # fmt: skip
def test_a_wrong_command_line_of_a_validation_is_no_fault_of_the_node(
    capsys: Capture, arguments: tuple[str, ...]
) -> None:
    assert main(["validate", *arguments]) == 3
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code"), [(("health", "--help"), 0), (("validate", "nodes", "--help"), 0),
                            (("health", "slurm", "--bad"), 2), (("health", "rules", "--bad"), 2)],
)  # fmt: skip
def test_help_is_no_error_and_commands_that_are_no_check_have_the_exit_codes_of_others(
    capsys: Capture, arguments: tuple[str, ...], code: int
) -> None:
    assert main(arguments) == code
    capsys.readouterr()


def test_what_the_kernel_logs_between_rounds_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    monkeypatch.setattr(rounds, "open_kmsg", ours.detach)
    told: list[HealthEvent] = []
    seen, stop = threading.Event(), threading.Event()

    def emit(event: HealthEvent) -> None:
        told.append(event)
        if event.cause == "xid_79":
            seen.set()
        elif event.check == "gpu_xid" and event.severity == "ok":  # the first round is over
            now_us = time.monotonic_ns() // 1000
            theirs.send(b"3,7,%d,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n" % now_us)

    rules = HealthPolicy()
    watch = rounds.Watch(rounds.HealthRounds(None), emit)
    thread = threading.Thread(target=watch.run, args=(lambda: (rules, ""), 3600.0, stop), daemon=True)
    with theirs:
        thread.start()
        assert seen.wait(allowed_s(60))
        stop.set()
        watch.wake()
        thread.join(allowed_s(60))
    assert not thread.is_alive()
    assert [(event.severity, event.part) for event in told if event.cause == "xid_79"] == [("high", "gpu:0000:3b:00.0")]


@pytest.mark.processes
def test_rounds_without_end_take_the_new_policy_and_end_at_sigterm(tmp_path: Path) -> None:
    policy = site(tmp_path, "exit 0")
    command = ["-P", "-m", "fireflyer", "health", "--follow", "--every", "1s", "--policy", policy]
    process = subprocess.Popen(
        [sys.executable, *command, "--state", str(tmp_path / "state")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        wanted = ["site_raid", "health_policy", "site_disk"]
        for line in process.stdout:
            event = msgspec.json.decode(line, type=HealthEvent)
            if event.check != wanted[0]:
                continue
            wanted.pop(0)
            if not wanted:
                break
            text = (
                "group = 7\n"
                if event.check == "site_raid"
                else SITE.format(program="/bin/true").replace("raid", "disk")
            )
            Path(f"{policy}.new").write_text(text)
            os.replace(f"{policy}.new", policy)
        assert not wanted
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(allowed_s(30)) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_without_rounds_only_what_the_kernel_logs_is_told_and_a_round_does_not_tell_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xid = b"3,7,%d,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n" % (time.monotonic_ns() // 1000)

    def log(*_: str) -> int:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            theirs.send(xid)
            theirs.send(b"6,9,1,-;usb 1-1: reset\n")
        return ours.detach()

    monkeypatch.setattr(rounds, "open_kmsg", log)
    monkeypatch.setattr(capture, "open_kmsg", log)
    directory, rules, told = str(tmp_path / "state"), HealthPolicy(), list[HealthEvent]()
    watch = rounds.Watch(rounds.HealthRounds(StateFile(directory, only_log=True)), told.append)
    with pytest.raises(TransientError, match="/dev/kmsg has ended"):
        watch.run_log(lambda: (rules, ""), threading.Event())
    assert [(event.cause, event.once) for event in told] == [("xid_79", True)]
    assert os.listdir(directory) == ["log.json"], "it takes nothing from the rounds"
    events = rounds.HealthRounds(StateFile(directory)).run(rules, ["gpu_xid"])
    assert [event.severity for event in events] == ["ok"]
    events = rounds.HealthRounds(StateFile(str(tmp_path / "other"))).run(rules, ["gpu_xid"])
    assert [event.cause for event in events] == ["xid_79"], "a person's rounds have a state of their own"


def test_the_journal_is_followed_where_the_kernels_log_may_not_be_read_and_what_users_write_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round does not tell again what was followed, and knows other numbers than those of /dev/kmsg."""
    now_us = time.time_ns() // 1000
    said = {"__REALTIME_TIMESTAMP": str(now_us), "SYSLOG_FACILITY": "0", "_TRANSPORT": "kernel"}
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    entries = [
        said | {"MESSAGE": "usb 1-1: reset", "__MONOTONIC_TIMESTAMP": "7"},
        said | {"MESSAGE": xid, "__MONOTONIC_TIMESTAMP": "8"},
        said | {"MESSAGE": xid.replace("79", "48"), "_TRANSPORT": "syslog", "__MONOTONIC_TIMESTAMP": "9"},
        said | {"MESSAGE": xid.replace("79", "62"), "SYSLOG_FACILITY": "1", "__MONOTONIC_TIMESTAMP": "10"},
        said | {"MESSAGE": xid.replace("79", "95"), "PADDING": "x" * 100_000, "__MONOTONIC_TIMESTAMP": "11"},
    ]
    (tmp_path / "entries").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in entries))
    (tmp_path / "journalctl").write_text(f"#!/bin/sh\ncat {tmp_path}/entries\n")
    (tmp_path / "journalctl").chmod(0o755)

    def refused(*_: str) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(rounds, "open_kmsg", refused)
    monkeypatch.setattr(capture, "open_kmsg", refused)
    monkeypatch.setattr(rounds, "Journal", partial(Journal, f"{tmp_path}:{SEARCH_PATH}"))
    directory, rules, told = str(tmp_path / "state"), HealthPolicy(), list[HealthEvent]()
    watch = rounds.Watch(rounds.HealthRounds(StateFile(directory, only_log=True)), told.append)
    with pytest.raises(TransientError, match="journalctl has ended"):
        watch.run_log(lambda: (rules, ""), threading.Event())
    assert [(event.cause, event.once) for event in told] == [("xid_79", True)]
    later = rounds.HealthRounds(StateFile(directory), tool_path=f"{tmp_path}:{SEARCH_PATH}")
    assert [event.severity for event in later.run(rules, ["gpu_xid"])] == ["ok"]
    assert later.last_record() == 0
    (tmp_path / "entries").write_bytes(b"")
    watch = rounds.Watch(rounds.HealthRounds(None), told.append, journal=True)
    with pytest.raises(TransientError, match="shows no record of the kernel"):
        watch.run_log(lambda: (rules, ""), threading.Event())


def test_an_account_that_may_not_read_the_journal_is_told_so() -> None:
    said = "No journal files were opened due to insufficient permissions."
    assert said in from_journal(Output(said, 1)).problem
