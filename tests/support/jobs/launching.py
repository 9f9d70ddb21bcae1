"""Running jobs in tests: in this process, or with a launcher in a process of its own; and finding what they left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop
from tests.support.patience import allowed_s

from fireflyer.base.events import JobEvent, Logged, decode_log
from fireflyer.cluster.launcher import run_job
from fireflyer.cluster.schema.job import JobResult, JobSpec, RankLine
from fireflyer.runtime.devices import Devices

__all__ = [
    "DEVICES",
    "JobRun",
    "events_of",
    "leftovers",
    "nothing_left",
    "run",
    "started_launcher",
    "wait_until",
    "write_orphan",
    "write_script",
]

ROOT = Path(__file__).parents[3]
DEVICES = Devices(gpus=0, cores=64)
_E = TypeVar("_E")


class JobRun(msgspec.Struct):
    result: JobResult
    entries: list[Logged]
    lines: list[RankLine]

    def of(self, kind: type[_E]) -> list[_E]:
        return [entry.event for entry in self.entries if isinstance(entry.event, kind)]

    def at_ns(self, kind: type[JobEvent]) -> int:
        """When the first such entry was logged."""
        return next(entry.at_ns for entry in self.entries if isinstance(entry.event, kind))

    def texts(self, rank: int, stream: str = "stdout") -> list[str]:
        return [line.text for line in self.lines if line.rank == rank and line.stream == stream]


def run(spec: JobSpec, *, limit_s: float = 60, on_entry: Callable[[Logged], None] | None = None) -> JobRun:
    """One job in this process; nothing may be left of it. The log file must hold what was told."""
    entries: list[Logged] = []
    lines: list[RankLine] = []

    def see(entry: Logged) -> None:
        entries.append(entry)
        if on_entry is not None:
            on_entry(entry)

    async def limited() -> JobResult:
        async with asyncio.timeout(allowed_s(limit_s)):
            return await run_job(spec, on_entry=see, on_line=lines.append, devices=DEVICES)

    result = uvloop.run(limited())
    nothing_left(spec.run_dir)
    assert entries == events_of(result.events_path)
    return JobRun(result, entries, lines)


def events_of(path: str) -> list[Logged]:
    with open(path, "rb") as file:
        return decode_log(file)


def write_script(directory: Path, text: str, name: str = "job.py") -> str:
    path = directory / name
    path.write_text(
        "import os, sys, time, signal, subprocess\nrank = int(os.environ.get('RANK', 0))\n"
        "attempt = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))\n" + text
    )
    return str(path)


def leftovers(run_dir: str) -> list[tuple[int, str]]:
    """Processes whose command line or environment names the run directory: guards, supervisors, ranks, what they
    started."""
    found = []
    needle = run_dir.encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            environ = Path(f"/proc/{name}/environ").read_bytes()
            if needle in command or needle in environ:
                found.append((int(name), command.replace(b"\0", b" ").decode(errors="replace")))
    return found


def nothing_left(run_dir: str, *, within_s: float = 5.0) -> None:
    wait_until(lambda: not leftovers(run_dir), allowed_s(within_s), lambda: f"left behind: {leftovers(run_dir)}")


def wait_until(
    condition: Callable[[], object],
    within_s: float,
    what: Callable[[], str] | str = "condition",
    *,
    pause_s: float = 0.01,
) -> None:
    """`pause_s`: between two looks; longer where a look is at all processes and the wait is for a lease."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(pause_s)


def write_orphan(directory: Path) -> str:
    """A program that writes its process id into the file that it is given, and then lives long."""
    text = "with open(sys.argv[1], 'a') as file: file.write(f'{os.getpid()}\\n')\ntime.sleep(1000)\n"
    return write_script(directory, text, name="orphan.py")


@contextlib.contextmanager
def started_launcher(spec: JobSpec) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process and session of its own; its output is in `run_dir` + `.out`. Killed at the end."""
    with open(spec.run_dir + ".out", "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.jobs.launching", msgspec.json.encode(spec).decode()],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait()
        try:
            nothing_left(spec.run_dir)
        finally:
            for pid, _ in leftovers(spec.run_dir):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _main() -> int:
    spec = msgspec.json.decode(sys.argv[1], type=JobSpec)

    def show(line: RankLine) -> None:
        print(f"[{line.rank}] {line.text}", flush=True)

    result = uvloop.run(run_job(spec, on_line=show, devices=DEVICES))
    print(result.reason, flush=True)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(_main())
