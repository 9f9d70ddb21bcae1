"""`ff run` as a user meets it: real launcher, real processes, a pipe and a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

TIMEOUT_S = 90
FF = (sys.executable, "-m", "fireflyer")

TRAIN = """
import os, sys, time
from fireflyer.base.events import CheckpointReport, ResumeReport, StepReport
from fireflyer.cluster import Reporter
from fireflyer.runtime import read_environment

env = read_environment()
steps = int(sys.argv[sys.argv.index("--steps") + 1])
until = sys.argv[sys.argv.index("--until") + 1] if "--until" in sys.argv else "/"  # then the first attempt may end
done = 10 if env.attempt else 0
with Reporter.from_environment(env) as reporter:
    reporter.resume(ResumeReport(env.rank, env.attempt, done, "step-00000010" if done else None))
    for step in range(done + 1, steps + 1):
        while step == steps and not env.attempt and not os.path.exists(until):
            time.sleep(0.01)
        began_ns = time.monotonic_ns()
        time.sleep(0.02)
        took_ns = time.monotonic_ns() - began_ns
        reporter.step(StepReport(env.rank, env.attempt, step, 1, 64, 1 + 1 / step, took_ns, 0, 1 << 20, 1_000_000))
        if step % 10 == 0 and env.rank == 0:
            reporter.checkpoint(CheckpointReport(0, env.attempt, step, 1 << 20, 100_000, 2_000_000))
print("rank", env.rank, "did", steps, "steps")
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    return tmp_path


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES", "TERM")}
    return kept | {"TERM": "xterm"} | extra


def ff(here: Path, *args: str, command: Sequence[str] = FF) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *args], cwd=here, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_a_fault_that_never_happened_is_told_with_what_to_do(here: Path) -> None:
    (here / "silent.py").write_text("print('ran')", encoding="utf-8")
    done = ff(here, "run", "--inject", "kill-rank=0@9", "--inject", "kill-rank=0@3600s", "silent.py")
    assert done.returncode == 0
    by_step, by_time = done.stderr.splitlines()
    assert by_step.startswith("warning: --inject kill-rank=0@9 did not happen: no rank reported step 9")
    assert by_step.endswith("needs a time instead: kill-rank=0@20s")
    assert by_time == "warning: --inject kill-rank=0@3600s did not happen: the first attempt ended before 3600 s"


def test_a_job_that_loses_a_node_is_shown_and_reported(here: Path) -> None:
    done = ff(
        here, "run", "--nodes", "2", "--ranks-per-node", "2", "--max-restarts", "1", "--run-dir", "out",
        "--inject", "kill-node=1@25",
        "train.py", "--", "--steps", "50", "--until", "never",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    for rank in range(4):
        assert f"rank {rank} | rank {rank} did 50 steps" in lines
    assert any(re.fullmatch(r"ff     \| node 1 lost: .*", line) for line in lines)
    assert "ff     | resuming from step 10 (step-00000010)" in lines
    assert any(re.match(r"Failure 1: node 1 lost at step \d+", line) for line in lines)
    assert any(re.match(r"  Resumed +from step 10", line) for line in lines)
    assert any(re.match(r"  Loss +2 → 1.02 +step 1 → step 50", line) for line in lines)
    assert "\x1b" not in done.stdout
    page = (here / "out" / "report.html").read_text(encoding="utf-8")
    assert lines[-1] == f"Report: {here / 'out' / 'report.html'}"
    assert "resumed from step 10" in page
    again = ff(here, "report", "out", "--html", "again.html")
    assert again.returncode == 0, again.stderr
    assert (here / "again.html").read_text(encoding="utf-8") == page
    assert again.stdout.splitlines()[:-1] == lines[lines.index("Job train · Succeeded") : -1]


def test_the_exit_code_of_a_script_is_ours_and_its_log_is_named(here: Path) -> None:
    (here / "bad.py").write_text("import sys; print('oh'); sys.exit(7)", encoding="utf-8")
    done = ff(here, "run", "--max-restarts", "0", "--run-dir", "out", "bad.py")
    assert done.returncode == 7
    assert done.stderr.count("\n") == 1
    log = re.search(r"its log is (\S+)", done.stderr)
    assert log is not None, done.stderr
    assert (here / log[1]).read_text(encoding="utf-8") == "oh\n"
    assert "Job bad · Failed" in done.stdout


def test_a_torchrun_script_without_reports_runs_unchanged_and_is_told_how_to_report(here: Path) -> None:
    script = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])"
    (here / "plain.py").write_text(script, encoding="utf-8")
    done = ff(here, "run", "--ranks-per-node", "2", "--run-dir", "out", "--env", "A=1", "plain.py", "--lr", "--", "-v")
    assert done.returncode == 0, done.stderr
    assert "rank 1 | 1 2 ['--lr', '--', '-v']" in done.stdout.splitlines()
    lines = done.stdout.splitlines()
    status, headline, how, where = lines[lines.index("Job plain · Succeeded") :]
    assert re.fullmatch(r"Finished in [^:]+: 1 attempt, 0 failures\. This script does not use Reporter: .*", headline)
    assert "fireflyer.cluster.Reporter" in how
    assert where == f"Logs: {here / 'out' / 'logs'} · Report: {here / 'out' / 'report.html'}"
    assert (here / "out" / "logs" / "attempt-0" / "rank-1.log").is_file()
    assert "Effective training time ratio" in (here / "out" / "report.html").read_text(encoding="utf-8")
    assert ff(here, "report", "out").stdout.splitlines() == [status, headline, how, where]


def test_the_script_of_the_how_to_gets_its_report(here: Path) -> None:
    text = (Path(__file__).parents[3] / "docs/how-to/report-steps.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (here / "fit.py").write_text(code, encoding="utf-8")
    done = ff(here, "run", "--ranks-per-node", "2", "--run-dir", "out", "fit.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r": 50 steps, loss \S+ → \S+, 0 failures\.", done.stdout)
    assert re.search(r"Productive +\d", done.stdout)


def test_quiet_prints_the_ranks_only(here: Path) -> None:
    done = ff(here, "run", "--quiet", "--run-dir", "out", "train.py", "--steps", "3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 | rank 0 did 3 steps\n", "")
    assert (here / "out" / "report.html").exists()


def test_a_command_is_put_before_that_of_each_rank(here: Path) -> None:
    (here / "wrapped.py").write_text("import os; print('it is', os.environ['WRAPPED'])", encoding="utf-8")
    done = ff(here, "run", "--quiet", "--wrap", "env 'WRAPPED=in a box'", "wrapped.py")
    assert (done.returncode, "it is in a box" in done.stdout) == (0, True), done
    refused = ff(here, "run", "--wrap", "env 'WRAPPED", "wrapped.py")
    assert refused.returncode == 2
    assert "--wrap" in refused.stderr.splitlines()[-1]


def test_a_taken_port_a_missing_gpu_and_a_wrong_setting_are_one_line_errors(here: Path) -> None:
    wrong = ff(here, "run", "--run-dir", "out", "--env", "FF_PIN=maybe", "train.py", "--steps", "3")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: environment variable FF_PIN='maybe' is neither 0 nor 1\n"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = ff(here, "run", "--master-port", str(port), "--run-dir", "out", "train.py", "--steps", "3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert str(port) in done.stderr
    many = ff(here, "run", "--devices", "gpu", "--ranks-per-node", "4096", "--run-dir", "out", "train.py")
    assert many.returncode == 2
    assert re.fullmatch(r"error: .*--devices cpu.*\n", many.stderr)
    assert not (here / "out").exists()


def test_a_reader_that_leaves_does_not_end_the_job(here: Path) -> None:
    with subprocess.Popen(
        [*FF, "run", "--run-dir", "out", "train.py", "--steps", "40"],
        cwd=here, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() != ""
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    events = (here / "out" / "events.jsonl").read_text(encoding="utf-8")
    assert '"job_finished"' in events.splitlines()[-1]
    assert '"exit_code":0' in events.splitlines()[-1]
    assert (here / "out" / "report.html").exists()


def test_ctrl_c_stops_the_job_and_still_reports(here: Path) -> None:
    with subprocess.Popen(
        [*FF, "run", "--run-dir", "out", "train.py", "--steps", "100000"],
        cwd=here, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(r"ff     \| step [1-9]", line):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "Job train · Stopped" in out
    # Which of the three it is depends on the instant: the last step was saved, an earlier one, or none yet.
    saved = r"(?: \(saved: step \d+\))?; resume with the same command and another --run-dir"
    assert re.fullmatch(rf"stopped by Ctrl-C after step \d+(?:{saved}|; logs are in \S+)\n", err)


STATUS = r"step \d+ · loss [\d.]+ · [\d,]+ tokens/s · allreduce ≥ [\d.]+ GB/s"


def read_terminal(master: int, twice: Path) -> str:
    """Everything until the other side has closed. Makes the file `twice` when the status has been there twice."""
    shown = bytearray()
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 1.0)[0]:
            continue
        try:
            data = os.read(master, 65536)
        except OSError:
            break
        if not data:
            break
        shown += data
        if len(re.findall(STATUS, shown.decode("utf-8", errors="replace"))) >= 2:
            twice.touch()
    return shown.decode("utf-8", errors="replace")


@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal_there_is_a_live_status(here: Path, no_color: bool) -> None:
    master, slave = pty.openpty()
    extra = {"COLUMNS": "100", "LINES": "40"} | ({"NO_COLOR": "1"} if no_color else {})
    process = subprocess.Popen(
        [*FF, "run", "--run-dir", "out", "train.py", "--", "--steps", "60", "--until", "twice"],
        cwd=here, env=environment(**extra), stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    shown = read_terminal(master, here / "twice")
    os.close(master)
    assert process.wait(TIMEOUT_S) == 0
    assert len(re.findall(STATUS, shown)) >= 2
    assert "rank 0 did 60 steps" in shown
    assert "Effective training time ratio" in shown
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)) is not no_color


def test_version_is_quick_because_it_imports_little(here: Path) -> None:
    probe = (
        "import sys; from fireflyer.cli import main; main(['version']); "
        "print(sorted({'torch', 'numpy', 'jinja2', 'rich', 'asyncio', 'uvloop'} & set(sys.modules)))"
    )
    done = ff(here, "-c", probe, command=(sys.executable,))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
