"""Platform and file system: `ff up` as a child process, and what is asked of it."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from shlex import quote
from typing import Final

from fireflyer.base.errors import Busy, DataCorruption, FireflyerError, PermanentError, UsageError
from fireflyer.base.events import Logged, decode_log
from fireflyer.base.toml_text import to_toml
from fireflyer.cluster.client import Client, Connection, read_connection
from fireflyer.cluster.core.platform.views import RunView
from fireflyer.cluster.local.layout import PlatformLayout
from fireflyer.cluster.local.leaving import end_runs
from fireflyer.identity.private_files import read_private_file, write_private_file
from fireflyer.recipes.testbed.plan import ClusterPlan
from fireflyer.runtime.processes.guarded import child_environment, start_with_parent_death_signal
from fireflyer.runtime.processes.run_lock import END_NOW, seems_held

__all__ = ["Cluster", "log_of", "running_cluster"]

START_S: Final = 180.0
STOP_S: Final = 60.0
LOOK_S: Final = 0.1
_MAX_ID_BYTES: Final = 128
_READY: Final = "Ctrl-C"


class Cluster:
    """Which runs; made by `running_cluster`."""

    def __init__(self, layout: PlatformLayout, up_pid: int) -> None:
        self.layout = layout
        self.up_pid = up_pid
        """Process of `ff up`, which starts again what dies."""
        self._connection = read_connection(layout.connection_file)

    @property
    def url(self) -> str:
        return self._connection.url

    @property
    def watch_line(self) -> str:
        """Says where the web page is while the recipe runs, and how to log in."""
        return f"watch it: {self.url} (log in with the token in {self.layout.connection_file})"

    def client(self, token: str = "") -> Client:
        """Of the user with this token; by default of the administrator. The caller closes it."""
        connection = self._connection
        token = token or connection.token
        return Client(Connection(url=connection.url, token=token, fingerprint=connection.fingerprint))


def log_of(layout: PlatformLayout, run: RunView) -> list[Logged]:
    """The event log of a run, which lies on the node of its launcher; as far as it was written. Empty: there is none
    yet."""
    path = os.path.join(layout.agent_directory(run.nodes[0]), "runs", run.token, "job", "events.jsonl")
    try:
        with open(path, "rb") as file:
            return decode_log(file, name=path)
    except (FileNotFoundError, DataCorruption):
        return []


@contextlib.contextmanager
def running_cluster(plan: ClusterPlan, directory: str, say: Callable[[str], None]) -> Iterator[Cluster]:
    """A new one in `directory`, where an earlier one that a recipe made is removed; ended with the block, with all that
    it started. `say` gets the lines that `ff up` prints, from a thread. Raises `PermanentError` where it does not come
    up, and for what is in `directory` `UsageError` where no recipe made it, `Busy` where it is in use."""
    layout = PlatformLayout(directory)
    _remove_earlier(layout)
    layout.make_directory()
    os.makedirs(_own_directory(layout), mode=0o700, exist_ok=True)
    settings = os.path.join(_own_directory(layout), "up.toml")
    with open(settings, "w", encoding="utf-8") as file:
        file.write(to_toml(_settings(plan, layout.directory)))
    process, lines = _start(settings)
    try:
        _wait(lines, process, say)
        _note_made(layout)
        listening = threading.Thread(target=_pass_on, args=(lines, say), name="ff-up-said", daemon=True)
        listening.start()
        yield Cluster(layout, process.pid)
    finally:
        _stop(process)
        with contextlib.suppress(FireflyerError):
            _note_made(layout)
            end_runs(layout, layout.load())


def _settings(plan: ClusterPlan, directory: str) -> dict[str, object]:
    return {
        "directory": directory,
        "agents": plan.nodes,
        "stop_after": "60s",
        "storage": {
            "nodes": plan.storage_nodes,
            "replicas": plan.replicas,
            "targets_per_node": plan.targets_per_node,
        },
        # Priority alone decides who leaves: else the user who had less is given the nodes of the other in between.
        "time_sharing": {"usage_margin": 1e6},
    }


def _remove_earlier(layout: PlatformLayout) -> None:
    """What a cluster that was killed has left still ends first."""
    if not layout.exists():
        return
    there = layout.load()
    if _made(layout) != there.cluster:
        raise UsageError(
            f"{layout.directory} holds a platform that no recipe is known to have made, and is not replaced; choose "
            f"another --directory, or end it with ff down --dir {quote(layout.directory)} and remove it"
        )
    _wait_until_ended(layout)
    end_runs(layout, there)
    shutil.rmtree(layout.directory)


def _wait_until_ended(layout: PlatformLayout) -> None:
    """`ff up` of a recipe that was killed ends by itself. Raises `Busy`."""
    until_s = time.monotonic() + STOP_S
    while seems_held(layout.lock_file):
        if time.monotonic() >= until_s:
            raise Busy(f"{layout.directory} is in use; end it with ff down --dir {quote(layout.directory)}")
        time.sleep(LOOK_S)


def _own_directory(layout: PlatformLayout) -> str:
    """Of files of the recipe: beside that of the platform, in which `ff up` wants nothing of others."""
    return f"{layout.directory}.recipe"


def _made_file(layout: PlatformLayout) -> str:
    """Which platform a recipe has made."""
    return os.path.join(_own_directory(layout), "made")


def _note_made(layout: PlatformLayout) -> None:
    write_private_file(_made_file(layout), layout.load().cluster.encode())


def _made(layout: PlatformLayout) -> str:
    try:
        return read_private_file(_made_file(layout), _MAX_ID_BYTES).decode(errors="replace")
    except FireflyerError:
        return ""


def _start(settings: str) -> tuple[subprocess.Popen[bytes], queue.Queue[str]]:
    read_fd, write_fd = os.pipe()
    try:
        process = start_with_parent_death_signal(
            [sys.executable, "-P", "-m", "fireflyer", "up", settings],
            environment=child_environment({"PYTHONUNBUFFERED": "1"}),
            stdout=write_fd,
            stderr=write_fd,
        )
    finally:
        os.close(write_fd)
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        with open(read_fd, encoding="utf-8", errors="replace") as file:
            for line in file:
                lines.put(line.rstrip("\n"))
        lines.put("")

    threading.Thread(target=read, name="ff-up-lines", daemon=True).start()
    return process, lines


def _wait(lines: queue.Queue[str], process: subprocess.Popen[bytes], say: Callable[[str], None]) -> None:
    until_s = time.monotonic() + START_S
    last = ""
    while True:
        try:
            line = lines.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise PermanentError(f"the platform was not up within {START_S:.0f} s") from None
        if _READY in line:
            return
        if not line and process.poll() is not None:
            raise PermanentError(f"the platform did not start: {last}")
        if line.startswith("The "):
            say(line)
        last = line or last


def _pass_on(lines: queue.Queue[str], say: Callable[[str], None]) -> None:
    while line := lines.get():
        say(line)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(END_NOW)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
