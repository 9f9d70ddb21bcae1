"""Several ranks of one job as threads, each with its own checkpoint manager, over one store and one disk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from fireflyer.base.events import CheckpointReport
from fireflyer.base.ports import Disk
from fireflyer.checkpoint import CheckpointManager
from fireflyer.runtime.store import LocalStore

__all__ = ["Ranks"]

T = TypeVar("T")
LIMIT_S: Final = 600
"""Of one call: a busy machine may need minutes for the largest."""


class Ranks:
    """`together` runs the same call on every rank at once and returns the results in order of rank."""

    def __init__(
        self,
        directory: str,
        world_size: int,
        disk: Disk | None,
        *,
        attempt: int = 0,
        store: LocalStore | None = None,
        **options: Any,
    ) -> None:
        self.reports: list[CheckpointReport] = []
        store = store or LocalStore()
        self._pool = ThreadPoolExecutor(world_size)
        self.managers = [
            CheckpointManager(
                directory,
                rank=rank,
                world_size=world_size,
                store=store,
                disk=disk,
                attempt=attempt,
                on_event=self.reports.append,
                **options,
            )
            for rank in range(world_size)
        ]

    def together(self, call: Callable[[CheckpointManager], T]) -> list[T]:
        futures = [self._pool.submit(call, manager) for manager in self.managers]
        return [future.result(timeout=LIMIT_S) for future in futures]

    def close(self) -> None:
        self.together(lambda manager: manager.close())
        self._pool.shutdown()
