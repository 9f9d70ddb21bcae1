"""`ff fs` on a cluster of this machine, as a person would type it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.jobs.cleanup import clean_up_at_exit
from tests.support.patience import allowed_s

from fireflyer.base.errors import FireflyerError
from fireflyer.cli.fs.connect import local
from fireflyer.cli.fs.status import look, to_json
from fireflyer.fs.schema.manager import TargetReport
from fireflyer.fs.tools.addresses import Address
from fireflyer.runtime.processes.guarded import descendants

__all__ = ["LocalCluster", "shared_cluster", "wait_gone", "whole_session_cluster"]

LIMIT_S = 60.0
PAUSE_S = 0.03
"""Between two looks at what is waited for."""
CLEAN = TargetReport.__struct_fields__.index("clean")


class LocalCluster:
    """In `directory / "fs"`. `close` leaves nothing of it running, and nor does a process that ends without it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "fs"
        self._ending = (sys.executable, "-P", "-m", "fireflyer", "fs", "down", "--force", "--dir", str(self.directory))
        self._release = clean_up_at_exit(self._ending)

    def ff(self, *arguments: str, code: int = 0) -> str:
        """What `ff fs ...` printed; on standard error where it failed as it should."""
        done = self._run(*arguments)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr, self.logs())
        return done.stderr if code else done.stdout

    def retry_until(self, *arguments: str) -> str:
        """What it printed when it succeeded: until then whoever is asked may have been killed."""
        until_s = time.monotonic() + allowed_s(LIMIT_S)
        while True:
            done = self._run(*arguments)
            if not done.returncode:
                return done.stdout
            assert time.monotonic() < until_s, (done.returncode, done.stdout, done.stderr, self.logs())

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "fireflyer", "fs", *arguments, "--dir", str(self.directory)]
        return subprocess.run(command, capture_output=True, text=True, timeout=allowed_s(2 * LIMIT_S), check=False)

    def status(self) -> dict[str, Any]:
        """What `ff fs status --json` prints as soon as somebody answers, asked in this process: the start of another
        one would take a quarter of a second of processor time from what is waited for."""
        until_s = time.monotonic() + allowed_s(LIMIT_S)
        while True:
            try:
                found = msgspec.json.decode(to_json(*look(local(str(self.directory)))))
            except (FireflyerError, OSError) as error:
                if time.monotonic() > until_s:
                    raise AssertionError(self.logs()) from error
                time.sleep(PAUSE_S)
            else:
                assert isinstance(found, dict)
                return found

    def wait(self, true: Callable[[dict[str, Any]], bool], limit_s: float = LIMIT_S) -> dict[str, Any]:
        until_s = time.monotonic() + allowed_s(limit_s)
        while True:
            status = self.status()
            if true(status):
                return status
            assert time.monotonic() < until_s, (status, self.logs())
            time.sleep(PAUSE_S)

    def whole(self, status: dict[str, Any]) -> bool:
        """And all of it know that they serve."""
        summary = status["summary"]
        reports = [one["report"] for one in status["status"]["targets"] if one["chain"] is not None]
        told = all(report is not None and report[CLEAN] for report in reports)
        return bool(told and summary["whole"] == summary["chains"] > 0 and summary["alive"] == summary["nodes"])

    def url(self, path: str) -> str:
        """Of a file or directory in it."""
        return Address(directory=str(self.directory)).prefix + path

    @property
    def pid(self) -> int:
        """Of the process that `ff fs up` has become."""
        found = msgspec.json.decode((self.directory / "up.lock").read_bytes())
        return int(found["pid"])

    def process(self, name: str) -> int:
        """Of `node-1`, `manager-1`; of one that was killed just before, the next."""
        until_s = time.monotonic() + allowed_s(LIMIT_S)
        while True:
            for pid in descendants(self.pid):
                # Another one that was found may have been killed just before, and be gone now.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if any(f"/{name}/".encode() in word for word in words):
                        return pid
            assert time.monotonic() < until_s, f"{name} does not run: {self.logs()}"
            time.sleep(0.01)

    def processes(self) -> list[int]:
        return [self.pid, *descendants(self.pid)]

    def logs(self) -> str:
        return "\n".join(f"{path}: {path.read_text()[-2000:]}" for path in sorted(self.directory.rglob("*log")))

    def close(self) -> None:
        subprocess.run(self._ending, capture_output=True, timeout=allowed_s(LIMIT_S), check=False)
        self._release()


@pytest.fixture(scope="session")
def whole_session_cluster(session_path: Path) -> Iterator[LocalCluster]:
    """What `shared_cluster` hands out."""
    cluster = LocalCluster(session_path)
    try:
        cluster.ff("up", "--detach", "--relaxed", "--targets-per-node", "2")
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def shared_cluster(whole_session_cluster: LocalCluster) -> LocalCluster:
    """One of three nodes for all tests of this process that leave it running, with their files under names of their
    own. It is whole when a module begins with it. Tests that stop, fill, reconfigure or count a cluster have their own.
    """
    whole_session_cluster.wait(whole_session_cluster.whole)
    return whole_session_cluster


def wait_gone(pids: list[int], limit_s: float = LIMIT_S) -> None:
    until_s = time.monotonic() + allowed_s(limit_s)
    while left := [pid for pid in pids if _alive(pid)]:
        assert time.monotonic() < until_s, f"{left} still run"
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
