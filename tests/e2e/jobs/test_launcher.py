"""Jobs of real processes on nodes of this machine: they succeed, fail, are broken on purpose and come back."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import msgspec
import pytest
from tests.support.jobs.launching import leftovers, nothing_left, run, wait_until, write_orphan, write_script
from tests.support.patience import allowed_s

from fireflyer.base.events import (
    AttemptFailed,
    AttemptStarted,
    FaultInjected,
    JobFinished,
    JobStarted,
    Logged,
    NodeLost,
    RankExited,
    ResumeReport,
    StepReport,
)
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.schema.job import Fault, JobSpec, Timeouts, parse_fault

pytestmark = pytest.mark.processes

FAST = Timeouts(settle_ns=20 * MS, stop_grace_ns=2 * SECOND, backoff_ns=20 * MS)

REPORTING = """
from fireflyer.base.events import ResumeReport, StepReport
from fireflyer.runtime.reporter import Reporter
from fireflyer.runtime.environment import read_environment

with Reporter.from_environment(read_environment()) as reporter:
    start = 20 if attempt else 0
    reporter.resume(ResumeReport(rank, attempt, start, 'step-20' if attempt else None))
    for step in range(start + 1, 41):
        reporter.step(StepReport(rank, attempt, step, 8, 64, 1.0 / step, 1000))
        time.sleep(0.05)
    if attempt == 0:
        time.sleep(600)  # what breaks the job may come late, and must not find it done
"""


def spec_of(tmp_path: Path, script: str, **changes: object) -> JobSpec:
    base = JobSpec(script=write_script(tmp_path, script), run_dir=str(tmp_path / "run"), timeouts=FAST)
    return msgspec.structs.replace(base, **changes)


def test_all_ranks_run_and_the_job_succeeds(tmp_path: Path) -> None:
    job = run(spec_of(tmp_path, "print('args', sys.argv[1:])", args=("--steps", "5"), nodes=2, ranks_per_node=2))
    assert (job.result.exit_code, job.result.attempts, job.result.culprit) == (0, 1, None)
    assert [job.texts(rank) for rank in range(4)] == [["args ['--steps', '5']"]] * 4
    assert {line.rank: line.node for line in job.lines} == {0: 0, 1: 0, 2: 1, 3: 1}
    assert sorted(event.rank for event in job.of(RankExited)) == [0, 1, 2, 3]
    started = job.of(JobStarted)[0]
    assert (started.nodes, started.ranks_per_node, started.command[1:]) == (2, 2, ("--steps", "5"))
    assert job.of(JobFinished)[0].exit_code == 0


def test_the_run_directory_is_private_and_keeps_no_secret(tmp_path: Path) -> None:
    script = "p = os.environ['FF_SECRET_FILE']; print(oct(os.stat(p).st_mode & 0o777))"
    job = run(spec_of(tmp_path, script))
    assert job.texts(0) == ["0o600"]
    assert os.stat(job.result.run_dir).st_mode & 0o777 == 0o700
    assert sorted(os.listdir(job.result.run_dir)) == ["events.jsonl", "logs"]
    assert Path(job.result.logs_dir, "attempt-0", "rank-0.log").read_text() == "0o600\n"


def test_ranks_that_end_early_are_waited_for(tmp_path: Path) -> None:
    job = run(spec_of(tmp_path, "time.sleep(0.7 * rank)", nodes=2))
    assert job.result.exit_code == 0
    assert job.result.attempts == 1


def test_a_failing_rank_stops_the_others_and_names_itself(tmp_path: Path) -> None:
    job = run(spec_of(tmp_path, "sys.exit(7) if rank == 1 else time.sleep(60)", nodes=2, ranks_per_node=2))
    assert job.result.exit_code == 7
    assert job.result.reason == "rank 1 (node 0) exited with code 7"
    assert job.result.culprit is not None
    assert (job.result.culprit.node, job.result.culprit.rank) == (0, 1)
    codes = {event.rank: event.exit_code for event in job.of(RankExited)}
    assert codes == {0: 128 + 15, 1: 7, 2: 128 + 15, 3: 128 + 15}


def test_a_gang_is_restarted_as_often_as_allowed(tmp_path: Path) -> None:
    script = "sys.exit(7 + attempt) if rank == 1 else time.sleep(60)"
    job = run(spec_of(tmp_path, script, ranks_per_node=2, max_restarts=2))
    assert (job.result.exit_code, job.result.attempts) == (9, 3)
    assert [event.attempt for event in job.of(AttemptStarted)] == [0, 1, 2]
    assert [event.restarting for event in job.of(AttemptFailed)] == [True, True, False]
    assert "--max-restarts" in job.result.reason


def test_a_restarted_gang_may_succeed_in_all_places(tmp_path: Path) -> None:
    """Each attempt has its own port and logs, and the supervisors of sound nodes are kept."""
    script = """
print(os.environ['MASTER_PORT'], os.getppid(), flush=True)
open(sys.argv[1] + str(rank), 'w').close()
while rank == 3 and not os.path.exists(sys.argv[1] + '0'):
    time.sleep(0.01)
sys.exit(attempt == 0 and rank == 3)
"""
    done = str(tmp_path / "done")
    job = run(spec_of(tmp_path, script, args=(done,), nodes=2, ranks_per_node=2, max_restarts=1))
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    first, second = (Path(job.result.logs_dir, f"attempt-{n}", "rank-0.log").read_text().split() for n in (0, 1))
    assert first[0] != second[0]
    assert first[1] == second[1]


def test_a_rank_killed_by_a_signal_is_blamed_before_those_that_fail_of_it(tmp_path: Path) -> None:
    script = """
if rank == 2:
    with open(sys.argv[1] + '.new', 'w') as file: file.write(str(os.getpid()))
    os.rename(sys.argv[1] + '.new', sys.argv[1])
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists(sys.argv[1]) or os.path.exists('/proc/' + open(sys.argv[1]).read()):
    time.sleep(0.01)
time.sleep(0.15)
sys.exit(1)
"""
    job = run(spec_of(tmp_path, script, args=(str(tmp_path / "pid"),), nodes=2, ranks_per_node=2))
    assert job.result.exit_code == 128 + 9
    assert job.result.reason == "rank 2 (node 1) was killed by SIGKILL; not restarted (--max-restarts is 0)"


def test_a_killed_node_is_noticed_and_started_again(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, REPORTING, nodes=2, ranks_per_node=2, max_restarts=1, inject=(Fault("kill-node", 1, 25),))
    job = run(spec)
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    lost = job.of(NodeLost)
    assert [(event.node, event.attempt) for event in lost] == [(1, 0)]
    assert "SIGKILL" in lost[0].reason or "connection" in lost[0].reason
    assert job.at_ns(NodeLost) - job.at_ns(FaultInjected) < allowed_s(2) * SECOND
    failed = job.of(AttemptFailed)
    assert [(event.node, event.rank, event.restarting) for event in failed] == [(1, None, True)]
    injected = job.of(FaultInjected)
    assert [(event.what, event.attempt) for event in injected] == [("kill-node=1", 0)]
    assert (injected[0].step or 0) >= 25
    assert job.result.faults_left == ()
    resumed = [(event.rank, event.step) for event in job.of(ResumeReport) if event.attempt == 1]
    assert sorted(resumed) == [(rank, 20) for rank in range(4)]
    last = [event.step for event in job.of(StepReport) if event.attempt == 1 and event.rank == 3]
    assert last == list(range(21, 41))


def test_a_killed_rank_restarts_the_gang(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, REPORTING, nodes=2, ranks_per_node=1, max_restarts=1, inject=(Fault("kill-rank", 0, 5),))
    job = run(spec)
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    assert [(event.node, event.rank) for event in job.of(AttemptFailed)] == [(0, 0)]
    assert job.at_ns(RankExited) - job.at_ns(FaultInjected) < allowed_s(1) * SECOND
    assert job.at_ns(AttemptFailed) - job.at_ns(FaultInjected) < allowed_s(2) * SECOND
    assert job.of(NodeLost) == []


def test_a_script_that_reports_nothing_is_broken_by_time_and_a_fault_that_never_was_is_told(tmp_path: Path) -> None:
    script = "time.sleep(0 if attempt else 60)"
    faults = (parse_fault("kill-rank=1@1s"), parse_fault("kill-rank=0@5"))
    job = run(spec_of(tmp_path, script, ranks_per_node=2, max_restarts=1, inject=faults))
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    assert [(event.what, event.step) for event in job.of(FaultInjected)] == [("kill-rank=1", None)]
    assert [(event.node, event.rank) for event in job.of(AttemptFailed)] == [(0, 1)]
    assert job.result.faults_left == faults[1:]


def supervisors_of(run_dir: str, node: int) -> list[int]:
    return [
        pid
        for pid, command in leftovers(run_dir)
        if "guard.py" not in command and "fireflyer.cluster.supervisor" in command and f'"node":{node},' in command
    ]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_hung_or_dead_supervisor_is_lost_within_two_seconds(tmp_path: Path, number: signal.Signals) -> None:
    broken_ns: list[int] = []
    seen: list[Logged] = []

    def break_it(entry: Logged) -> None:
        seen.append(entry)
        if isinstance(entry.event, StepReport) and not broken_ns:
            (supervisor,) = supervisors_of(str(tmp_path / "run"), 1)
            os.kill(supervisor, number)
            broken_ns.append(entry.at_ns)

    job = run(spec_of(tmp_path, REPORTING, nodes=2, ranks_per_node=1, max_restarts=1), on_entry=break_it)
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    assert [event.node for event in job.of(NodeLost)] == [1]
    assert job.at_ns(NodeLost) - broken_ns[0] < allowed_s(2) * SECOND


def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + str(rank), 'w').close()
while not all(os.path.exists(sys.argv[1] + str(other)) for other in (0, 1)):
    time.sleep(0.01)
sys.exit(5) if rank == 0 else time.sleep(60)
"""
    timeouts = Timeouts(settle_ns=20 * MS, stop_grace_ns=300 * MS)
    job = run(spec_of(tmp_path, script, args=(str(tmp_path / "ready"),), ranks_per_node=2, timeouts=timeouts))
    assert job.result.exit_code == 5
    assert {event.rank: event.exit_code for event in job.of(RankExited)} == {0: 5, 1: 128 + 9}


@pytest.mark.parametrize("exit_code", [0, 3])
def test_what_a_rank_leaves_behind_is_killed(tmp_path: Path, exit_code: int) -> None:
    """In a session of its own, orphaned, without the environment that would give it away, holding the rank's pipes."""
    pids = tmp_path / "pids"
    orphan = write_orphan(tmp_path)
    script = f"""
subprocess.run(['env', '-i', 'setsid', '--fork', sys.executable, {orphan!r}, {str(pids)!r}])
subprocess.Popen([sys.executable, {orphan!r}, {str(pids)!r}], start_new_session=True)
while not (os.path.exists({str(pids)!r}) and len(open({str(pids)!r}).readlines()) == 2):
    time.sleep(0.01)
sys.exit({exit_code})
"""
    job = run(spec_of(tmp_path, script))
    assert job.result.exit_code == exit_code
    for pid in pids.read_text().split():
        assert not os.path.exists(f"/proc/{pid}")


def test_what_an_attempt_leaves_behind_is_gone_before_the_next(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    orphan = write_orphan(tmp_path)
    script = f"""
if attempt == 0:
    subprocess.Popen(['env', '-i', 'setsid', '--fork', sys.executable, {orphan!r}, {str(pids)!r}])
    while not (os.path.exists({str(pids)!r}) and open({str(pids)!r}).read().endswith('\\n')):
        time.sleep(0.01)
    sys.exit(1)
print(os.path.exists('/proc/' + open({str(pids)!r}).read().strip()))
"""
    job = run(spec_of(tmp_path, script, max_restarts=1))
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    assert job.texts(0) == ["False"]


def test_a_module_and_a_program_run_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_script(tmp_path, "print('module', __name__, sys.argv[1:])", name="lonely_module.py")
    monkeypatch.chdir(tmp_path)
    job = run(JobSpec(script="lonely_module", args=("-x",), kind="module", run_dir=str(tmp_path / "one")))
    assert job.texts(0) == ["module __main__ ['-x']"]
    job = run(
        JobSpec(
            script="sh",
            args=("-c", "echo $RANK of $WORLD_SIZE"),
            kind="program",
            ranks_per_node=2,
            run_dir=str(tmp_path / "two"),
        )
    )
    assert [job.texts(rank) for rank in (0, 1)] == [["0 of 2"], ["1 of 2"]]


def test_a_program_that_cannot_be_executed_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    job = run(JobSpec(script=str(program), kind="program", run_dir=str(tmp_path / "run")))
    assert job.result.exit_code == 127
    assert "No such file" in job.texts(0, "stderr")[0]


def test_a_stranger_on_the_port_costs_no_restart(tmp_path: Path) -> None:
    """Between the probe and rank 0's own bind somebody else takes MASTER_PORT."""
    wanted, taken = tmp_path / "wanted", tmp_path / "taken"
    script = f"""
import socket
if attempt == 0:
    with open({str(wanted)!r} + '.new', 'w') as file: file.write(os.environ['MASTER_PORT'])
    os.rename({str(wanted)!r} + '.new', {str(wanted)!r})
    while not os.path.exists({str(taken)!r}): time.sleep(0.01)
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(('127.0.0.1', int(os.environ['MASTER_PORT'])))
server.listen()
print('served')
"""
    stranger = socket.socket()

    def take() -> None:
        wait_until(wanted.exists, allowed_s(20))
        stranger.bind(("127.0.0.1", int(wanted.read_text())))
        stranger.listen()
        taken.touch()

    thread = threading.Thread(target=take)
    thread.start()
    try:
        job = run(spec_of(tmp_path, script, max_restarts=0))
    finally:
        thread.join()
        stranger.close()
    assert (job.result.exit_code, job.result.attempts) == (0, 2)
    assert job.texts(0) == ["served"]
    assert "MASTER_PORT" in job.of(AttemptFailed)[0].reason


def test_a_full_disk_under_the_logs_stops_the_job(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs" / "attempt-0"
    logs.mkdir(parents=True)
    (logs / "rank-1.log").symlink_to("/dev/full")
    job = run(spec_of(tmp_path, "print('hello'); time.sleep(60)", ranks_per_node=2, max_restarts=3))
    assert job.result.exit_code == 1
    assert job.result.attempts == 1
    assert "no space left" in job.result.reason
    assert "rank-1.log" in job.result.reason


def test_a_job_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", nodes=2)
    with pytest.raises(TimeoutError):
        run(spec, limit_s=1.5)
    nothing_left(spec.run_dir)


def test_a_broken_display_does_not_break_the_job(tmp_path: Path) -> None:
    def broken(entry: Logged) -> None:
        raise BrokenPipeError

    assert run(spec_of(tmp_path, "print('hello')"), on_entry=broken).result.exit_code == 0


def test_store_keys_of_an_earlier_attempt_are_gone(tmp_path: Path) -> None:
    script = """
from fireflyer.runtime.environment import read_environment
from fireflyer.runtime.store import open_store
store = open_store(read_environment())
print(store.add('visits', 1))
store.close()
sys.exit(attempt == 0)
"""
    job = run(spec_of(tmp_path, script, max_restarts=1))
    assert job.texts(0) == ["1", "1"]
