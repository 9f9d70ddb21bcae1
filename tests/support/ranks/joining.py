"""How a process of a test becomes a rank: by the arguments that `processes` gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fireflyer.collectives import Communicator
from fireflyer.identity.secrets import Secret, load_secret
from fireflyer.runtime.store import StoreClient

__all__ = ["joined"]


def joined(
    arguments: Mapping[str, Any],
    *,
    store_of: Callable[[str, Secret], StoreClient] = StoreClient,
    timeout_ns: int | None = None,
    **options: Any,
) -> Communicator:
    """The communicator of this rank. `store_of`: who makes the store's client, from its address and the secret."""
    secret = load_secret(arguments["secret_file"])
    store = store_of(arguments["store"], secret)
    try:
        return Communicator.create(
            rank=arguments["rank"],
            world_size=arguments["world_size"],
            node=arguments["node"],
            store=store,
            secret=secret,
            timeout_ns=arguments["timeout_ns"] if timeout_ns is None else timeout_ns,
            **options,
        )
    finally:
        store.close()
