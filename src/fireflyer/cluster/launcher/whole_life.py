"""The whole-life state: an integer of the user that the launcher keeps on disk while its ranks come and go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from fireflyer.base.errors import PermissionDenied
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.core.messages import Event, WatchdogSet
from fireflyer.runtime.disk import RealDisk
from fireflyer.runtime.rpc import Caller, RpcServer
from fireflyer.runtime.suspension import (
    SET_WATCHDOG,
    WHOLE_LIFE_STATE,
    Watchdog,
    WatchdogIsSet,
    WholeLifeRequest,
    WholeLifeState,
)

__all__ = ["WHOLE_LIFE_NAME", "WholeLife"]

WHOLE_LIFE_NAME = "whole-life-state"
"""The file in the directory of the run: the number as text."""


class WholeLife:
    """What ranks set for the whole job: this state, and the time of the watchdog."""

    def __init__(self, directory: str, value: int, feed: Callable[[Event], None]) -> None:
        self.value = value
        """What is on disk, or what the job began with."""
        self._directory = directory
        self._feed = feed
        self._one_at_a_time = asyncio.Lock()

    def serve(self, server: RpcServer) -> None:
        server.register(WHOLE_LIFE_STATE, self._state)
        server.register(SET_WATCHDOG, self._set_watchdog)

    async def _state(self, request: WholeLifeRequest, caller: Caller) -> WholeLifeState:
        _require_node(caller)
        if request.value is not None:
            async with self._one_at_a_time:
                await asyncio.to_thread(self._write, request.value)
                self.value = request.value
        return WholeLifeState(self.value)

    async def _set_watchdog(self, request: Watchdog, caller: Caller) -> WatchdogIsSet:
        _require_node(caller)
        self._feed(WatchdogSet(request.limit_ns))
        return WatchdogIsSet()

    def _write(self, value: int) -> None:
        """Raises `FireflyerError`; the file then has the old value or the new one."""
        path = os.path.join(self._directory, WHOLE_LIFE_NAME)
        try:
            fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(b"%d\n" % value)
                file.flush()
                os.fsync(fd)
            os.rename(f"{path}.new", path)
        except OSError as error:
            raise translate_os_error(error, f"write {path}") from error
        RealDisk().sync_dir(self._directory)


def _require_node(caller: Caller) -> None:
    if caller.role != "node":
        raise PermissionDenied("only holders of the node secret may ask for this")
