"""Suspension: what a call of `should_suspend()` costs, and the time from SIGUSR1 until the nodes are free.

The bound of the second is two steps, the save, and a second; the steps and the save are sleeps of known length."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from fireflyer.base.suspension import NodeCells
from fireflyer.runtime.suspension_memory import SharedCells

CALLS = 200_000
STEP_S, SAVE_S = 0.1, 0.3
SCRIPT = f"""
import time
from fireflyer.cluster.sdk import go_suspend, should_suspend
for step in range(10_000):
    time.sleep({STEP_S})
    print("step", flush=True)
    if should_suspend():
        time.sleep({SAVE_S})
        go_suspend()
"""
CALL = f"""
import time
from fireflyer.cluster.sdk import should_suspend
best = 1e9
for _ in range(10):
    start = time.perf_counter_ns()
    for _ in range({CALLS // 10}): should_suspend()
    best = min(best, (time.perf_counter_ns() - start) / {CALLS // 10})
start = time.perf_counter_ns()
for _ in range({CALLS}): pass
print(best, (time.perf_counter_ns() - start) / {CALLS})
"""


def call_ns() -> tuple[float, float]:
    """Of a call with memory that is shared and nobody who asks; of an empty loop."""
    memory = SharedCells.create()
    node = NodeCells([memory.cells])
    environment = {**os.environ, "FF_SUSPENSION": memory.path}
    told = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, check=True)
    assert node.points(exact=True) == (CALLS,)
    memory.close()
    call, loop = map(float, told.stdout.split())
    return call, loop


def free_s(directory: Path) -> float:
    """From the signal until the launcher has ended, which is when nothing is left on its two nodes."""
    (directory / "job.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "fireflyer",
        "run",
        "--nodes",
        "2",
        "--ranks-per-node",
        "2",
        "--quiet",
        "--devices",
    ]
    with subprocess.Popen(
        [*command, "cpu", "--run-dir", "run", "job.py"], cwd=directory, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        seen: set[str] = set()
        while len(seen) < 4:
            seen |= set(re.findall(r"rank (\d+) \| step", process.stdout.readline()))
        process.send_signal(signal.SIGUSR1)
        process.stdout.read()
        assert process.wait() == 85
    events = [json.loads(line) for line in (directory / "run" / "events.jsonl").read_text().splitlines()]
    at = {entry["event"]["type"]: entry["at_ns"] for entry in events}
    return float(at["job_finished"] - at["suspend_requested"]) / 1e9
