"""Looks at the file system all the time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final

from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import SECOND
from fireflyer.fs.control import ManagerClient
from fireflyer.fs.schema.manager import Status
from fireflyer.fs.schema.routing import TargetState
from fireflyer.identity.handshake import Credential
from fireflyer.recipes.testbed.facts import StorageSample

__all__ = ["StorageWatch", "sample_of"]

PERIOD_S: Final = 0.25
TIMEOUT_NS: Final = 5 * SECOND


class StorageWatch:
    """Samples of the file system's state, taken by a thread of its own: nothing else waits for the manager."""

    def __init__(self, managers: tuple[str, ...], credential: Credential, now_ns: Callable[[], int]) -> None:
        self.samples: list[StorageSample] = []
        self._managers = managers
        self._credential = credential
        self._now_ns = now_ns
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="ff-storage-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    async def _work(self) -> None:
        async with ManagerClient(self._managers, self._credential) as client:
            while not self._over.is_set():
                try:
                    self.samples.append(sample_of(await client.status(timeout_ns=TIMEOUT_NS), self._now_ns()))
                except FireflyerError:
                    pass  # the next look tells more
                await asyncio.sleep(PERIOD_S)


def sample_of(status: Status, at_ns: int) -> StorageSample:
    """Pure."""
    nodes = sorted(status.nodes, key=lambda node: node.id)
    states = [[member.state for member in chain.members] for chain in status.chains]
    return StorageSample(
        at_ns=at_ns,
        alive=tuple(node.id for node in nodes if node.alive),
        incarnations=tuple(node.incarnation for node in nodes),
        chains=len(states),
        whole=sum(all(state is TargetState.SERVING for state in chain) for chain in states),
        serving=sum(TargetState.SERVING in chain for chain in states),
    )
