"""The supervisor of a node whose launcher, or whose disk, is slow."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.loops import on_loop

from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.schema.wire import (
    CHECKED,
    FETCH_FILES,
    HEARTBEAT,
    KEEP_FILE,
    NEXT,
    PORT,
    RENEW,
    Check,
    Checked,
    Command,
    Done,
    FindPort,
    NumberedCommand,
    RunFiles,
    SupervisorConfig,
)
from fireflyer.cluster.supervisor import node_check
from fireflyer.cluster.supervisor import supervisor as module
from fireflyer.cluster.supervisor.lease import Lease
from fireflyer.cluster.supervisor.rank import RankProcess
from fireflyer.cluster.supervisor.run_files import RunFileCopies
from fireflyer.cluster.supervisor.supervisor import Supervisor
from fireflyer.runtime.processes.guard import LEASE_FD
from fireflyer.runtime.processes.guarded import reap_orphans, watch_exit
from fireflyer.runtime.rpc import Method


class Launcher:
    """Answers all calls at once but those of the `slow` methods, which it answers after `answer`."""

    def __init__(self, *slow: Method[Any, Any], commands: tuple[Command, ...] = ()) -> None:
        self.calls: Counter[str] = Counter()
        self.answer = asyncio.Event()
        self._slow = {method.name for method in slow}
        self._commands = commands
        self._some = asyncio.Condition()

    async def call(self, method: Method[Any, Any], request: Any, _timeout_ns: int) -> Any:
        await self.notify(method, request)
        if method.name in self._slow:
            await self.answer.wait()
        if method.name == FETCH_FILES.name:
            return RunFiles(())
        if hasattr(request, "after"):
            if request.after == len(self._commands):
                await asyncio.Event().wait()
            return NumberedCommand(request.after + 1, self._commands[request.after])
        return Done()

    async def notify(self, method: Method[Any, Any], _request: Any) -> None:
        async with self._some:
            self.calls[method.name] += 1
            self._some.notify_all()

    async def wait_for(self, method: Method[Any, Any], count: int) -> None:
        async with self._some:
            await self._some.wait_for(lambda: self.calls[method.name] >= count)

    async def wait_lost(self) -> Exception:
        await asyncio.Event().wait()
        raise AssertionError


def config(run_dir: Path) -> SupervisorConfig:
    return SupervisorConfig(
        launcher="a:1", secret_file="s", node=0, incarnation=1, heartbeat_ns=10 * MS, logs_dir="",
        run_dir=str(run_dir), lease_ns=100 * MS,
    )  # fmt: skip


@contextmanager
def lease(lease_ns: int) -> Iterator[Lease]:
    reader, writer = os.pipe()
    os.environ[LEASE_FD] = str(writer)
    try:
        yield Lease(lease_ns)
    finally:
        os.close(reader)
        os.close(writer)


async def run_until(supervisor: Supervisor, *events: Coroutine[Any, Any, None]) -> None:
    """Runs it until all of this has happened, and closes it as `run_supervisor` does."""
    running: asyncio.Future[Any] = asyncio.ensure_future(supervisor.run())
    waiting: asyncio.Future[Any] = asyncio.gather(*events)
    try:
        async with asyncio.timeout(20):
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
            assert not running.done(), f"the supervisor has ended: {running}"
            await waiting
    finally:
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        supervisor.close()


def supervisor_of(launcher: Launcher, config: SupervisorConfig, granted: Lease) -> Supervisor:
    client: Any = launcher
    return Supervisor(config, client, granted)


@on_loop
async def test_a_file_that_takes_long_to_send_holds_up_no_lease(tmp_path: Path) -> None:
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "dump").write_bytes(b"large")
    launcher = Launcher(KEEP_FILE)
    with lease(100 * MS) as granted:
        supervisor = supervisor_of(launcher, config(tmp_path), granted)
        await run_until(supervisor, launcher.wait_for(KEEP_FILE, 1), launcher.wait_for(RENEW, 5))


@on_loop
async def test_a_node_shows_that_it_lives_while_it_fetches_the_files_of_the_run(tmp_path: Path) -> None:
    """A launcher that reads a hundred plans from a busy disk takes longer than a node may be silent."""
    launcher = Launcher(FETCH_FILES)
    with lease(100 * MS) as granted:
        supervisor = supervisor_of(launcher, config(tmp_path), granted)
        await run_until(supervisor, launcher.wait_for(HEARTBEAT, 3), launcher.wait_for(RENEW, 2))


@on_loop
async def test_no_command_is_obeyed_before_the_files_are_there(tmp_path: Path) -> None:
    launcher = Launcher(FETCH_FILES, commands=(FindPort(0, 0),))
    with lease(100 * MS) as granted:
        supervisor = supervisor_of(launcher, config(tmp_path), granted)

        async def story() -> None:
            await launcher.wait_for(RENEW, 2)
            assert launcher.calls[NEXT.name] == 0
            launcher.answer.set()
            await launcher.wait_for(PORT, 1)

        await run_until(supervisor, story())


@on_loop
async def test_a_file_that_is_being_sent_is_waited_for(tmp_path: Path) -> None:
    """The attempt is over for the launcher only when it has all of them."""
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "dump").write_bytes(b"large")
    launcher = Launcher(KEEP_FILE)
    client: Any = launcher
    files = RunFileCopies(client, str(tmp_path))
    first = asyncio.create_task(files.keep())
    await launcher.wait_for(KEEP_FILE, 1)
    last = asyncio.create_task(files.keep())
    for _ in range(3):
        await asyncio.to_thread(lambda: None)
    assert not last.done()
    launcher.answer.set()
    await asyncio.gather(first, last)
    assert launcher.calls[KEEP_FILE.name] == 1


@on_loop
async def test_a_check_that_ends_late_kills_no_rank_of_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that hangs in the kernel cannot be killed in time; the launcher waits ten seconds longer for it."""
    killed: list[str] = []
    monkeypatch.setattr(module, "_kill_descendants", lambda: killed.append("all"))

    async def late(check: Check, _counters: object) -> Checked:
        return Checked(check.attempt, 0)

    monkeypatch.setattr(module, "run_check", late)
    launcher = Launcher()
    with lease(100 * MS) as granted:
        supervisor = supervisor_of(launcher, config(tmp_path), granted)
        check = Check(0, ("true",), {}, str(tmp_path / "log"), SECOND)
        monkeypatch.setattr(supervisor._writer, "drained", lambda: asyncio.sleep(0))
        await supervisor._check(check)
        assert killed == ["all"], "what the check has left is removed"
        supervisor._ranks = {0: RankProcess(1, 0, writer=supervisor._writer, on_line=print, on_log_error=print,
                                            on_exit=print)}  # fmt: skip
        await supervisor._check(check)
        assert killed == ["all"]
        assert [method for method, _ in list(supervisor._news._queue)] == [CHECKED, CHECKED]  # type: ignore[attr-defined]


@on_loop
async def test_a_port_that_cannot_be_looked_for_ends_the_node_and_not_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer the launcher would wait for ever."""

    def broken(*_: object) -> int:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(module, "reserve_any_port", broken)
    launcher = Launcher(commands=(FindPort(0, 0),))
    with lease(100 * MS) as granted:
        async with asyncio.timeout(20):
            assert await supervisor_of(launcher, config(tmp_path), granted).run() == 1


@on_loop
async def test_the_exit_code_of_a_check_is_not_lost_to_who_removes_ended_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat came between the end of the program and the look at its code, and a suspect node was sound."""

    def late(loop: asyncio.AbstractEventLoop, pid: int, on_exit: Callable[[], None]) -> None:
        def ended() -> None:
            reap_orphans(lambda other: node_check.is_check(other) or other != pid)
            on_exit()

        watch_exit(loop, pid, ended)

    monkeypatch.setattr(node_check, "watch_exit", late)
    check = Check(0, ("/bin/sh", "-c", "exit 2"), {}, str(tmp_path / "log"), 30 * SECOND)
    assert (await node_check.run_check(check)).exit_code == 2
