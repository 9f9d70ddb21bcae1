"""What an agent leaves on its node of runs that are over."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.support.deep_tree import deep_tree
from tests.support.loops import on_loop

from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Accounts
from fireflyer.cluster.agent.guards import Guards
from fireflyer.cluster.agent.records import AgentDirectory
from fireflyer.cluster.agent.runs import Runs
from fireflyer.cluster.core.runs import KEEP_NS, RunRecord
from fireflyer.identity import UserCredential

OLD, YOUNG = "ab" * 16, "cd" * 16


@on_loop
async def test_the_directory_of_a_run_goes_three_days_after_the_managers_forgot_it_also_that_of_an_account(
    tmp_path: Path,
) -> None:
    directory, accounts_dir = AgentDirectory(str(tmp_path / "state")), tmp_path / "accounts"
    outside = tmp_path / "outside"
    outside.write_text("not of the run")
    for token in (OLD, YOUNG):
        record = RunRecord(token=token, lead=True, over=True, stopped=True, forgotten=True)
        directory.write_run(record)
        (accounts_dir / token / "logs").mkdir(parents=True)
        (accounts_dir / token / "link").symlink_to(outside)
    path = directory.run_record(OLD).file("run.json")
    before_ns = os.stat(path).st_mtime_ns - KEEP_NS - SECOND
    os.utime(path, ns=(before_ns, before_ns))
    accounts = Accounts(os.geteuid())
    guards = Guards(directory, lambda _: None, accounts)
    runs = Runs(
        directory,
        guards,
        accounts,
        key=bytes,
        on_change=lambda: None,
        leaders=lambda: (UserCredential(""), []),
        accounts_dir=str(accounts_dir),
    )
    try:
        guards.begin()
        runs.begin()
        assert set(runs.led()) == {OLD, YOUNG}
        with deep_tree(str(accounts_dir / OLD / "logs")):  # of the user
            runs.tick()
            while set(runs.led()) != {YOUNG}:  # noqa: ASYNC110, they are removed beside the loop
                await asyncio.sleep(0.01)
        assert [path.name for path in accounts_dir.iterdir()] == [YOUNG]
        assert [path.name for path in (tmp_path / "state" / "runs").iterdir()] == [YOUNG]
        assert outside.exists()
    finally:
        runs.close()
        guards.close()
