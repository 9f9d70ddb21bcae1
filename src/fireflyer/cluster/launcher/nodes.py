"""The nodes of a job: each is a supervisor under a guard of its own, on this machine or another."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.core.blame import signal_name
from fireflyer.cluster.core.messages import Event, SupervisorGone, SupervisorLost
from fireflyer.cluster.launcher.machines import Machine, Starter
from fireflyer.cluster.schema.wire import SupervisorConfig
from fireflyer.runtime.disk import translate_os_error
from fireflyer.runtime.processes.guarded import Guarded, child_environment, kill_marked

__all__ = ["Nodes", "describe_exit"]

_GUARD_ANSWER_S = 2.0
_ENDED_WITHOUT_A_WORD = (
    "the connection to it ended without a message: the process that guards its ranks was killed, or its sshd"
)
_LAST_LINE_BYTES = 4096


class Nodes:
    """Starts and kills; tells `feed` when a supervisor has ended and when nothing of it is left. `was_up` says whether
    a supervisor has connected: one that has not, and is not expected any more, has nothing to be left."""

    def __init__(
        self,
        *,
        starter: Starter,
        job_token: str,
        logs_dir: str,
        feed: Callable[[Event], None],
        was_up: Callable[[int, int], bool],
    ) -> None:
        self._starter = starter
        self._job_token = job_token
        self._logs_dir = logs_dir
        self._feed = feed
        self._was_up = was_up
        self._guards: dict[tuple[int, int], Guarded] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._left = False

    def start(self, machine: Machine, config: SupervisorConfig) -> None:
        node, incarnation = config.node, config.incarnation
        path = f"{self._logs_dir}/node-{node}.log"
        token = f"{self._job_token}.{node}.{incarnation}"
        try:
            with open(path, "ab") as log:
                guarded = Guarded(
                    self._starter.command(machine, config, token),
                    token=token,
                    environment=child_environment({}),
                    log=log,
                    on_exit=lambda code: self._feed(
                        SupervisorLost(node, incarnation, describe_exit(code, f"its log is {path}"))
                    ),
                )
        except (FireflyerError, OSError) as error:
            reason = error if isinstance(error, FireflyerError) else translate_os_error(error, f"write {path}")
            self._feed(SupervisorGone(node, incarnation, str(reason)))
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
        gone = await asyncio.gather(*(guarded.wait_gone(_GUARD_ANSWER_S) for guarded in self._guards.values()))
        self._left |= not all(gone)
        for task in self._watchers:
            task.cancel()
        if self._watchers:
            await asyncio.wait(list(self._watchers))
        return self._starter.remote or not self._left or await kill_marked(self._job_token)

    async def _watch(self, guarded: Guarded, node: int, incarnation: int, path: str) -> None:
        clean = await guarded.wait_gone()
        del self._guards[node, incarnation]
        self._left |= not clean
        if clean:
            self._feed(SupervisorGone(node, incarnation, f"its supervisor exited; its log is {path}"))
        elif self._starter.remote:
            said = _last_line(path)
            reason = f"the connection to it ended: {said}" if said else _ENDED_WITHOUT_A_WORD
            kind = SupervisorLost if self._was_up(node, incarnation) else SupervisorGone
            self._feed(kind(node, incarnation, reason))

    async def _retry(self, guarded: Guarded) -> None:
        await guarded.wait_gone(_GUARD_ANSWER_S)


def _last_line(path: str) -> str:
    """Of a log, as far as it can be shown: why ssh gave up."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _LAST_LINE_BYTES))
            lines = file.read(_LAST_LINE_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    shown = ["".join(char for char in line if char.isprintable()).strip() for line in lines]
    return next((line[:300] for line in reversed(shown) if line), "")


def describe_exit(exit_code: int, why: str) -> str:
    """How a supervisor ended; `why` says more of an exit, or where more is found."""
    if exit_code > 128:
        return f"its supervisor was killed by {signal_name(exit_code - 128)}"
    return f"its supervisor exited with code {exit_code}; {why}"
