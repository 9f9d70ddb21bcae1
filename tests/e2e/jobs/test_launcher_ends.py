"""However a launcher ends, nothing of its job is left.

Ctrl-C once and twice, SIGTERM, SIGKILL of the launcher alone and of everything at once. The launcher is a process of
its own here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.support.jobs.launching import (
    events_of,
    leftovers,
    nothing_left,
    started_launcher,
    wait_until,
    write_orphan,
    write_script,
)
from tests.support.patience import allowed_s

from fireflyer.base.events import AttemptFailed, JobFinished
from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.job import JobSpec, Timeouts

pytestmark = pytest.mark.processes

WAITING = """
{before}
try:
    open(sys.argv[1] + str(rank), 'w').close()
    time.sleep(1000)
except KeyboardInterrupt:
    print('interrupted', flush=True)
    sys.exit(0)
"""


def waiting_spec(tmp_path: Path, *, before: str = "", **changes: object) -> JobSpec:
    """Two nodes of two ranks that say that they live, and wait."""
    script = write_script(tmp_path, WAITING.format(before=before))
    base = JobSpec(
        script=script, args=(str(tmp_path / "up"),), nodes=2, ranks_per_node=2, run_dir=str(tmp_path / "run")
    )
    return msgspec.structs.replace(base, **changes)


def wait_for_ranks(tmp_path: Path) -> None:
    wait_until(
        lambda: all((tmp_path / f"up{rank}").exists() for rank in range(4)), allowed_s(30), "the ranks do not come up"
    )


def output_of(spec: JobSpec) -> str:
    return Path(spec.run_dir + ".out").read_text()


def pids_of(spec: JobSpec, word: str) -> list[int]:
    return [pid for pid, command in leftovers(spec.run_dir) if word in command]


def test_ctrl_c_is_passed_on_and_the_job_ends_with_130(tmp_path: Path) -> None:
    spec = waiting_spec(tmp_path, max_restarts=5)
    with started_launcher(spec) as launcher:
        wait_for_ranks(tmp_path)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(allowed_s(20)) == 130
        nothing_left(spec.run_dir)
    assert output_of(spec).count("interrupted") == 4
    assert "stopped by SIGINT" in output_of(spec)
    events = [entry.event for entry in events_of(spec.run_dir + "/events.jsonl")]
    assert isinstance(events[-1], JobFinished)
    assert events[-1].exit_code == 130
    assert [event.stopped for event in events if isinstance(event, AttemptFailed)] == [True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_are_passed_on_as_well(tmp_path: Path, number: signal.Signals) -> None:
    before = f"signal.signal({int(number)}, lambda *_: (print('heard', flush=True), sys.exit(0)))"
    spec = waiting_spec(tmp_path, before=before)
    with started_launcher(spec) as launcher:
        wait_for_ranks(tmp_path)
        launcher.send_signal(number)
        assert launcher.wait(allowed_s(20)) == 128 + number
    assert output_of(spec).count("heard") == 4


def test_a_second_ctrl_c_does_not_wait_for_deaf_ranks(tmp_path: Path) -> None:
    before = "signal.signal(signal.SIGINT, lambda *_: print('deaf', flush=True))"
    spec = waiting_spec(tmp_path, before=before, timeouts=Timeouts(stop_grace_ns=600 * SECOND))
    with started_launcher(spec) as launcher:
        wait_for_ranks(tmp_path)
        launcher.send_signal(signal.SIGINT)
        wait_until(lambda: output_of(spec).count("deaf") >= 4, allowed_s(20), "the signal is not passed on")
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(0.5)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(allowed_s(20)) == 130
        nothing_left(spec.run_dir)


def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither ranks nor what they detached from themselves, with and without the environment that marks it."""
    orphan, pids = write_orphan(tmp_path), tmp_path / "pids"
    before = f"""
if rank == 3:
    command = [sys.executable, {orphan!r}, {str(pids)!r}]
    subprocess.run(['env', '-i', 'setsid', '--fork', *command])
    subprocess.Popen(command, start_new_session=True)
    while not (os.path.exists({str(pids)!r}) and len(open({str(pids)!r}).readlines()) == 2):
        time.sleep(0.01)
"""
    spec = waiting_spec(tmp_path, before=before)
    with started_launcher(spec) as launcher:
        wait_for_ranks(tmp_path)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        nothing_left(spec.run_dir)
        orphans = [int(pid) for pid in pids.read_text().split()]
        assert len(orphans) == 2
        wait_until(lambda: not any(is_alive(pid) for pid in orphans), allowed_s(5), "detached processes are left")


def test_launcher_and_supervisors_killed_at_once_leave_nothing_behind(tmp_path: Path) -> None:
    before = f"""
subprocess.Popen([sys.executable, {write_orphan(tmp_path)!r}, os.devnull], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
    spec = waiting_spec(tmp_path, before=before)
    with started_launcher(spec) as launcher:
        wait_for_ranks(tmp_path)
        supervisors = [
            pid for pid in pids_of(spec, "fireflyer.cluster.supervisor") if "guard.py" not in command_of(pid)
        ]
        assert len(supervisors) == 2
        for pid in (*supervisors, launcher.pid):
            with contextlib.suppress(ProcessLookupError):  # the guards are quick
                os.kill(pid, signal.SIGKILL)
        launcher.wait()
        nothing_left(spec.run_dir)


def test_killed_guards_leave_nothing_behind_either(tmp_path: Path) -> None:
    """The launcher finds what a guard could not kill by the mark in its environment, and the job fails in order."""
    before = f"subprocess.Popen([sys.executable, {write_orphan(tmp_path)!r}, os.devnull], start_new_session=True)"
    spec = waiting_spec(tmp_path, before=before)
    with started_launcher(spec) as launcher:
        wait_for_ranks(tmp_path)
        guards = pids_of(spec, "guard.py")
        assert len(guards) == 2
        for pid in guards:
            os.kill(pid, signal.SIGKILL)
        assert launcher.wait(allowed_s(30)) == 1
        nothing_left(spec.run_dir)
    assert "node" in output_of(spec)


def test_a_launcher_that_was_stopped_for_a_while_goes_on(tmp_path: Path) -> None:
    """Ctrl-Z and fg: it was the launcher that was silent, not its nodes."""
    spec = waiting_spec(tmp_path, max_restarts=0)
    with started_launcher(spec) as launcher:
        wait_for_ranks(tmp_path)
        launcher.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(2 * spec.timeouts.node_lost_ns / SECOND)
        launcher.send_signal(signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(1)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(allowed_s(20)) == 130
    assert output_of(spec).count("interrupted") == 4


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
