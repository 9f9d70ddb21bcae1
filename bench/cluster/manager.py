"""A manager process under load: simulated agents that synchronise every 5 s, submissions at a fixed rate while many
tasks wait, and what it costs. And the time from a submission to the first line of its script on an idle platform."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from bench.cluster.agents import SimulatedAgents, join_all
from bench.report import Figure, Options, Result, figure
from fireflyer.base.errors import TransientError
from fireflyer.base.toml_text import to_toml
from fireflyer.base.units import MIB
from fireflyer.cluster.client import Client, Connection, read_connection
from fireflyer.cluster.local.config import UpConfig
from fireflyer.cluster.local.layout import ADMIN, PlatformLayout, new_platform
from fireflyer.cluster.manager.administrators import new_administrator
from fireflyer.cluster.schema.tasks import Program, TaskSpec

__all__ = ["manager"]

ARRAY: Final = 1000


class _Load(NamedTuple):
    agents: int
    queued: int
    submissions_per_s: int
    seconds: int


LOADS: Final = {"tiny": _Load(10, 100, 5, 3), "brief": _Load(100, 1_000, 20, 20), "full": _Load(1_000, 10_000, 20, 600)}
_SENDERS: Final = 8
_USERS: Final = 4
_START_S: Final = 60.0


def manager(options: Options) -> list[Result]:
    """One row for each of: a submission, a page of the list, one task, an array of 1,000; processor time of the manager
    for each second, and its memory."""
    load = LOADS[options.scale]
    case = f"manager/{load.agents}agents"
    if not options.selects(case):
        return []
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as directory:
        layout = PlatformLayout(f"{directory}/platform")
        layout.make_directory()
        layout.make_secret()
        config, path = layout.write_manager(new_platform(1, 1, 0), UpConfig(), "127.0.0.1:0", "127.0.0.1:0")
        config = msgspec.structs.replace(config, user_requests_per_s=10_000)  # one administrator joins all agents
        Path(path).write_text(to_toml(msgspec.to_builtins(config)))
        token = asyncio.run(new_administrator(config, ADMIN))
        with _manager_process(layout, path, token) as (pid, at_agents):
            return asyncio.run(_under_load(layout, pid, at_agents, Path(directory), load, case))


async def _under_load(
    layout: PlatformLayout, pid: int, at_agents: str, directory: Path, load: _Load, case: str
) -> list[Result]:
    with Client(read_connection(layout.connection_file)) as client:
        await _leads(client)
        memberships = await join_all(client, at_agents, str(directory / "agents"), load.agents)
        async with SimulatedAgents(at_agents, memberships, load.agents / load.submissions_per_s, seed=1) as agents:
            users = [_new_user(client, layout, number) for number in range(_USERS)]
            arrays = await asyncio.to_thread(_fill, users, load)
            before = _Usage.of(pid)
            took = await _submit_at_rate(users, load)
            spent = _Usage.of(pid).since(before)
            agents.check()
    return _rows(case, load, took, arrays, spent, agents)


@contextlib.contextmanager
def _manager_process(layout: PlatformLayout, config: str, token: str) -> Iterator[tuple[int, str]]:
    """Its number, and where agents reach it."""
    command = [sys.executable, "-P", "-m", "fireflyer", "manager", config]
    with (
        open(layout.log_file("manager"), "ab") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            _, url, at_agents, *_ = process.stdout.readline().split()
            layout.write_connection(url, "", token)
            yield process.pid, at_agents
        finally:
            process.terminate()


def _new_user(client: Client, layout: PlatformLayout, number: int) -> Connection:
    """A user may have 10,000 unfinished tasks."""
    client.create_user(f"user-{number}")
    token = client.issue_token(f"user-{number}").token
    return msgspec.structs.replace(read_connection(layout.connection_file), token=token)


async def _submit_at_rate(users: list[Connection], load: _Load) -> dict[str, list[float]]:
    stop = threading.Event()
    loop = asyncio.get_running_loop()
    with concurrent.futures.ThreadPoolExecutor(_SENDERS) as pool:
        senders = [
            loop.run_in_executor(pool, _send, users[number % _USERS], load, number, stop) for number in range(_SENDERS)
        ]
        try:
            parts = await asyncio.gather(*senders)
        finally:
            stop.set()
    return {kind: [time_s for part in parts for time_s in part[kind]] for kind in _KINDS}


def _rows(
    case: str, load: _Load, took: dict[str, list[float]], arrays: list[float], spent: _Usage, agents: SimulatedAgents
) -> list[Result]:
    note = (
        f"{load.seconds} s, {load.submissions_per_s} submissions/s, {load.queued:,} tasks wait, "
        f"{agents.calls:,} synchronisations, {agents.ended:,} runs ended"
    )
    found = []
    for kind, times in took.items():
        p99 = sorted(times)[int(len(times) * 0.99)]
        found.append(_row(f"{case}/{kind}", "api_s", figure(times), note=f"{len(times)} requests, p99 {p99:.4f} s"))
        found.append(_row(f"{case}/{kind}", "p99_s", figure([p99]), "< 100 ms", p99 < 0.1, note))
    slowest = max(arrays)
    found.append(
        _row(f"{case}/array", "api_s", figure(arrays), "< 2 s", slowest < 2, f"arrays of {min(ARRAY, load.queued):,}")
    )
    found.append(_row(case, "cpu_share", figure([spent.cpu_s / spent.wall_s]), note="processor time per second"))
    found.append(_row(case, "memory_bytes", figure([spent.memory_bytes]), note=f"{spent.memory_bytes / MIB:.0f} MiB"))
    return found


def _row(case: str, metric: str, ours: Figure, target: str = "", met: bool | None = None, note: str = "") -> Result:
    return Result(
        suite="cluster", case=case, metric=metric, better="lower", ours=ours, peers={}, bound=None, target=target,
        note=note, met=met, verdicts={} if met is None else {target: met},
    )  # fmt: skip


class _Usage(NamedTuple):
    wall_s: float
    cpu_s: float
    memory_bytes: float

    @classmethod
    def of(cls, pid: int) -> _Usage:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))

    def since(self, before: _Usage) -> _Usage:
        return _Usage(self.wall_s - before.wall_s, self.cpu_s - before.cpu_s, self.memory_bytes)


async def _leads(client: Client) -> None:
    until_s = time.monotonic() + _START_S
    while True:
        try:
            await asyncio.to_thread(client.cluster)
        except TransientError:
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.1)
        else:
            return


def _spec(name: str, **fields: int) -> TaskSpec:
    return TaskSpec(name=name, program=Program(script="train.py", workdir="/"), **fields)  # type: ignore[arg-type]


def _fill(users: list[Connection], load: _Load) -> list[float]:
    """Tasks for all nodes, and those that wait, as arrays; the seconds of each submission."""
    took = []
    left, number = load.agents + load.queued, 0
    while left > 0:
        size = min(ARRAY, load.queued, left)
        with Client(users[number % _USERS]) as client:
            began_s = time.perf_counter()
            client.submit(_spec(f"fill-{number}", array=size), key=f"fill-{number}")
            took.append(time.perf_counter() - began_s)
        left, number = left - size, number + 1
    return took


_KINDS: Final = ("submit", "list", "show")


def _send(user: Connection, load: _Load, sender: int, stop: threading.Event) -> dict[str, list[float]]:
    """A share of the submissions, each at its time; after each one a page of the list or a task. A request that begins
    late because the one before took long counts from when it was due."""
    took: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    rng = random.Random(sender)
    period_s = _SENDERS / load.submissions_per_s
    begin_s = time.perf_counter() + sender * period_s / _SENDERS
    with Client(user) as client:
        for number in range(int(load.seconds / period_s)):
            due_s = begin_s + number * period_s
            if stop.wait(max(0.0, due_s - time.perf_counter())):
                break
            (task,) = client.submit(_spec(f"load-{sender}-{number}"), key=f"{sender}-{number}")
            took["submit"].append(time.perf_counter() - due_s)
            asked_s = time.perf_counter()
            if rng.random() < 0.5:
                client.tasks(limit=100)
                took["list"].append(time.perf_counter() - asked_s)
            else:
                client.task(task)
                took["show"].append(time.perf_counter() - asked_s)
    return took
