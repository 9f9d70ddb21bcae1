"""The logs that a manager has: as leader alone, for so long as they are kept, and for so many readers."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.loops import on_loop

from fireflyer.base.errors import Busy, NotFound, PermissionDenied, Unreachable, UsageError
from fireflyer.base.units import MIB, SECOND
from fireflyer.cluster.core.objects.log_follow import LogFollower
from fireflyer.cluster.manager import log_search
from fireflyer.cluster.manager import logs as manager_logs
from fireflyer.cluster.manager.log_search import search_logs
from fireflyer.cluster.manager.logs import LogLimits, Logs, Reader
from fireflyer.cluster.schema.api import Change
from fireflyer.cluster.schema.logs import AppendLog, EndLog, LogChunk, LogEnd, LogsEnded, LogsState, LogText
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, TaskState

KEEP_NS = 1000 * SECOND
TOKEN = "ab" * 16
RANK_0 = "attempt-0-rank-0"
ADA, BOB = Reader("ada", ()), Reader("bob", ())


class Cluster:
    """What `Logs` asks of the platform: who leads, and ada's tasks, each with one run on node n1."""

    def __init__(self) -> None:
        self.leads = True
        self.time_ns = 10_000 * SECOND
        self.ended_ns: dict[int, int | None] = {}
        """Of each task; None: it runs."""

    def require_lead(self) -> None:
        if not self.leads:
            raise Unreachable("this manager does not lead")

    def run_place(self, task: int, run: int) -> tuple[str, str]:
        if task not in self.ended_ns or run != 0:
            raise NotFound(f"there is no run {run} of task {task}")
        return TOKEN, "n1"

    def progress(self, task: int) -> Any:
        self.run_place(task, 0)
        ended_ns = self.ended_ns[task]
        view = SimpleNamespace(
            id=task,
            user="ada",
            runs=1,
            ended_ns=ended_ns,
            state=TaskState.RUNNING if ended_ns is None else FINISHED,
            outcome=None if ended_ns is None else Outcome.SUCCEEDED,
            exit_code=0,
            reason="",
        )
        run = SimpleNamespace(number=0, started_ns=1, ended_ns=ended_ns, over_ns=ended_ns)
        return SimpleNamespace(view=view, runs=(run,), time_ns=self.time_ns)

    def why(self, task: int) -> str:
        return f"task {task} does what it does"


def logs_of(cluster: Cluster, directory: Path) -> Logs:
    limits = LogLimits(of_run_bytes=MIB, keep_ns=KEEP_NS)
    return Logs(cluster, str(directory / "logs"), str(directory / "objects"), limits)  # type: ignore[arg-type]


async def write(logs: Logs, task: int, data: bytes, *, offset: int = 0, stream: str = RANK_0) -> None:
    chunk = LogChunk(stream, offset, data)
    await logs.append("n1", AppendLog(task=task, run=0, run_token=TOKEN, chunk=chunk))


async def close(logs: Logs, task: int, end: int, *, stream: str = RANK_0) -> None:
    await logs.end("n1", EndLog(task=task, run=0, run_token=TOKEN, end=LogEnd(stream, end)))


@on_loop
async def test_logs_of_tasks_that_ended_long_ago_are_removed_and_nothing_else(tmp_path: Path) -> None:
    cluster = Cluster()
    logs = logs_of(cluster, tmp_path)
    cluster.ended_ns = dict.fromkeys((1, 2, 3, 4, 5))
    for task in cluster.ended_ns:
        await write(logs, task, b"x")
    cluster.ended_ns = {1: None, 2: cluster.time_ns - KEEP_NS, 3: cluster.time_ns - KEEP_NS - 1}
    for path in (tmp_path / "logs" / "5").rglob("*"):
        os.utime(path, (1, 1))  # forgotten by the platform, as 4 is, and old
    await logs.sweep()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["1", "2", "4", "lock"]


@on_loop
async def test_blobs_of_removed_logs_go_when_they_are_a_day_old(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.ended_ns = {1: None, 2: None}
    logs = logs_of(cluster, tmp_path)
    for task in (1, 2):
        await write(logs, task, b"of task %d" % task)
        await close(logs, task, 9)

    def blobs() -> list[Path]:
        return [path for path in (tmp_path / "objects" / "logs").rglob("*") if len(path.name) == 64]

    cluster.ended_ns[2] = 0
    await logs.sweep()
    assert len(blobs()) == 2
    for path in blobs():
        os.utime(path, (1, 1))
    await logs.sweep()
    assert [path.read_bytes() for path in blobs()] == [b"of task 1"]


@on_loop
async def test_nothing_is_taken_of_a_task_whose_logs_were_removed(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.ended_ns = {1: cluster.time_ns - KEEP_NS - 1}
    logs = logs_of(cluster, tmp_path)
    with pytest.raises(NotFound, match="not kept any more"):
        await write(logs, 1, b"late")


@on_loop
async def test_one_manager_at_a_time_has_the_logs_and_the_next_one_sees_what_the_last_one_wrote(
    tmp_path: Path,
) -> None:
    one, other = Cluster(), Cluster()
    one.ended_ns = other.ended_ns = {1: None}
    logs, others = logs_of(one, tmp_path), logs_of(other, tmp_path)
    await write(logs, 1, b"first\n")
    with pytest.raises(Busy, match="another manager"):
        await others.of_task(ADA, 1)
    one.leads = False
    with pytest.raises(Unreachable):
        await write(logs, 1, b"second\n", offset=6)
    await logs.let_go_unless_leading()
    await write(others, 1, b"second\n", offset=6)
    other.leads, one.leads = False, True
    await others.let_go_unless_leading()
    assert (await logs.piece(ADA, 1, 0, RANK_0, 0)).data == b"first\nsecond\n"


@on_loop
async def test_readers_are_the_tasks_user_and_operators(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.ended_ns = {1: None}
    logs = logs_of(cluster, tmp_path)
    await write(logs, 1, b"secret")
    for reader in (ADA, Reader("eve", ("platform:operator",))):
        assert (await logs.piece(reader, 1, 0, RANK_0, 0)).data == b"secret"
    for reader in (BOB, Reader("bob", ("fs:admin",))):
        with pytest.raises(PermissionDenied):
            await logs.of_task(reader, 1)
        with pytest.raises(PermissionDenied):
            await logs.piece(reader, 1, 0, RANK_0, 0)
        with pytest.raises(PermissionDenied):
            logs.follow(reader, 1, LogFollower(), wait=True)


@on_loop
async def test_a_search_goes_on_page_after_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_search, "MAX_LINES", 3)
    cluster = Cluster()
    cluster.ended_ns = {1: None}
    logs = logs_of(cluster, tmp_path)
    for rank in range(3):
        lines = b"".join(b"loss %d\nNaN %d\n" % (line, line) for line in range(4))
        await write(logs, 1, lines, stream=f"attempt-0-rank-{rank}")
    with pytest.raises(PermissionDenied):
        await search_logs(logs, BOB, 1, "nan", run=0, rank=None, after="")
    for only in (None, 1):
        found, after, pages = [], "", 0
        while pages == 0 or after:
            page = await search_logs(logs, ADA, 1, "nan", run=None, rank=only, after=after)
            found += [(line.rank, line.line) for line in page.lines]
            after, pages = page.next, pages + 1
        assert found == [(one, f"NaN {line}") for one in range(3) for line in range(4) if only in (None, one)]
        assert pages > 1


@on_loop
async def test_the_readers_of_one_user_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_logs, "MAX_FOLLOWERS_OF_USER", 2)
    cluster = Cluster()
    cluster.ended_ns = {1: None}
    logs = logs_of(cluster, tmp_path)
    following: list[Any] = [logs.follow(ADA, 1, LogFollower(), wait=True) for _ in range(2)]
    for one in following:
        await anext(one)
    with pytest.raises(Busy, match="follow logs already"):
        logs.follow(ADA, 1, LogFollower(), wait=True)
    await following[0].aclose()
    again: Any = logs.follow(ADA, 1, LogFollower(), wait=True)
    await anext(again)
    for one in (following[1], again):
        await one.aclose()


@on_loop
async def test_a_reader_waits_for_the_last_lines_of_a_task_that_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, happened = asyncio.Event(), manager_logs._happened

    async def noted(news: asyncio.Event, limit_ns: int | None) -> bool:
        waiting.set()
        return await happened(news, limit_ns)

    monkeypatch.setattr(manager_logs, "_happened", noted)
    cluster = Cluster()
    cluster.ended_ns = {1: None}
    logs = logs_of(cluster, tmp_path)
    following: Any = logs.follow(ADA, 1, LogFollower(), wait=True)
    event, _ = await anext(following)
    assert isinstance(event, LogsState)
    cluster.ended_ns[1] = cluster.time_ns
    logs.on_change(Change(number=1, what="task", name="1", state="finished"))
    event, _ = await anext(following)
    assert isinstance(event, LogsState)
    await write(logs, 1, b"the last line")
    await close(logs, 1, 13)
    event, position = await anext(following)
    assert isinstance(event, LogText)
    assert (event.text, str(position)) == ("the last line", "0.0.0.13")
    others: Any = asyncio.ensure_future(anext(following))
    waits = asyncio.ensure_future(waiting.wait())
    await asyncio.wait([others, waits], return_when=asyncio.FIRST_COMPLETED)
    assert not others.done(), "the launcher's log is not closed, so more may come"
    await write(logs, 1, b"of another rank", stream="attempt-0-rank-1")
    await close(logs, 1, 15, stream="attempt-0-rank-1")
    event, _ = await others
    assert isinstance(event, LogText)
    assert event.text == "of another rank"
    await write(logs, 1, b"", stream="launcher")
    await close(logs, 1, 0, stream="launcher")
    event, _ = await anext(following)
    assert isinstance(event, LogsEnded)
    assert (event.outcome, event.complete) == (Outcome.SUCCEEDED, True)


@on_loop
async def test_where_logs_are_kept_is_absolute() -> None:
    def made(directory: str, objects: str) -> Logs:
        limits = LogLimits(of_run_bytes=MIB, keep_ns=KEEP_NS)
        return Logs(Cluster(), directory, objects, limits)  # type: ignore[arg-type]

    made("/srv/logs", "/srv/objects")
    made("/srv/logs", "s3://bucket/fireflyer")
    for directory, objects in (
        ("logs", "/srv/objects"),
        ("/srv/logs", "objects"),
        ("s3://bucket/logs", "/srv/objects"),
    ):
        with pytest.raises(UsageError, match="not an absolute path"):
            made(directory, objects)


@on_loop
async def test_a_reader_is_told_that_a_node_did_not_send_the_end(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.ended_ns = {1: None}
    logs = logs_of(cluster, tmp_path)
    await write(logs, 1, b"half a li")
    cluster.ended_ns[1] = cluster.time_ns - manager_logs.PATIENCE_NS
    began_s = time.monotonic()
    events = [found[0] async for found in logs.follow(ADA, 1, LogFollower(), wait=True) if found is not None]
    assert time.monotonic() - began_s < manager_logs.KEEP_ALIVE_S
    assert isinstance(events[-1], LogsEnded)
    assert not events[-1].complete
    assert [event.text for event in events if isinstance(event, LogText)] == ["half a li"]
