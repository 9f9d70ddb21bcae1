"""Processes on GPUs are foreign only where no task runs, and not while those of the last task still end."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Final

import pytest

from fireflyer.base.health_event import HealthEvent
from fireflyer.validators.checks.rounds import HealthRounds
from fireflyer.validators.core.checks.evidence import Evidence, Output
from fireflyer.validators.core.checks.gpu import GpuProcessSettings, judge_gpu_processes
from fireflyer.validators.core.checks.policy import HealthPolicy, Inventory

RECORDED: Final = Path(__file__).parent / "recorded"
BUSY, FREE = "nvidia_smi_faulty.xml", "nvidia_smi_healthy.xml"
RULES: Final = HealthPolicy(gpu_processes=GpuProcessSettings(allowed=("nvidia-persistenced",)))


class Gpus:
    """`nvidia-smi` prints `BUSY` until there were so many pauses."""

    def __init__(self, directory: Path, busy: int, *, stuck: bool = False, fails_at: int = -1) -> None:
        self.directory, self.busy, self.stuck, self.fails_at = directory, busy, stuck, fails_at
        self.pauses: list[float] = []
        tool = directory / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n/bin/cat {directory}/report.xml\n")
        tool.chmod(0o755)
        self._print()

    def _print(self) -> None:
        """Another process each time, until there is none."""
        report = (RECORDED / (BUSY if len(self.pauses) < self.busy else FREE)).read_text()
        pid = 0 if self.stuck else len(self.pauses)
        if len(self.pauses) == self.fails_at:
            report = "Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error"
        (self.directory / "report.xml").write_text(re.sub("(?<=<pid>)[0-9]+", str(10_000 + pid), report))

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._print()

    def round(self, *, idle: bool, ends_s: float = float("inf"), rules: HealthPolicy = RULES) -> list[HealthEvent]:
        rounds = HealthRounds(None, root=str(self.directory), tool_path=str(self.directory), pause=self._pause)
        return rounds.run(rules, ["gpu_processes", "gpu_ecc"], idle=idle, ends_s=ends_s)


def processes(events: list[HealthEvent]) -> list[tuple[str, str]]:
    return [(event.severity, event.cause) for event in events if event.check == "gpu_processes"]


@pytest.mark.parametrize("required", [False, True])
def test_where_tasks_may_run_nothing_is_foreign_and_nothing_is_well(tmp_path: Path, required: bool) -> None:
    """That the check passed would take back what it has warned of."""
    gpus = Gpus(tmp_path, busy=9)
    rules = HealthPolicy(inventory=Inventory(gpus=2), gpu_processes=GpuProcessSettings(required=required))
    (event,) = (one for one in gpus.round(idle=False, rules=rules) if one.check == "gpu_processes")
    assert (event.severity, event.could_not_run) == ("ok", True), "it keeps no node from tasks"
    assert "tasks may run here" in event.words
    assert gpus.pauses == []


@pytest.mark.parametrize(("busy", "pauses"), [(0, 0), (1, 1), (3, 3)])
def test_processes_that_end_meanwhile_are_no_finding(tmp_path: Path, busy: int, pauses: int) -> None:
    gpus = Gpus(tmp_path, busy)
    assert processes(gpus.round(idle=True)) == [("ok", "")]
    assert gpus.pauses == [3.0] * pauses


def test_what_stays_is_told_after_three_more_looks(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, busy=4)
    assert processes(gpus.round(idle=True)) == [("warn", "processes"), ("warn", "memory")]
    assert gpus.pauses == [3.0] * 3


def test_a_round_whose_time_is_over_does_not_wait(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, busy=4)
    gpus.round(idle=True, ends_s=time.monotonic() + 2.5)
    assert gpus.pauses == []


def test_what_two_looks_find_alike_is_not_looked_at_again(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, busy=9, stuck=True)
    assert processes(gpus.round(idle=True)) == [("warn", "processes"), ("warn", "memory")]
    assert gpus.pauses == [3.0]


def test_all_looks_together_end_within_ten_seconds(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, busy=9)
    gpus.round(idle=True, rules=HealthPolicy(gpu_processes=GpuProcessSettings(retry_s=10)))
    assert gpus.pauses == []


def test_a_later_look_does_not_hide_what_the_round_saw_of_the_gpus(tmp_path: Path) -> None:
    gpus = Gpus(tmp_path, busy=1)
    events = gpus.round(idle=True)
    assert processes(events) == [("ok", "")]
    assert ("high", "uncorrected") in [(event.severity, event.cause) for event in events]


@pytest.mark.parametrize(("busy", "told"), [(9, [("warn", "processes"), ("warn", "memory")]), (3, [("ok", "")])])
def test_a_look_that_fails_does_not_count(tmp_path: Path, busy: int, told: list[tuple[str, str]]) -> None:
    gpus = Gpus(tmp_path, busy, fails_at=2)
    events = gpus.round(idle=True)
    assert processes(events) == told
    assert not any(event.could_not_run for event in events)
    assert gpus.pauses == [3.0] * 3


def running(name: str) -> Evidence:
    process = f"<processes><process_info><pid>7</pid><process_name>{name}</process_name></process_info></processes>"
    report = f'<nvidia_smi_log><gpu id="00000000:1B:00.0">{process}</gpu></nvidia_smi_log>'
    return Evidence(now_ns=1, outputs={"nvidia_smi": Output(report)}, idle=True)


@pytest.mark.parametrize(
    "name",
    [
        "/usr/lib/xorg/Xorg :0 -auth", "/usr/bin/gnome-shell", "nvidia-cuda-mps-server", "nvidia-imex -c /etc/x",
        "/usr/bin/nvidia-cuda-mps-control -d", "nvidia-persistenced", "/usr/bin/dcgm-exporter -f x", "nv-hostengine",
    ],
)  # fmt: skip
def test_what_a_node_runs_without_a_task_is_not_foreign(name: str) -> None:
    assert judge_gpu_processes(running(name), GpuProcessSettings()).findings == ()


@pytest.mark.parametrize("name", ["python3 /usr/bin/Xorg", "/opt/Xorg/python3", "", " "])
def test_only_the_program_itself_says_that_a_process_belongs_there(name: str) -> None:
    assert [one.cause for one in judge_gpu_processes(running(name), GpuProcessSettings()).findings] == ["processes"]


def test_memory_that_no_process_holds_keeps_no_node_from_tasks(tmp_path: Path) -> None:
    events = Gpus(tmp_path, busy=9).round(idle=True)
    assert [(event.severity, event.user_made) for event in events if event.cause == "memory"] == [("warn", True)]
