"""Ranks as threads of one process, each with a real communicator: quick, where nobody needs to die."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives import Communicator
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.store import LocalStore

__all__ = ["together"]


def together(
    nodes: list[int], body: Callable[[Communicator], Any], *, store: LocalStore | None = None, **options: Any
) -> list[Any]:
    """What `body(communicator)` returned, or the error that it raised, on each of several threads; `nodes` names the
    node of each rank."""
    store, secret = store or LocalStore(), new_secret()
    results: list[Any] = [None] * len(nodes)
    broken: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with Communicator.create(
                rank=rank, world_size=len(nodes), node=nodes[rank], store=store, secret=secret, **options
            ) as comm:
                results[rank] = body(comm)
        except FireflyerError as error:
            results[rank] = error
        except BaseException as error:
            broken.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]
    return results
