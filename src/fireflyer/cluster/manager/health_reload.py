"""Applies what changes in `[health]` of a manager's configuration file while it runs; a wrong file changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.platform.node_checking import Checks
from fireflyer.cluster.manager.config import PlatformConfig

__all__ = ["HealthReload", "follow_configuration"]

_log = logging.getLogger(__name__)
_LOOK_S: Final = 2.0


class HealthReload:
    def __init__(self, path: str, read: Callable[[str], PlatformConfig], config: PlatformConfig) -> None:
        """`read`: raises `UsageError`, one line. `config`: that is in force."""
        self._path, self._read, self._config = path, read, config
        self._mark = self._newest()

    def look(self, *, asked: bool = False) -> Checks | None:
        """What is in force from now on; None: what was. `asked`: the file is read whether it has changed or not."""
        mark = self._newest()
        if mark == self._mark and not asked:
            return None
        self._mark = mark
        try:
            config = self._read(self._path)
        except UsageError as error:
            _log.warning("configuration is not used, [health] stays as it was reason=%s", error)
            return None
        if config.health == self._config.health:
            return None
        if msgspec.structs.replace(config, health=self._config.health) != self._config:
            _log.warning("only [health] of the configuration is applied; the rest counts when the manager starts again")
        self._config = msgspec.structs.replace(self._config, health=config.health)
        _log.info("[health] of the configuration is applied version=%d", config.health.version)
        return config.health.checks()

    def _newest(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns


async def follow_configuration(reload: HealthReload, apply: Callable[[Checks], None]) -> None:
    """Until it is cancelled: looks every 2 s, and upon SIGHUP."""
    asked = asyncio.Event()
    with _on_hangup(asked.set):
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await asked.wait()
            checks = await asyncio.to_thread(reload.look, asked=asked.is_set())
            asked.clear()
            if checks is not None:
                apply(checks)


@contextlib.contextmanager
def _on_hangup(act: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
