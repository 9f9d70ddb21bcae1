"""Ranks as threads of one process, each with a real communicator: quick, where nobody needs to die."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from fireflyer.base.errors import Busy, FireflyerError
from fireflyer.collectives import Communicator
from fireflyer.collectives.work import Work
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.store import LocalStore

__all__ = ["fill_queue", "telling_of", "together"]


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


def fill_queue(comm: Communicator) -> list[Work]:
    """As many small sums as may be pending on this rank; the others must make them too."""
    works: list[Work] = []
    try:
        while True:
            works.append(comm.allreduce(np.ones(1), async_op=True))
    except Busy:
        return works


def telling_of(kind: type[BaseException], happened: threading.Event, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which sets `happened` when it raises a `kind`."""

    def telling(*arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except kind:
            happened.set()
            raise

    return telling
