"""`ff up` with a file system: tasks reach it, `ff status` shows all of it, `ff down` ends tasks, platform and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.support.patience import allowed_s
from tests.support.platform.running import task_of, wait_for

from fireflyer.base.errors import FireflyerError, PermissionDenied
from fireflyer.cli import main
from fireflyer.cluster.client import Client, read_connection
from fireflyer.cluster.core.platform.views import TaskAnswer
from fireflyer.cluster.local.layout import PlatformLayout
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Outcome
from fireflyer.fs import connect
from fireflyer.fs.client.files.file_system import FileSystem
from fireflyer.fs.service.local.layout import Layout
from fireflyer.identity.handshake import token_id_of

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

POLITE: Final = """\
import fsspec, os, sys, time
from fireflyer.cluster.sdk import get_whole_life_state, go_suspend, set_whole_life_state, should_suspend
files = fsspec.filesystem("ff")
if not get_whole_life_state():
    files.pipe("ff:///corpus", b"the quick brown fox")
    open(sys.argv[1], "w").close()
    while not should_suspend():
        time.sleep(0.02)
    files.pipe("ff:///left", b"saved while leaving")
    set_whole_life_state(1)
    go_suspend()
files.pipe("ff:///copy", files.cat("ff:///corpus")[::-1])
"""
DEAF: Final = """\
import sys, time
with open(sys.argv[1], "a") as started:
    started.write("x")
while not __import__("os").path.exists(sys.argv[1] + ".over"):
    time.sleep(0.02)
"""


OF_ADA: Final = """\
import fsspec, os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
fsspec.filesystem("ff").pipe("ff:///ada/x", b"by ada")
(here / "part").write_text(os.environ["FIREFLYER_FS"] + " " + pathlib.Path(os.environ["FF_TOKEN_FILE"]).read_text())
os.rename(here / "part", here / "told")
while not (here / "go").exists():
    time.sleep(0.02)
"""
OF_BOB: Final = """\
import fsspec, sys
files, said = fsspec.filesystem("ff"), []
for work in (lambda: files.cat("ff:///ada/x"), lambda: files.pipe("ff:///ada/y", b""), lambda: files.rm("ff:///ada/x")):
    try:
        work()
    except PermissionError:
        said.append("refused")
open(sys.argv[1], "w").write(" ".join(said))
"""


class Whole:
    """What `ff up` runs in a directory, by the commands that a user types."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.layout = PlatformLayout(str(directory))

    def ff(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-P", "-m", "fireflyer", *arguments, "--dir", str(self.directory)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=allowed_s(180), check=False)
        assert done.returncode == code, done.stdout + done.stderr + self._logs()
        return done.stdout

    def _logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in sorted(self.directory.glob("**/log")))

    def logged_at(self, log: str, text: str) -> str:
        """When the only line with this text was written: date and time, which sort as text."""
        (line,) = [line for line in (self.directory / log).read_text().splitlines() if text in line]
        return line[: len("2026-01-01 00:00:00,000")]

    def client(self) -> Client:
        return Client(read_connection(self.layout.connection_file))

    def submit(self, script: Path, name: str, *args: str, token: str = "") -> int:
        """`token`: of the user whose task it is, by default the administrator."""
        connection = read_connection(self.layout.connection_file)
        with Client(msgspec.structs.replace(connection, token=token or connection.token)) as client:
            return client.submit(task_of(script, name, *args), key=name)[0]

    def task(self, task: int) -> TaskAnswer:
        with self.client() as client:
            return client.task(task)

    def finished(self, task: int) -> TaskAnswer:
        wait_for(lambda: self.task(task).task.state is FINISHED, "the task finishes", limit_s=60)
        return self.task(task)

    def processes(self) -> list[str]:
        """Command lines of all that were started for this directory, ranks too."""
        mark, found = os.fsencode(self.directory), []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                told = Path(f"/proc/{name}/cmdline").read_bytes() + Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if mark in told and int(name) != os.getpid():
                found.append(Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ") if told else name)
        return found


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Whole]:
    running = Whole(tmp_path / "cluster")
    try:
        yield running
    finally:
        subprocess.run(
            [sys.executable, "-P", "-m", "fireflyer", "down", "--force", "--dir", str(running.directory)],
            capture_output=True,
            timeout=allowed_s(180),
            check=False,
        )


def test_tasks_files_and_their_state_survive_down_and_up(
    whole: Whole, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = whole.ff("up", "--nodes", "2", "--storage", "2", "-d")
    assert "The platform is up: 2 nodes" in said
    assert "The file system is up: 2 of 2 nodes, 4 chains of 2 replicas; tasks reach it as ff:///." in said
    script, running = tmp_path / "polite.py", tmp_path / "running"
    script.write_text(POLITE)
    task = whole.submit(script, "polite", str(running))
    wait_for(running.exists, "it runs", limit_s=60)

    where = ["--dir", str(whole.directory)]
    assert main(["status", *where]) == 0
    shown = capfd.readouterr().out
    assert "nodes  1 of 2 in use" in shown
    assert "polite" in shown
    assert "2 of 2 nodes alive, 4 of 4 chains fully replicated" in shown
    assert main(["status", "--json", *where]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ok"] is True
    assert found["storage"]["summary"]["whole"] == 4

    assert main(["fs", "down", "--dir", whole.layout.storage_directory]) == 2
    assert "belongs to a platform that runs; end both: ff down --dir" in capfd.readouterr().err

    said = whole.ff("down")
    assert "1 task on 1 node: asked to save and to leave." in said
    assert "killed" not in said
    assert whole.processes() == []
    platform_ended = whole.logged_at("manager/log", "leads no longer in term")
    for node in (1, 2):
        assert platform_ended <= whole.logged_at(f"storage/node-{node}/log", "stopping on request")
    assert main(["status", *where]) == 1
    assert "start it: ff up -d --dir" in capfd.readouterr().out

    whole.ff("up", "-d")
    done = whole.finished(task)
    assert done.task.outcome is Outcome.SUCCEEDED
    assert [run.cause for run in done.runs] == [Cause.SUSPENDED, Cause.SUCCEEDED]
    with whole.client() as client:
        assert client.reservations() == ()
    assert main(["fs", "cat", "/copy", "--dir", whole.layout.storage_directory]) == 0
    assert capfd.readouterr().out == "xof nworb kciuq eht"
    # `down` ends the file system last: the task could still save there.
    assert main(["fs", "cat", "/left", "--dir", whole.layout.storage_directory]) == 0
    assert capfd.readouterr().out == "saved while leaving"


def test_a_run_that_does_not_leave_is_killed_and_queued_again(whole: Whole, tmp_path: Path) -> None:
    whole.ff("up", "--nodes", "1", "--storage", "0", "-d")
    script, started = tmp_path / "deaf.py", tmp_path / "started"
    script.write_text(DEAF)
    task = whole.submit(script, "deaf", str(started))
    wait_for(started.exists, "it runs", limit_s=60)
    said = whole.ff("down", "--grace", "1s")
    assert "1 task had not left after 1 s: killed" in said
    assert whole.processes() == []
    (tmp_path / "started.over").touch()
    whole.ff("up", "-d")
    done = whole.finished(task)
    assert done.task.outcome is Outcome.SUCCEEDED
    assert len(done.runs) == 2
    assert not (whole.directory / "storage").exists()


def test_a_task_is_its_user_in_the_file_system_by_the_token_of_its_run(
    whole: Whole, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole.ff("up", "--nodes", "1", "--storage", "1", "-d")
    with whole.client() as client:
        tokens = {}
        for name, uid in (("ada", 4242), ("bob", 4243)):
            client.create_user(name, uid=uid)
            tokens[name] = client.issue_token(name).token
    storage = Layout(whole.layout.storage_directory)
    target = f"ff://{','.join(storage.load().managers)}"
    assert storage.load().accounts

    where = ["--dir", storage.directory]
    assert main(["fs", "mkdir", "-m", "700", "/ada", *where]) == 0
    assert main(["fs", "chown", "4242:4242", "/ada", *where]) == 0
    assert main(["fs", "admin", "user", "list", *where]) == 2
    assert "are those of its platform: ff user add" in capfd.readouterr().err
    script = tmp_path / "of_ada.py"
    script.write_text(OF_ADA)
    of_ada = whole.submit(script, "of-ada", str(tmp_path), token=tokens["ada"])
    wait_for((tmp_path / "told").exists, "the task has written", limit_s=60)
    told, run_token = (tmp_path / "told").read_text().split()
    assert told == target, "tasks are told where the managers are, and no directory with secrets"
    assert token_id_of(run_token) == f"run-{of_ada}-0"

    with connect(target, token=storage.admin_token()) as files:
        found = files.stat("/ada/x")
        assert (found.st_uid, found.st_gid) == (4242, 4242)
    with connect(target, token=tokens["ada"]) as files, files.open("/ada/x", "rb") as file:
        assert file.read() == b"by ada", "her own token is good for it, too"
    script, said = tmp_path / "of_bob.py", tmp_path / "said"
    script.write_text(OF_BOB)
    with connect(target, token=run_token) as held:
        assert held.stat("/ada/x").st_size == 6
        (tmp_path / "go").touch()
        assert whole.finished(of_ada).task.outcome is Outcome.SUCCEEDED
        wait_for(lambda: _refused(target, run_token), "the token of the run that has ended is refused", limit_s=10)
        wait_for(lambda: not _works(held), "what was open with it is closed", limit_s=10)
    of_bob = whole.submit(script, "of-bob", str(said), token=tokens["bob"])
    assert whole.finished(of_bob).task.outcome is Outcome.SUCCEEDED
    assert said.read_text() == "refused refused refused"


def _refused(target: str, token: str) -> bool:
    try:
        connect(target, token=token).close()
    except PermissionDenied:
        return True
    return False


def _works(files: FileSystem) -> bool:
    try:
        files.stat("/ada/x")
    except FireflyerError:
        return False
    return True
