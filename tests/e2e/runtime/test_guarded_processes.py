"""Guards and leashes: what is started under them cannot be left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.jobs.launching import wait_until, write_orphan
from tests.support.loops import on_loop
from tests.support.patience import allowed_s

from fireflyer.base.errors import Busy
from fireflyer.runtime.processes import guard as guard_program
from fireflyer.runtime.processes import parent_death_signal
from fireflyer.runtime.processes.guard_command import GuardCommand
from fireflyer.runtime.processes.guarded import (
    MARKER,
    Guarded,
    child_environment,
    descendants,
    kill_marked,
    marked,
    new_token,
    start_with_parent_death_signal,
    watch_exit,
)

pytestmark = pytest.mark.processes


def guarded(
    tmp_path: Path, *command: str, token: str | None = None, how: GuardCommand | None = None
) -> tuple[Guarded, asyncio.Future[int]]:
    exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with open(tmp_path / "log", "ab") as log:
        guard = Guarded(
            how or command,
            token=token or new_token(),
            environment=child_environment({}),
            log=log,
            on_exit=exited.set_result,
        )
    return guard, exited


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def known(pid: int) -> bool:
    """Also one that has ended, and that nobody has waited for."""
    return Path(f"/proc/{pid}").exists()


def read_pids(path: Path, lines: int) -> list[int]:
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= lines, allowed_s(20))
    return [int(pid) for pid in path.read_text().split()]


async def until_written(path: Path, lines: int) -> list[int]:
    return await asyncio.to_thread(read_pids, path, lines)


def guard_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@on_loop
async def test_a_command_that_ends_takes_what_it_detached_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    orphan = [sys.executable, write_orphan(tmp_path), str(pids)]
    code = f"""
import os, subprocess, time
subprocess.run(['env', '-i', 'setsid', '--fork', *{orphan!r}])
while not (os.path.exists({str(pids)!r}) and open({str(pids)!r}).read().endswith('\\n')): time.sleep(0.01)
print('said')
os._exit(5)
"""
    guard, exited = guarded(tmp_path, sys.executable, "-u", "-c", code)
    assert await exited == 5
    assert await guard.wait_gone()
    (pid,) = await until_written(pids, 1)
    assert not alive(pid)
    assert (tmp_path / "log").read_text() == "said\n"


@on_loop
async def test_the_guard_signals_the_group_of_its_command_and_nobody_after_its_end(tmp_path: Path) -> None:
    """Who has started the guard sends nothing by number: that of a command which has ended may be another one's."""
    pids = tmp_path / "pids"
    say = f"print(os.getpid(), file=open({str(pids)!r}, 'a'))"
    code = f"""
import os, signal, subprocess, sys
os.setsid()
subprocess.Popen([sys.executable, '-c', {f"import os, time; {say}; time.sleep(1000)"!r}])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
{say}
print(signal.sigwait([signal.SIGUSR1]))
"""
    guard, exited = guarded(tmp_path, sys.executable, "-c", code)
    mine, child_pid = sorted(await until_written(pids, 2))
    guard.signal(signal.SIGUSR1)  # which the child does not block
    assert await exited == 0
    guard.signal(signal.SIGKILL)
    assert await guard.wait_gone()
    guard.signal(signal.SIGKILL)
    assert not alive(mine)
    assert not alive(child_pid)
    assert (tmp_path / "log").read_text().split() == [str(int(signal.SIGUSR1))]


@pytest.mark.parametrize("stop_guard", [False, True])
@on_loop
async def test_closing_the_guard_kills_at_once(tmp_path: Path, stop_guard: bool) -> None:
    """Also a guard that was stopped (SIGSTOP)."""
    pids = tmp_path / "pids"
    guard, exited = guarded(tmp_path, sys.executable, write_orphan(tmp_path), str(pids))
    (pid,) = await until_written(pids, 1)
    assert pid == guard.pid
    guard_pid = guard_of(pid)
    if stop_guard:
        os.kill(guard_pid, signal.SIGSTOP)
    guard.kill()
    assert await guard.wait_gone()
    assert not alive(pid)
    assert not alive(guard_pid)
    assert not exited.done() or exited.result() == 128 + 9


@on_loop
async def test_a_guard_spares_those_who_only_inherited_the_mark(tmp_path: Path) -> None:
    """As a job does that a rank submitted to a batch system, which runs it with the environment of the rank."""
    guard, exited = guarded(tmp_path, "true")
    job = await asyncio.create_subprocess_exec("sleep", "1000", env={**os.environ, MARKER: guard.token})
    try:
        assert await exited == 0
        assert await guard.wait_gone()
        assert job.returncode is None
        assert alive(job.pid)
    finally:
        job.kill()
        await job.wait()


@on_loop
async def test_a_blocked_signal_is_not_inherited(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD, signal.SIGTERM))
    try:
        guard, exited = guarded(tmp_path, "sh", "-c", "kill -TERM $$")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    async with asyncio.timeout(20):
        assert await exited == 128 + 15
        assert await guard.wait_gone()


@on_loop
async def test_a_guard_that_cannot_be_watched_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last free descriptor was used up by its pipes."""
    started: list[int] = []
    token = new_token()

    def no_descriptor_left(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_descriptor_left)
    with pytest.raises(Busy, match="too many open files"):
        guarded(tmp_path, "sleep", "1000", token=token)
    assert not known(started[0])
    assert marked(token) == []


@on_loop
async def test_a_killed_guard_takes_its_command_with_it(tmp_path: Path) -> None:
    """The command by the kernel, what it detached by the mark in its environment."""
    pids = tmp_path / "pids"
    script = write_orphan(tmp_path)
    code = f"import os, subprocess, sys; subprocess.Popen([sys.executable, {script!r}, {str(pids)!r}], \
start_new_session=True); os.execv(sys.executable, [sys.executable, {script!r}, {str(pids)!r}])"
    guard, _ = guarded(tmp_path, sys.executable, "-c", code)
    started = await until_written(pids, 2)
    assert guard.pid is not None
    assert sorted(marked(guard.token)) == sorted([*started, guard_of(guard.pid)])
    os.kill(guard_of(guard.pid), signal.SIGKILL)
    assert await guard.wait_gone()
    assert not any(alive(pid) for pid in started)


@on_loop
async def test_a_command_dies_with_its_guard_even_without_its_mark(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    guard, _ = guarded(tmp_path, "env", "-u", MARKER, sys.executable, write_orphan(tmp_path), str(pids))
    (pid,) = await until_written(pids, 1)
    os.kill(guard_of(pid), signal.SIGKILL)
    assert await guard.wait_gone()
    await asyncio.to_thread(wait_until, lambda: not alive(pid), 5, "the command lives on")


@on_loop
async def test_what_a_shell_of_another_machine_prints_is_no_word_of_its_guard(tmp_path: Path) -> None:
    """A login script may print anything, and as much of it as it likes, before the guard speaks."""
    noise = "echo started by root; echo exited; head -c 100000 /dev/zero | tr '\\0' x; echo; echo exited the maze"
    script = f"{noise}; printf 'started 7\\nexited 3\\nexited 4\\nclean\\n'"
    guard, exited = guarded(tmp_path, how=GuardCommand(("sh", "-c", script), remote=True))
    assert await exited == 3
    assert await guard.wait_gone(), "the proof that nothing is left was not heard"
    assert guard.pid == 7


@on_loop
async def test_a_command_that_does_not_exist_is_told(tmp_path: Path) -> None:
    guard, exited = guarded(tmp_path, "/no/such/program")
    assert await exited == 127
    assert await guard.wait_gone()
    assert "No such file" in (tmp_path / "log").read_text()


def start_marked(command: list[str], value: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=child_environment({MARKER: value}))


@on_loop
async def test_a_token_marks_its_continuations_and_no_other(tmp_path: Path) -> None:
    token, pids = new_token(), tmp_path / "pids"
    command = [sys.executable, write_orphan(tmp_path), str(pids)]
    values = [f"{token}.1.1", f"{token}.1.10", f"{token}x", token]
    processes = [start_marked(command, value) for value in values]
    try:
        await until_written(pids, 4)
        assert sorted(marked(token)) == sorted(processes[index].pid for index in (0, 1, 3))
        assert marked(f"{token}.1.1") == [processes[0].pid]
        assert await kill_marked(f"{token}.1")
        assert [process.wait(allowed_s(10)) for process in processes[:2]] == [-9, -9]
        assert processes[3].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_leashed_process_dies_with_its_parent(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import sys, time
from fireflyer.runtime.processes.guarded import child_environment, start_with_parent_death_signal
start_with_parent_death_signal([sys.executable, {write_orphan(tmp_path)!r}, {str(pids)!r}],
              environment=child_environment({{}}), stdout=1, stderr=2)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), allowed_s(20))
        (child,) = descendants(parent.pid)
        assert int(pids.read_text()) == child
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not alive(child), allowed_s(5), "the leashed process lives on")


@on_loop
async def test_a_leashed_process_hears_signals_that_its_parent_ignores(tmp_path: Path) -> None:
    code = "import signal; print(*(int(s) for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN))"
    out = tmp_path / "out"
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    fd = os.open(out, os.O_WRONLY | os.O_CREAT)
    try:
        environment = child_environment({})
        process = start_with_parent_death_signal(
            [sys.executable, "-c", code], environment=environment, stdout=fd, stderr=fd
        )
    finally:
        os.close(fd)
        signal.signal(signal.SIGUSR1, before)
    ended = asyncio.Event()
    watch_exit(asyncio.get_running_loop(), process.pid, ended.set)
    await ended.wait()
    assert process.wait() == 0
    ignored_by_python_itself = {signal.SIGPIPE, signal.SIGXFSZ}
    assert {int(number) for number in out.read_text().split()} == ignored_by_python_itself


def test_a_leash_of_a_dead_parent_starts_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-I", "-S", parent_death_signal.__file__, "1", "echo", "x"], capture_output=True
    )
    assert (result.returncode, result.stdout) == (128 + 9, b"")


@pytest.mark.parametrize(("program", "code"), [("/no/such/program", 127), ("/etc/passwd", 126)])
def test_a_leash_says_why_a_command_cannot_be_executed(program: str, code: int) -> None:
    command = [sys.executable, "-I", "-S", parent_death_signal.__file__, str(os.getpid()), program]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == code
    assert result.stderr.count("\n") == 1
    assert program in result.stderr


RENEWING = """
import os, sys, time
lease = int(os.environ["FF_LEASE_FD"])
for _ in range(int(sys.argv[1])):
    os.write(lease, b"%d\\n" % (time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 10**18))
    time.sleep(0.1)
print("renewed", flush=True)
time.sleep(1000)
"""


@on_loop
async def test_a_command_that_does_not_renew_its_lease_is_killed(tmp_path: Path) -> None:
    """However long a lease the command asks for, and whatever it has started."""
    pids = tmp_path / "pids"
    orphan = ["setsid", "--fork", sys.executable, write_orphan(tmp_path), str(pids)]
    code = f"import subprocess; subprocess.run({orphan!r})\n{RENEWING}"
    how = GuardCommand.here([sys.executable, "-c", code, "25"], lease_s=2)
    guard, exited = guarded(tmp_path, how=how)
    (pid,) = await until_written(pids, 1)
    assert await guard.wait_gone()
    assert (tmp_path / "log").read_text() == "renewed\n"  # which takes longer than one lease
    assert not alive(pid)
    assert not exited.done() or exited.result() == 128 + 9


@on_loop
async def test_a_stopped_command_loses_its_lease(tmp_path: Path) -> None:
    guard, _ = guarded(tmp_path, how=GuardCommand.here([sys.executable, "-c", RENEWING, "1000"], lease_s=2))
    await asyncio.to_thread(wait_until, lambda: guard.pid is not None, 20)
    assert guard.pid is not None
    os.kill(guard.pid, signal.SIGSTOP)
    assert await guard.wait_gone()
    assert not alive(guard.pid)


@on_loop
async def test_a_detached_guard_needs_no_owner_and_obeys_sigterm(tmp_path: Path) -> None:
    pids, words = tmp_path / "pids", tmp_path / "words"
    command = [sys.executable, write_orphan(tmp_path), str(pids)]
    with words.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", guard_program.__file__, "--lease=60", "--detached", *command,
            stdin=asyncio.subprocess.DEVNULL, stdout=file,
        )  # fmt: skip
    (pid,) = await until_written(pids, 1)
    assert process.returncode is None
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    assert words.read_text() == f"started {pid}\nclean\n"
    assert not alive(pid)
