"""What a user waits for on an idle platform of two nodes (`ff up` on this machine): the first line of a script, and
free nodes after `ff suspend`. Wall time: a loaded machine is measured with the platform."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench.report import Bound, Options, Result, figure
from fireflyer.cluster.client import Client, read_connection
from fireflyer.cluster.local.layout import PlatformLayout
from fireflyer.cluster.schema.tasks import Program, TaskSpec

__all__ = ["idle_platform"]

STEP_S: Final = 0.1
SAVE_S: Final = 0.3
_FIRST_S: Final = 1.5
_LOOK_S: Final = 0.01
_ROUNDS: Final = 5
_SUSPENDED: Final = f"""
import os, time
from fireflyer.cluster.sdk import go_suspend, should_suspend
for step in range(10_000):
    time.sleep({STEP_S})
    open("stepped-" + os.environ["RANK"], "w").close()
    if should_suspend():
        time.sleep({SAVE_S})
        go_suspend()
"""


def idle_platform(options: Options) -> Iterator[Result]:
    """`submit/first-line`: from the call of `Client.submit`, without a snapshot, until a script that imports nothing
    runs. `submit/follow`: from the start of `ff submit --follow` in a directory of one file until it has printed the
    first line of the script. `suspend/platform`: from the start of `ff suspend` until the rows of both nodes are free;
    two ranks on each, which step and save for a known time."""
    cases: dict[str, Callable[[_Platform], Result]] = {
        "submit/first-line": _first_line, "submit/follow": _follow, "suspend/platform": _suspend
    }  # fmt: skip
    chosen = [measure for case, measure in cases.items() if options.selects(case)]
    if not chosen:
        return
    rounds = min(options.rounds, _ROUNDS)
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory, _started(f"{directory}/platform") as client:
        platform = _Platform(directory, client, rounds)
        for measure in chosen:
            yield measure(platform)


class _Platform:
    def __init__(self, directory: str, client: Client, rounds: int) -> None:
        self._directory, self.client, self.rounds = directory, client, rounds
        self._numbers = 0

    def ff(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "fireflyer", *arguments, "--platform", f"{self._directory}/platform"]

    def folder(self) -> Path:
        """A new one."""
        self._numbers += 1
        found = Path(self._directory, f"work-{self._numbers}")
        found.mkdir()
        return found

    def submit(self, folder: Path, script: str, *, nodes: int = 1, ranks: int = 1) -> int:
        program = Program(script=script, workdir=str(folder), ranks_per_node=ranks)
        spec = TaskSpec(name=folder.name, program=program, least_nodes=nodes, most_nodes=nodes)
        return self.client.submit(spec, key=folder.name)[0]

    def until_idle(self, task: int) -> None:
        while self.client.task(task).task.ended_ns is None or not self.is_free():
            time.sleep(_LOOK_S)

    def is_free(self) -> bool:
        return all(node.state == "idle" for node in self.client.nodes())

    def measured(self, one: Callable[[], float]) -> list[float]:
        """The first one warms up."""
        return [one() for _ in range(self.rounds + 1)][1:]


@contextlib.contextmanager
def _started(platform: str) -> Iterator[Client]:
    _ff("up", "--dir", platform, "--nodes", "2", "--storage", "0", "-d")
    try:
        with Client(read_connection(PlatformLayout(platform).connection_file)) as client:
            yield client
    finally:
        _ff("down", "--dir", platform)


def _ff(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "fireflyer", *arguments], check=True, stdout=subprocess.DEVNULL)


def _first_line(platform: _Platform) -> Result:
    def one() -> float:
        folder = platform.folder()
        pipe = folder / "pipe"
        (folder / "first.py").write_text(f"open({str(pipe)!r}, 'w').write('line')")
        os.mkfifo(pipe)
        began_s = time.perf_counter()
        task = platform.submit(folder, "first.py")
        assert pipe.read_text() == "line"
        took_s = time.perf_counter() - began_s
        platform.until_idle(task)
        return took_s

    return _row("submit/first-line", platform.measured(one), _FIRST_S, "< 1.5 s", "a script without torch runs")


def _follow(platform: _Platform) -> Result:
    def one() -> float:
        folder = platform.folder()
        (folder / "first.py").write_text("print('line', flush=True)")
        command = [*platform.ff("submit"), "--follow", "--name", folder.name, "first.py"]
        began_s = time.perf_counter()
        with subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            took_s = next(time.perf_counter() - began_s for line in process.stdout if line.rstrip() == "line")
        assert process.returncode == 0
        while not platform.is_free():
            time.sleep(_LOOK_S)
        return took_s

    note = "ff submit --follow with a snapshot of one file has printed it"
    return _row("submit/follow", platform.measured(one), _FIRST_S, "< 1.5 s", note)


def _suspend(platform: _Platform) -> Result:
    def one() -> float:
        folder = platform.folder()
        (folder / "step.py").write_text(_SUSPENDED)
        task = platform.submit(folder, "step.py", nodes=2, ranks=2)
        while len(list(folder.glob("stepped-*"))) < 4:
            time.sleep(_LOOK_S)
        began_s = time.perf_counter()
        with subprocess.Popen(platform.ff("suspend", str(task)), stdout=subprocess.DEVNULL) as process:
            while not platform.is_free():
                time.sleep(_LOOK_S)
            took_s = time.perf_counter() - began_s
        assert process.returncode == 0
        assert platform.client.task(task).task.state.value == "suspended"
        platform.client.stop(task)
        platform.until_idle(task)
        return took_s

    least_s = 2 * STEP_S + SAVE_S
    note = "from the start of `ff suspend` until the rows of two nodes are free"
    row = _row("suspend/platform", platform.measured(one), least_s + 1, "<= two steps + save + 1 s", note)
    return Result(**{**{name: getattr(row, name) for name in row.__struct_fields__},
                     "bound": Bound(least_s, "two steps and the save")})  # fmt: skip


def _row(case: str, samples: list[float], limit_s: float, target: str, note: str) -> Result:
    ours = figure(samples)
    met = ours.median <= limit_s
    return Result(
        suite="cluster", case=case, metric="wall_s", better="lower", ours=ours, peers={}, bound=None, target=target,
        note=note, met=met, verdicts={target: met},
    )  # fmt: skip
