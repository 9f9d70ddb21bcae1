"""Tools that print too much, hang or leave processes; and the kernel's log as it is read."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

from fireflyer.base.units import SECOND
from fireflyer.validators.checks.capture import capture
from fireflyer.validators.checks.commands import run_commands
from fireflyer.validators.checks.files import matching, read_files, read_links
from fireflyer.validators.checks.kernel_log import follow_kmsg, read_kmsg
from fireflyer.validators.core.checks.evidence import KernelRecord, Output
from fireflyer.validators.core.checks.sources import MAX_OUTPUT_BYTES, Command


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Programs in a directory of their own, which is the search path."""
    programs = {
        "says": 'echo "$@"; echo noise >&2',
        "fails": "echo it is broken >&2; exit 3",
        "hangs": f'/bin/sleep 1000 & echo $! > "{tmp_path}/child"; wait',
        "leaves": f'/bin/sleep 1000 & echo $! > "{tmp_path}/child"; echo done',
        "floods": "while :; do printf '%65536s' x; done",
        "dies": "kill -9 $$",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(tools: Path, *argv: str, limit_s: float = 60) -> Output:
    return run_commands([("key", Command(name="n", argv=argv, limit_s=limit_s))], path=str(tools))["key"]


def is_gone(path: Path) -> bool:
    """The process whose number is in the file."""
    pid = int(path.read_text())
    ends_s = time.monotonic() + allowed_s(10)
    while time.monotonic() < ends_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_output_and_exit_code(tools: Path) -> None:
    assert run(tools, "says", "a", "b") == Output("a b\n", 0)
    assert run(tools, "fails") == Output("it is broken\n", 3)


def test_why_there_is_no_output(tools: Path) -> None:
    assert run(tools, "nothing").problem == "nothing is not installed"
    assert run(tools, "dies").problem == "dies was ended by signal 9"


def test_a_tool_that_hangs_is_killed_with_what_it_has_started(tools: Path) -> None:
    output = run(tools, "hangs", limit_s=allowed_s(0.2))
    assert "did not end within" in output.problem
    assert is_gone(tools / "child")


def test_what_a_tool_leaves_behind_is_killed_and_not_waited_for(tools: Path) -> None:
    assert run(tools, "leaves") == Output("done\n", 0)
    assert is_gone(tools / "child")


def test_a_tool_that_prints_without_end_is_killed(tools: Path) -> None:
    output = run(tools, "floods")
    assert output.problem == f"floods printed more than {MAX_OUTPUT_BYTES >> 20} MiB, and was killed"
    assert not output.text
    assert output.hung, "as a user can have what it prints grow"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone is careful")
def test_root_runs_no_program_of_the_site_that_others_can_change(tools: Path) -> None:
    def problem(path: Path) -> str:
        command = Command(name="n", argv=(str(path),), of_site=True)
        return run_commands([("key", command)])["key"].problem

    says, home = tools / "says", tools / "home"
    home.mkdir()
    (home / "link").symlink_to(says)
    assert problem(says) == problem(home / "link") == ""
    home.chmod(0o777)
    assert f"others than its owner may write {home}" in problem(home / "link")
    os.lchown(home / "link", 12345, -1)
    home.chmod(0o755)
    assert "belongs to uid 12345" in problem(home / "link")
    says.chmod(0o757)
    assert "mode 0757" in problem(says)


def test_a_tool_that_hangs_does_not_keep_the_others(tools: Path) -> None:
    commands = [(f"says:{number}", Command(name="says", argv=("says", str(number)))) for number in range(9)]
    hanging = ("hangs", Command(name="hangs", argv=("hangs",), limit_s=allowed_s(0.2)))
    outputs = run_commands([hanging, *commands], path=str(tools))
    assert [outputs[key].text for key, _ in commands] == [f"{number}\n" for number in range(9)]
    assert outputs["hangs"].problem


def test_what_runs_at_the_end_of_a_round_is_ended_and_no_sign_of_a_device_that_hangs(tools: Path) -> None:
    commands = [(f"hangs:{number}", Command(name="n", argv=("hangs",), limit_s=600)) for number in range(5)]
    began_s = time.monotonic()
    outputs = run_commands(commands, path=str(tools), ends_s=began_s + 0.2)
    assert time.monotonic() - began_s < allowed_s(10)
    assert [one.hung for one in outputs.values()] == [False] * 5
    assert {outputs[f"hangs:{number}"].problem for number in range(4)} <= {
        "hangs: the time of the round was over, and it was killed",
        "hangs: the time of the round was over",
    }
    assert outputs["hangs:4"].problem == "hangs: the time of the round was over", "it was not started"


def test_descriptors_do_not_leak(tools: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    run(tools, "says")
    run(tools, "floods")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_tool_runs_once_for_each_device(tools: Path) -> None:
    for name in ("sda", "nvme0n1"):
        (tools / f"sys/block/{name}/device").mkdir(parents=True)
    (tools / "sys/block/loop0").mkdir()
    source = Command(name="says", argv=("says", "/dev/{}"), each="sys/block/*/device")
    evidence = capture([source], 1, root=str(tools), tool_path=str(tools))
    assert {device: output.text for device, output in evidence.outputs_of("says")} == {
        "sda": "/dev/sda\n",
        "nvme0n1": "/dev/nvme0n1\n",
    }


def test_files_by_patterns(tmp_path: Path) -> None:
    for name in ("a1/x", "a2/x", "b1/x"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    assert list(matching("a*/x", str(tmp_path))) == ["a1/x", "a2/x"]
    assert read_files(["a*/x", "nothing", "a1/y"], root=str(tmp_path)).files == {"a1/x": "a1/x", "a2/x": "a2/x"}


def test_a_source_that_has_more_files_than_are_read_is_late(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    assert read_files(["[ab]"], root=str(tmp_path), max_files=2).late == set()
    assert read_files(["[abc]"], root=str(tmp_path), max_files=2).late == {"[abc]"}


def test_a_file_that_is_never_written_does_not_hold_the_round(tmp_path: Path) -> None:
    """As a pipe; a driver that does not answer is left to its thread."""
    os.mkfifo(tmp_path / "pipe")
    assert read_files(["pipe"], root=str(tmp_path), limit_s=allowed_s(5)).files == {"pipe": ""}


def record(number: int, text: str, facility: int = 0) -> bytes:
    return f"{facility << 3 | 6},{number},{number * 10},-;{text}\n".encode()


def test_all_of_the_kernels_log_is_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        theirs.send(record(1, "usb 1-1: new device"))
        theirs.send(record(2, "NVRM: Xid (PCI:0000:3b:00): 79, it is gone"))
        theirs.send(record(3, "NVRM: Xid (PCI:0000:3b:00): 79, by a user", facility=1))
        theirs.send(b"no record")
        theirs.send(record(5, "usb 1-1: reset"))
        found = read_kmsg(ours.fileno(), SECOND)
    assert found.faults == (KernelRecord(2, SECOND + 20_000, "NVRM: Xid (PCI:0000:3b:00): 79, it is gone"),)
    assert (found.sequence, found.problem) == (5, "")


def test_no_xid_is_lost_in_a_storm_of_lines() -> None:
    """Each record is a message of its own, as in /dev/kmsg; the writer never waits for us longer than the buffer."""
    lines, every = 20_000, 500
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wake_r, wake_w = os.pipe()
    found: list[int] = []
    with ours, theirs:
        ours.setblocking(False)
        thread = threading.Thread(
            target=follow_kmsg,
            args=(ours.fileno(), 0, wake_r, lambda one: found.append(one.sequence), lambda _: None),
        )
        thread.start()
        for number in range(1, lines + 1):
            xid = number % every == 0
            theirs.send(record(number, "NVRM: Xid (PCI:0000:3b:00): 63, row" if xid else "zone0: port 2 entered state"))
        theirs.shutdown(socket.SHUT_WR)
        thread.join(allowed_s(60))
        assert not thread.is_alive()
    os.close(wake_r)
    os.close(wake_w)
    assert found == list(range(every, lines + 1, every))


def test_a_follower_ends_when_it_is_woken() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wake_r, wake_w = os.pipe()
    with ours, theirs:
        ours.setblocking(False)
        thread = threading.Thread(target=follow_kmsg, args=(ours.fileno(), 0, wake_r, print, print))
        thread.start()
        os.close(wake_w)
        thread.join(allowed_s(30))
        assert not thread.is_alive()
    os.close(wake_r)


def test_the_first_record_that_is_left_is_told_and_what_was_overwritten_meanwhile_is_counted() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        for number in (40, 41):
            theirs.send(record(number, "usb 1-1: reset"))
        found = read_kmsg(ours.fileno(), SECOND)
    assert (found.oldest, found.sequence, found.lost) == (40, 41, 0)


def test_a_follower_tells_what_was_overwritten_since_another_one_read() -> None:
    for after, lost in ((0, []), (39, []), (30, [9])):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wake_r, wake_w = os.pipe()
        told: list[int] = []
        read: list[int] = []
        with ours, theirs:
            ours.setblocking(False)
            theirs.send(record(40, "usb 1-1: reset"))
            os.close(wake_w)
            follow_kmsg(ours.fileno(), 0, wake_r, print, told.append, on_read=read.append, after=after)
        os.close(wake_r)
        assert (told, read) == (lost, [40])


def test_what_was_not_looked_for_is_told_apart_from_what_is_not_there(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"a{number}").mkdir()
        (tmp_path / f"a{number}/x").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    patterns = ["nothing/*", "loop/*/x", "a[01]/x", "a*/x", "a3/x", "b*/x"]
    found = read_files(patterns, root=str(tmp_path), max_files=3)
    assert set(found.files) == {"a0/x", "a1/x", "a2/x"}
    assert set(found.incomplete) == {"loop/*/x", "a*/x", "a3/x"}
    assert "more than 3 files" in found.incomplete["a*/x"]
    late = read_files(["a0/x"], root=str(tmp_path), limit_s=0)
    assert "a0/x" in late.incomplete


def test_where_mount_points_lead(tmp_path: Path) -> None:
    (tmp_path / "mnt/scratch").mkdir(parents=True)
    (tmp_path / "data").symlink_to("mnt/scratch")
    links, unknown = read_links(["/data", "/mnt", "/nothing"], root=str(tmp_path), limit_s=allowed_s(30))
    assert (links, unknown) == ({"/data": "/mnt/scratch"}, {})
