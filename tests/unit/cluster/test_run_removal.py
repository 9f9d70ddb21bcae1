"""Directories of old runs: removed beside the agent's loop, however deep; by the next agent where one was killed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
from tests.support.loops import on_loop

from fireflyer.base.errors import PermissionDenied
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Accounts
from fireflyer.cluster.agent.guards import Guards
from fireflyer.cluster.agent.records import AgentDirectory
from fireflyer.cluster.agent.runs import Runs
from fireflyer.cluster.core.run_messages import Event, RunRecord
from fireflyer.cluster.core.runs import KEEP_NS

TOKEN = "0a" * 16
OLD = RunRecord(token=TOKEN, lead=True, over=True, stopped=True, forgotten=True)
LEVELS = 1200
"""Deeper than Python calls itself."""


def nobody() -> NoReturn:
    raise PermissionDenied("no manager is known")


def with_old_run(tmp_path: Path) -> tuple[AgentDirectory, Path]:
    directory = AgentDirectory(str(tmp_path / "agent"))
    directory.write_run(OLD)
    run = tmp_path / "agent" / "runs" / TOKEN
    long_ago_s = time.time() - KEEP_NS / SECOND - 60
    os.utime(run / "run.json", (long_ago_s, long_ago_s))
    return directory, run


@on_loop
async def test_the_agent_goes_on_while_a_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, run = with_old_run(tmp_path)
    begun, may_end, loop_thread = threading.Event(), threading.Event(), threading.get_ident()
    remove = AgentDirectory.remove_run

    def slowly(self: AgentDirectory, token: str) -> None:
        assert threading.get_ident() != loop_thread, "it is removed in the loop of the agent"
        begun.set()
        may_end.wait()
        remove(self, token)

    monkeypatch.setattr(AgentDirectory, "remove_run", slowly)
    accounts = Accounts(os.geteuid(), own_user=True)
    guards = Guards(directory, lambda _: None, accounts)
    runs = Runs(
        directory,
        guards,
        accounts,
        key=lambda: b"",
        on_change=lambda: None,
        leaders=nobody,
        accounts_dir=str(tmp_path / "accounts"),
    )
    removed = asyncio.Event()
    feed = runs.feed

    def feed_and_tell(event: Event) -> None:
        feed(event)
        removed.set()

    monkeypatch.setattr(runs, "feed", feed_and_tell)
    try:
        guards.begin()
        runs.begin()
        runs.tick()
        await asyncio.to_thread(begun.wait)
        removed.clear()
        assert run.exists()
        may_end.set()
        await removed.wait()
        assert not run.exists()
    finally:
        may_end.set()
        runs.close()
        guards.close()


def test_a_directory_that_is_too_deep_to_be_walked_is_removed(tmp_path: Path) -> None:
    directory, run = with_old_run(tmp_path)
    here = os.getcwd()
    try:
        os.mkdir(run / "job")
        os.chdir(run / "job")
        for _ in range(LEVELS):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    directory.remove_run(TOKEN)
    assert not run.exists()


def test_what_a_killed_agent_left_of_a_directory_is_removed_by_the_next(tmp_path: Path) -> None:
    directory, run = with_old_run(tmp_path)
    (run / "log").write_text("what its launcher said")
    (run / "run.json").unlink()
    assert directory.found_runs() == ()
    assert not run.exists()
