"""Applies what changes in `[health]` of a manager's configuration file while it runs; a wrong file changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.platform.node_checking import Checks
from fireflyer.cluster.manager.config import PlatformConfig
from fireflyer.runtime.file_mark import file_mark

__all__ = ["HealthReload", "follow_configuration"]

_log = logging.getLogger(__name__)
_LOOK_S: Final = 2.0


class HealthReload:
    def __init__(self, path: str, read: Callable[[str], PlatformConfig], config: PlatformConfig) -> None:
        """`read`: raises `UsageError`, one line. `config`: that is in force."""
        self._path, self._read, self._config = path, read, config
        self._mark: tuple[int, ...] | None = None
        """None: the first look reads the file, which may have changed since `config` was read."""

    def look(self, *, asked: bool = False) -> Checks | None:
        """What is in force from now on; None: what was. `asked`: the file is read whether it has changed or not."""
        mark = file_mark(self._path)
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
        if not self._same_beside_health(config):
            _log.warning("only [health] of the configuration is applied; the rest counts when the manager starts again")
        self._config = msgspec.structs.replace(self._config, health=config.health)
        _log.info("[health] of the configuration is applied version=%d", config.health.version)
        return config.health.checks()

    def _same_beside_health(self, config: PlatformConfig) -> bool:
        """Where a port is 0, `ff up` writes the one that was found, for the next start."""
        now = self._config
        found = {key: getattr(now, key) for key in ("listen", "listen_agents") if getattr(now, key).endswith(":0")}
        return msgspec.structs.replace(config, health=now.health, **found) == now


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
