"""Commands in tasks that run: `ff exec` and `ff shell` on a platform of real processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.network.free_ports import free_port
from tests.support.patience import allowed_s
from tests.support.platform.running import RunningPlatform, task_of, wait_for

from fireflyer.base.errors import PermissionDenied, UsageError
from fireflyer.cluster.client import Client, Connection, read_connection
from fireflyer.cluster.core.platform.commands import StopTask
from fireflyer.cluster.schema.execs import ExecProgram, ExecRequest
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, TaskState

pytestmark = pytest.mark.processes

SLEEP: Final = "import time\ntime.sleep(3600)\n"
COPY: Final = "import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer); sys.exit(7)"


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    directory = tmp_path_factory.mktemp("execs") / "platform"
    with RunningPlatform(directory, nodes=2, users=("ada", "bob")) as running:
        yield running


@pytest.fixture(scope="module")
def task(platform: RunningPlatform, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of ada, on one node."""
    script = tmp_path_factory.mktemp("script") / "train.py"
    script.write_text(SLEEP)
    ada = platform.client("ada")
    (number,) = ada.submit(task_of(script, "runs", max_restarts=0), key="runs")
    platform.until(ada, number, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    return number


def connection_of(platform: RunningPlatform, user: str, token: str = "") -> Path:
    """A file as `ff login` writes it."""
    import msgspec

    known = read_connection(platform.layout.connection_file)
    mine = Connection(url=known.url, token=token or platform.tokens[user], fingerprint=known.fingerprint)
    path = platform.directory / f"{user}{'-other' if token else ''}.json"
    path.write_bytes(msgspec.json.encode(mine))
    path.chmod(0o600)
    return path


def ff(platform: RunningPlatform, verb: str, *arguments: str, user: str = "ada", token: str = "") -> list[str]:
    where = str(connection_of(platform, user, token))
    return [sys.executable, "-P", "-m", "fireflyer", verb, "--platform", where, *arguments]


def run(platform: RunningPlatform, *arguments: str, data: bytes = b"", **options: str) -> Any:
    command = ff(platform, "exec", *arguments, **options)
    return subprocess.run(command, input=data, capture_output=True, timeout=allowed_s(60), check=False)


def lives(word: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


def read_until(fd: int, text: bytes) -> bytes:
    said = b""
    until_s = time.monotonic() + allowed_s(30)
    while text not in said:
        assert time.monotonic() < until_s, said
        with contextlib.suppress(BlockingIOError):
            piece = os.read(fd, 65536)
            assert piece, said
            said += piece
            continue
        time.sleep(0.01)
    return said


def test_input_and_output_pass_byte_for_byte_and_the_exit_code_is_the_commands(
    platform: RunningPlatform, task: int
) -> None:
    data = random.Random(1).randbytes(5_000_000)
    done = run(platform, str(task), "--", sys.executable, "-c", COPY, data=data)
    assert (done.returncode, done.stderr) == (7, b"")
    assert done.stdout == data
    script = 'echo "$RANK $WORLD_SIZE $FF_TASK_ID $PWD"; echo wrong >&2; kill -9 $$'
    done = run(platform, str(task), "--rank", "0", "--", "sh", "-c", script)
    view = platform.client("ada").task(task).task
    assert view.spec is not None
    assert done.stdout.decode() == f"0 1 {task} {view.spec.program.workdir}\n"
    assert (done.returncode, done.stderr) == (137, b"wrong\n")


def test_only_the_user_of_a_task_and_administrators_run_commands_in_it(platform: RunningPlatform, task: int) -> None:
    admin = platform.client()
    asked = ExecRequest(program=ExecProgram(argv=("true",)))
    for roles in ((), ("platform:operator",)):
        for role in roles:
            admin.grant_role("bob", role)
        with pytest.raises(PermissionDenied, match="belongs to ada"):
            platform.client("bob").ask_exec(task, asked)
    assert admin.ask_exec(task, asked).node
    done = run(platform, str(task), "--", "true", user="bob")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"belongs to ada; only they and administrators" in done.stderr
    log = (platform.directory / "manager" / "log").read_text()
    assert re.search(rf"admin: exec {task}: on agent-[12] from 127\.0\.0\.1: true", log), "the audit"
    assert not re.search(rf"bob: exec {task}", log)


def test_what_cannot_be_is_refused_in_one_line(platform: RunningPlatform, task: int) -> None:
    ada = platform.client("ada")
    program = ExecProgram(argv=("true",))
    with pytest.raises(UsageError, match="ranks 0 to 0"):
        ada.ask_exec(task, ExecRequest(rank=1, program=program))
    with pytest.raises(UsageError, match="does not run on elsewhere"):
        ada.ask_exec(task, ExecRequest(node="elsewhere", program=program))
    with pytest.raises(UsageError, match="no interactive task"):
        ada.ask_exec(task, ExecRequest(program=program, ends_task=True))
    done = run(platform, str(task), "--", "/no/such/program")
    assert (done.returncode, done.stderr) == (127, b"error: /no/such/program: No such file or directory\n")


def test_a_command_is_killed_when_its_client_is(platform: RunningPlatform, task: int) -> None:
    script = "setsid sleep 86401 & echo started; exec sleep 86402"
    client = subprocess.Popen(
        ff(platform, "exec", str(task), "--", "sh", "-c", script), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        wait_for(lambda: lives("86401") and lives("86402"), "both run")
    finally:
        client.kill()
        client.communicate()
    wait_for(lambda: not lives("86401") and not lives("86402"), "they are gone")


@pytest.mark.slow
def test_fifty_megabytes_each_way(platform: RunningPlatform, task: int) -> None:
    data = random.Random(2).randbytes(50_000_000)
    done = run(platform, str(task), "--", "cat", data=data)
    assert done.returncode == 0, done.stderr
    assert done.stdout == data


@pytest.mark.slow
def test_a_terminal_has_the_users_size_and_its_keys_are_the_programs(platform: RunningPlatform, task: int) -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 101, 0, 0))
    command = ff(platform, "exec", str(task), "--", "sh", "-i")
    client = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                              env={**os.environ, "PS1": "", "TERM": "xterm"})  # fmt: skip
    try:
        os.write(ours, b"tty; stty size; echo $TERM-end\n")
        said = read_until(ours, b"xterm-end")
        assert b"31 101" in said
        assert b"/dev/pts/" in said
        os.write(ours, b"echo sl''eeping; sleep 86403\n")
        read_until(ours, b"sleeping")
        wait_for(lambda: lives("86403"), "it sleeps")
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        client.send_signal(signal.SIGWINCH)
        os.write(ours, b"\x03")
        wait_for(lambda: not lives("86403"), "Ctrl-C ended it, and not the session")
        os.write(ours, b"stty size; exit 9\n")
        read_until(ours, b"40 120")
        assert client.wait(allowed_s(30)) == 9
    finally:
        client.kill()
        client.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.slow
def test_a_reader_that_takes_nothing_stops_the_program_and_no_memory_grows(
    platform: RunningPlatform, task: int
) -> None:
    manager = next(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"\0manager\0" in path.read_bytes() and str(platform.directory).encode() in path.read_bytes()
    )

    def resident_kib() -> int:
        return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{manager}/status").read_text())[0])

    # The client writes both streams in turn, so the first number is through before output begins that nobody reads.
    script = "import os\nn = 1\nos.write(2, b'1\\n')\nos.read(0, 1)\n"
    script += "while True:\n    n += os.write(1, bytes(65536)); os.write(2, b'%d\\n' % n)"
    before = resident_kib()
    client = subprocess.Popen(
        ff(platform, "exec", str(task), "--", sys.executable, "-c", script),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert client.stdin is not None
        assert client.stderr is not None
        assert client.stderr.readline() == b"1\n"
        client.stdin.write(b"x")
        client.stdin.flush()
        written = [1]
        os.set_blocking(client.stderr.fileno(), False)

        def stands() -> bool:
            new = re.findall(rb"(\d+)\n", client.stderr.read() or b"")  # type: ignore[union-attr]
            if new:
                written[0] = int(new[-1])
                stood_s[0] = time.monotonic()
            return written[0] > 0 and time.monotonic() - stood_s[0] > 2

        stood_s = [time.monotonic()]
        wait_for(stands, "the program waits")
        assert written[0] < 2 << 20
        assert resident_kib() - before < 16 << 10
        started_s = time.monotonic()
        assert run(platform, str(task), "--", "true").returncode == 0, "others go on"
        assert time.monotonic() - started_s < allowed_s(20)
    finally:
        client.kill()
        client.communicate()


@pytest.mark.slow
def test_a_token_that_is_revoked_ends_its_sessions(platform: RunningPlatform, task: int) -> None:
    ada = platform.client("ada")
    token = ada.issue_token("ada", label="laptop").token
    client = subprocess.Popen(
        ff(platform, "exec", str(task), "--", "sh", "-c", "echo started; exec sleep 86404", token=token),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        ada.revoke_token("ada", next(one.id for one in ada.tokens("ada") if one.label == "laptop"))
        began_s = time.monotonic()
        _, errors = client.communicate(timeout=allowed_s(10))
        assert time.monotonic() - began_s < allowed_s(10)
    finally:
        client.kill()
        client.communicate()
    assert client.returncode == 255
    assert b"the token with which it began is not valid" in errors
    wait_for(lambda: not lives("86404"), "it is gone")


@pytest.mark.slow
def test_a_shell_gets_a_node_with_a_port_and_gives_it_back(platform: RunningPlatform, tmp_path: Path) -> None:
    (tmp_path / "hello.txt").write_text("hello\n" * 100_000)
    there, foreign = free_port(), socket.create_server(("127.0.0.1", 0))
    not_ours = foreign.getsockname()[1]
    serve = f"{sys.executable} -m http.server {there} --bind 127.0.0.1 2>/dev/null & read line; exit 5"
    ports = ("--port", f"0:{there}", "--port", f"0:{not_ours}")
    client = subprocess.Popen(
        ff(platform, "shell", "--directory", str(tmp_path), *ports, "--", "sh", "-c", serve),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert client.stderr is not None
        assert client.stdin is not None
        said, number = "", 0
        urls: list[str] = []
        while len(urls) < 2:
            line = client.stderr.readline().decode()
            assert line, said
            said += line
            urls += re.findall(r"(http://127\.0\.0\.1:\d+) leads", line)
            number = int(re.findall(r"^task (\d+)", line)[0]) if line.startswith("task") else number

        def fetched() -> bool:
            with contextlib.suppress(OSError):
                return bool(urllib.request.urlopen(f"{urls[0]}/hello.txt").read() == b"hello\n" * 100_000)
            return False

        wait_for(fetched, "its copy of the directory is served")
        with pytest.raises(OSError, match=r".*"):
            urllib.request.urlopen(urls[1], timeout=allowed_s(20))
        foreign.setblocking(False)
        with pytest.raises(BlockingIOError):
            foreign.accept()  # nobody connected: it is no port of the task
        client.stdin.write(b"\n")
        client.stdin.close()
        assert client.wait(allowed_s(30)) == 5
    finally:
        client.kill()
        client.wait()
        foreign.close()
        for pipe in (client.stdin, client.stdout, client.stderr):
            if pipe is not None:
                pipe.close()
    answer = platform.finished(platform.client("ada"), number)
    assert answer.task.outcome is Outcome.STOPPED
    assert "its shell has ended" in answer.task.reason


def interactive(platform: RunningPlatform, *arguments: str) -> Any:
    command = ff(platform, "submit", "--interactive", *arguments)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def said_of_task(client: Any, text: str) -> int:
    """Reads what it says until a line about its task has this text; the task's number."""
    said = b""
    for line in client.stderr:
        said += line
        if line.startswith(b"task ") and text.encode() in line:
            return int(line.split()[1])
    raise AssertionError(said)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interactive_task_that_waits_says_its_place_and_why_and_ends_with_its_command(
    platform: RunningPlatform, task: int, tmp_path: Path, number: signal.Signals
) -> None:
    """One of the two nodes has another task."""
    first = interactive(platform, "--nodes", "2", "--directory", str(tmp_path))
    try:
        waits = said_of_task(first, "next in the queue: needs 2 of 2 nodes that it may use; 1 is free")
        second = interactive(platform, "--nodes", "2", "--no-snapshot", "--after", str(task))
        try:
            held = said_of_task(second, "queued, 1 task comes before it: ")
        finally:
            second.send_signal(signal.SIGINT)
            second.communicate(timeout=allowed_s(30))
        first.send_signal(number)
        first.communicate(timeout=allowed_s(30))
        assert (first.returncode, second.returncode) == (130, 130)
    finally:
        first.kill()
        first.communicate()
    for one in (waits, held):
        answer = platform.finished(platform.client("ada"), one)
        assert (answer.task.outcome, answer.task.runs) == (Outcome.STOPPED, 0)


@pytest.mark.slow
def test_an_interactive_task_runs_its_command_on_the_node_that_was_asked_for(
    platform: RunningPlatform, task: int
) -> None:
    node = {"agent-1", "agent-2"}.difference(platform.client("ada").task(task).task.nodes).pop()
    there = free_port()
    serve = f"{sys.executable} -m http.server {there} --bind 127.0.0.1 >/dev/null 2>&1 &"
    serve += " read line; echo $FF_TASK_ID; exit 5"
    client = interactive(
        platform, "--nodelist", node, "--no-snapshot", "--time", "10m", "--port", f"0:{there}", "--", "sh", "-c", serve
    )
    try:
        number = said_of_task(client, f"runs on {node}")
        line = client.stderr.readline()
        found = re.findall(rb"(http://127\.0\.0\.1:\d+) leads to port", line)
        assert found, line

        def fetched() -> bool:
            with contextlib.suppress(OSError):
                return bool(urllib.request.urlopen(found[0].decode()).status == 200)
            return False

        wait_for(fetched, "its port is reached")
        output, errors = client.communicate(b"\n", timeout=allowed_s(60))
        assert (client.returncode, output) == (5, f"{number}\n".encode()), errors
    finally:
        client.kill()
        client.communicate()
    assert platform.finished(platform.client("ada"), number).task.outcome is Outcome.STOPPED


@pytest.mark.slow
def test_a_session_ends_with_its_run_and_the_node_is_free(platform: RunningPlatform, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEP)
    ada = platform.client("ada")
    (number,) = ada.submit(task_of(tmp_path / "train.py", "stopped", max_restarts=0), key="stopped")
    platform.until(ada, number, lambda answer: answer.task.state is TaskState.RUNNING, "it runs")
    client = subprocess.Popen(
        ff(platform, "exec", str(number), "--", "sh", "-c", "trap '' TERM; echo started; sleep 86405; sleep 86405"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        ada.command(StopTask(number))
        _, errors = client.communicate(timeout=allowed_s(60))
    finally:
        client.kill()
        client.communicate()
    assert client.returncode == 255, errors
    assert b"the run of the task has ended" in errors
    answer = platform.finished(ada, number)
    assert answer.task.state is FINISHED
    assert not lives("86405"), "the run was reported as gone only without it"


def ended_by(platform: RunningPlatform, task: int, kill: str, number: str) -> bytes:
    """What a client says of a session in which the process of `ff up` with this word was killed."""
    client = subprocess.Popen(
        ff(platform, "exec", str(task), "--", "sh", "-c", f"echo started; exec sleep {number}"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"started\n"
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes()
                if f"\0{kill}\0".encode() in words and f"{platform.directory}/".encode() in words:
                    os.kill(int(path.parent.name), signal.SIGKILL)
        _, errors = client.communicate(timeout=allowed_s(60))
    finally:
        client.kill()
        client.communicate()
    assert client.returncode == 255, errors
    wait_for(lambda: not lives(number), "it is gone", limit_s=60)
    return bytes(errors)


@pytest.mark.slow
def test_a_session_ends_in_one_line_with_the_agent_or_the_manager_and_the_task_goes_on(
    platform: RunningPlatform, task: int
) -> None:
    assert b"the connection to node agent-" in ended_by(platform, task, "agent", "86406")
    ada = platform.client("ada")
    wait_for(lambda: run(platform, str(task), "--", "true").returncode == 0, "there are sessions again", limit_s=60)
    assert ended_by(platform, task, "manager", "86407").count(b"\n") == 1
    wait_for(lambda: run(platform, str(task), "--", "true").returncode == 0, "there are sessions again", limit_s=60)
    with Client(ada.connection) as again:
        assert len(again.task(task).runs) == 1
