"""What ends the runs of a local platform: for `ff down`, and for `ff up` that is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import counted
from fireflyer.cli.detached import tell
from fireflyer.runtime.processes.run_lock import END_NOW

if TYPE_CHECKING:
    from fireflyer.cluster.core.platform.views import NodeView
    from fireflyer.cluster.local.layout import LocalPlatform, PlatformLayout

__all__ = ["GRACE_S", "kill_runs", "let_runs_leave", "until_stopped"]

GRACE_S: Final = 60.0
"""How long runs have to save."""


async def until_stopped(
    work: Coroutine[Any, Any, None], let_leave: Callable[[], object], say: Callable[[str], None]
) -> bool:
    """Runs `work` until SIGTERM or SIGINT: then `let_leave`, in a thread, and the end of `work`. A second signal ends
    it at once; `END_NOW` does so as the first. Whether runs that are left are to be killed: not after `END_NOW`. Raises
    what `work` raises."""
    loop = asyncio.get_running_loop()
    working = loop.create_task(work)
    signals = 0
    kill = False

    def leave() -> None:
        try:
            let_leave()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: a second signal has ended it
                loop.call_soon_threadsafe(working.cancel)

    def asked() -> None:
        nonlocal signals, kill
        signals += 1
        kill = True
        if signals == 1:
            say("stopping: tasks save and go on with the next `ff up`; once more ends them at once")
            threading.Thread(target=leave, name="ff-up-leaving", daemon=True).start()
        else:
            working.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    loop.add_signal_handler(END_NOW, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        pass
    return kill


def let_runs_leave(layout: PlatformLayout, grace_s: float) -> None:
    """Asks all to save, and waits. A platform that does not answer is ended all the same. Interrupted, nodes are open
    again."""
    from fireflyer.cluster.client import Client, read_connection
    from fireflyer.cluster.local.leaving import close_nodes, open_nodes, wait_until_free

    def on_change(busy: list[NodeView]) -> None:
        tell(f"  {counted(len(busy), 'node')} left" if busy else "  all have left")

    try:
        with Client(read_connection(layout.connection_file)) as client:
            busy = close_nodes(client)
            if not busy:
                return
            runs = len({node.task for node in busy})
            tell(f"{counted(runs, 'task')} on {counted(len(busy), 'node')}: asked to save and to leave.")
            try:
                busy = wait_until_free(client, grace_s, on_change)
            except KeyboardInterrupt:
                open_nodes(client)
                tell("interrupted: the platform goes on, and its nodes take tasks again")
                raise
            if busy:
                tell(
                    f"{counted(len({node.task for node in busy}), 'task')} had not left after {grace_s:.0f} s: killed, "
                    "and queued again at the next `ff up`."
                )
    except FireflyerError as error:
        tell(f"warning: runs cannot be asked to leave: {error.message}; they are killed", err=True)


def kill_runs(layout: PlatformLayout, platform: LocalPlatform) -> bool:
    """Kills what is left of runs, after their agents have ended. False: there was nothing."""
    from fireflyer.cluster.local.leaving import end_runs

    ended = end_runs(layout, platform)
    if ended:
        tell(f"Ended {counted(ended, 'process group')} of runs.")
    return bool(ended)
