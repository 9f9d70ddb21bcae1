"""Nodes on this machine: each is an agent under a guard of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import msgspec

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.core.blame import signal_name
from fireflyer.cluster.core.messages import AgentGone, AgentLost, Event
from fireflyer.cluster.launcher.control import AgentConnection
from fireflyer.cluster.schema.job import Fault
from fireflyer.cluster.schema.wire import AgentConfig
from fireflyer.runtime.disk import translate_os_error
from fireflyer.runtime.processes.guarded import Guarded, child_environment, kill_marked

__all__ = ["LocalNodes", "inject"]

_GUARD_ANSWER_S = 2.0


class LocalNodes:
    """Starts and kills; tells `feed` when an agent has ended and when nothing of it is left."""

    def __init__(self, *, job_token: str, logs_dir: str, feed: Callable[[Event], None]) -> None:
        self._job_token = job_token
        self._logs_dir = logs_dir
        self._feed = feed
        self._guards: dict[tuple[int, int], Guarded] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._left = False

    def start(self, config: AgentConfig) -> None:
        node, incarnation = config.node, config.incarnation
        text = msgspec.json.encode(config).decode()
        path = f"{self._logs_dir}/node-{node}.log"
        try:
            with open(path, "ab") as log:
                guarded = Guarded(
                    [sys.executable, "-P", "-m", "fireflyer.cluster.agent", text],
                    token=f"{self._job_token}.{node}.{incarnation}",
                    environment=child_environment({}),
                    log=log,
                    on_exit=lambda code: self._feed(AgentLost(node, incarnation, _describe(code, path))),
                )
        except (FireflyerError, OSError) as error:
            reason = error if isinstance(error, FireflyerError) else translate_os_error(error, f"write {path}")
            self._feed(AgentGone(node, incarnation, str(reason)))
            return
        self._guards[node, incarnation] = guarded
        task = asyncio.get_running_loop().create_task(self._watch(guarded, node, incarnation, path))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    def kill(self, node: int, incarnation: int) -> None:
        guarded = self._guards.get((node, incarnation))
        if guarded is not None:
            guarded.kill()
            task = asyncio.get_running_loop().create_task(self._retry(guarded))
            self._watchers.add(task)
            task.add_done_callback(self._watchers.discard)

    async def close(self) -> bool:
        """Kills what is left of the job. False when something outlives that. Whoever only carries the job's mark and
        was not started below a guard (a batch system hands on the environment of who submits) is none of it."""
        for guarded in self._guards.values():
            guarded.kill()
        for guarded in list(self._guards.values()):
            self._left |= not await guarded.wait_gone(_GUARD_ANSWER_S)
        for task in self._watchers:
            task.cancel()
        if self._watchers:
            await asyncio.wait(list(self._watchers))
        return not self._left or await kill_marked(self._job_token)

    async def _watch(self, guarded: Guarded, node: int, incarnation: int, path: str) -> None:
        clean = await guarded.wait_gone()
        del self._guards[node, incarnation]
        self._left |= not clean
        if clean:
            self._feed(AgentGone(node, incarnation, f"its agent exited; its log is {path}"))

    async def _retry(self, guarded: Guarded) -> None:
        await guarded.wait_gone(_GUARD_ANSWER_S)


def inject(fault: Fault, member: AgentConnection | None, rank_pids: dict[int, int]) -> None:
    """Breaks what the fault says, from outside and without a word to anybody."""
    victims: list[int] = []
    if fault.kind == "kill-node" and member is not None:
        victims = [member.agent_pid, *member.rank_pids.values()]
    elif fault.kind == "kill-rank":
        victims = [rank_pids[fault.target]] if fault.target in rank_pids else []
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


def _describe(exit_code: int, log_path: str) -> str:
    if exit_code > 128:
        return f"its agent was killed by {signal_name(exit_code - 128)}"
    return f"its agent exited with code {exit_code}; its log is {log_path}"
