"""What ranks print reaches the manager while it is written, and is there whatever ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.support.patience import allowed_s
from tests.support.platform.running import RunningPlatform, task_of, wait_for

from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.commands import ResumeTask, StopTask, SuspendTask
from fireflyer.cluster.schema.logs import LogsEnded, LogText
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, TaskState

pytestmark = pytest.mark.processes

SCRIPT: Final = """\
import os, sys, time
from fireflyer.cluster.sdk import get_whole_life_state, go_suspend, set_whole_life_state, should_suspend

folder, rank = sys.argv[1], os.environ["RANK"]
step = get_whole_life_state() or 0
while True:
    print(f"rank {rank} step {step}", flush=True)
    step += 1
    while not os.path.exists(f"{folder}/{step}"):
        if os.path.exists(f"{folder}/end"):
            print("the last line", end="")
            sys.exit(int(sys.argv[2]))
        if should_suspend():
            set_whole_life_state(step)
            go_suspend()
        time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    directory = tmp_path_factory.mktemp("logs") / "platform"
    with RunningPlatform(directory, nodes=1, users=("ada",)) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The script is there, and goes on when a file with the number of its next step is, or `end`."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def submit(client: Client, folder: Path, name: str, *, exit_code: int = 0) -> int:
    spec = task_of(folder / "train.py", name, str(folder), str(exit_code), max_restarts=0)
    (task,) = client.submit(spec, key=name)
    return task


def text_of(client: Client, task: int) -> str:
    return "".join(event.text for event in client.logs(task) if isinstance(event, LogText))


def logs_command(platform: RunningPlatform, *arguments: str) -> subprocess.Popen[str]:
    where = ("--platform", str(platform.directory))
    command = [sys.executable, "-P", "-m", "fireflyer", "logs", *where, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_lines_are_followed_as_they_are_printed_and_the_exit_code_is_the_tasks(
    platform: RunningPlatform, folder: Path
) -> None:
    ada = platform.client("ada")
    task = submit(ada, folder, "printing", exit_code=3)
    following = logs_command(platform, "-f", str(task))
    try:
        assert following.stdout is not None
        assert following.stdout.readline() == "rank 0 step 0\n"
        (folder / "1").touch()
        assert following.stdout.readline() == "rank 0 step 1\n"
        (folder / "end").touch()
        rest, errors = following.communicate(timeout=allowed_s(60))
    finally:
        following.kill()
    assert rest == "the last line\n"
    assert following.returncode == 3, errors
    assert f"task {task} failed" in errors
    assert "missing" not in errors
    assert text_of(ada, task) == "rank 0 step 0\nrank 0 step 1\nthe last line"
    streams = {stream.name: stream for stream in ada.task_logs(task).runs[0].streams}
    assert {"attempt-0-rank-0", "events", "launcher"} <= set(streams)
    assert all(stream.closed for stream in streams.values())
    assert [found.line for found in ada.search_logs(task, "STEP 1")] == ["rank 0 step 1"]


@pytest.mark.slow
def test_following_goes_on_across_a_suspension(platform: RunningPlatform, folder: Path) -> None:
    ada = platform.client("ada")
    task = submit(ada, folder, "suspended")
    following = logs_command(platform, "-f", str(task))
    try:
        assert following.stdout is not None
        assert following.stdout.readline() == "rank 0 step 0\n"
        ada.command(SuspendTask(task))
        platform.until(ada, task, lambda answer: answer.task.state is TaskState.SUSPENDED, "it is suspended")
        ada.command(ResumeTask(task))
        assert following.stdout.readline() == "rank 0 step 1\n"
        (folder / "end").touch()
        rest, errors = following.communicate(timeout=allowed_s(60))
    finally:
        following.kill()
    assert (rest, following.returncode) == ("the last line\n", 0), errors
    assert f"task {task} suspended" in errors
    lines = [(event.run, event.text) for event in ada.logs(task) if isinstance(event, LogText)]
    assert lines == [(0, "rank 0 step 0\n"), (1, "rank 0 step 1\nthe last line")]
    one_run = [event.text for event in ada.logs(task, run=1) if isinstance(event, LogText)]
    assert one_run == ["rank 0 step 1\nthe last line"]


def pid_of(platform: RunningPlatform, *words: str) -> int:
    """Of the process of `ff up` whose command line has these words and the platform's directory."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if all(word in arguments for word in words) and any(str(platform.directory) in one for one in arguments):
            return int(path.parent.name)
    return 0


def kill(platform: RunningPlatform, *words: str) -> None:
    """SIGKILL; `ff up` starts it again."""
    pid = 0

    def found() -> bool:
        nonlocal pid
        pid = pid_of(platform, *words)
        return pid > 0

    wait_for(found, f"a process {words}")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pid_of(platform, *words) not in (0, pid), "it is started again", limit_s=60)


@pytest.mark.slow
def test_a_manager_that_is_killed_loses_no_line(platform: RunningPlatform, folder: Path) -> None:
    """The client goes on by itself, and nothing is told twice."""
    ada = platform.client("ada")
    task = submit(ada, folder, "restarted")
    following = ada.logs(task, follow=True)
    text = ""
    while "step 0\n" not in text:
        event = next(following)
        text += event.text if isinstance(event, LogText) else ""
    (folder / "1").touch()
    kill(platform, "manager")
    for step in range(2, 30):
        (folder / str(step)).touch()
    (folder / "end").touch()
    end = None
    for event in following:
        text += event.text if isinstance(event, LogText) else ""
        end = event
    assert text == "".join(f"rank 0 step {step}\n" for step in range(30)) + "the last line"
    assert isinstance(end, LogsEnded)
    assert (end.outcome, end.complete) == (Outcome.SUCCEEDED, True)
    assert text_of(platform.client("ada"), task) == text


@pytest.mark.slow
def test_an_agent_that_is_killed_sends_the_rest_when_it_is_started_again(
    platform: RunningPlatform, folder: Path
) -> None:
    ada = platform.client("ada")
    task = submit(ada, folder, "orphaned")
    wait_for(lambda: "step 0" in text_of(ada, task), "it prints", limit_s=60)
    token = ada.task(task).runs[0].token
    pid = pid_of(platform, "agent", "run")
    os.kill(pid, signal.SIGSTOP)
    (folder / "1").touch()
    (folder / "end").touch()
    rank_log = platform.directory / f"agent-1/state/runs/{token}/job/logs/attempt-0/rank-0.log"
    wait_for(lambda: rank_log.read_text().endswith("the last line"), "it has ended", limit_s=60)
    os.kill(pid, signal.SIGKILL)
    platform.finished(ada, task)
    events = list(ada.logs(task, follow=True))
    assert "".join(event.text for event in events if isinstance(event, LogText)).endswith("step 1\nthe last line")
    assert isinstance(events[-1], LogsEnded)
    assert events[-1].complete


@pytest.mark.slow
def test_logs_are_there_when_the_nodes_are_gone(tmp_path: Path, folder: Path) -> None:
    with RunningPlatform(tmp_path / "platform", nodes=1, users=("ada",)) as platform:
        ada = platform.client("ada")
        task = submit(ada, folder, "gone")
        (folder / "end").touch()
        platform.finished(ada, task)
        assert isinstance(list(ada.logs(task, follow=True))[-1], LogsEnded)
        agent = platform.directory / "agent-1"
        kill(platform, "agent", "run")
        os.kill(pid_of(platform, "agent", "run"), signal.SIGSTOP)
        try:
            for path in agent.glob("state/runs/*/job/logs/*/*.log"):
                path.unlink()
            assert text_of(ada, task) == "rank 0 step 0\nthe last line"
        finally:
            os.kill(pid_of(platform, "agent", "run"), signal.SIGCONT)


@pytest.mark.slow
def test_a_task_that_was_stopped_before_it_ran_has_no_logs(platform: RunningPlatform, folder: Path) -> None:
    ada = platform.client("ada")
    spec = task_of(folder / "train.py", "huge", str(folder), "0", nodes=2)
    (task,) = ada.submit(spec, key="huge")
    ada.command(StopTask(task))
    began_s = time.monotonic()
    (*_, end) = ada.logs(task, follow=True)
    assert isinstance(end, LogsEnded)
    assert (end.state, end.outcome, end.complete) == (FINISHED, Outcome.STOPPED, True)
    assert time.monotonic() - began_s < allowed_s(20)
