"""The ranks' end of `crew`: connects to the harness and does what it says."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol

from fireflyer.collectives import Communicator, Plan
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.store import StoreClient

__all__ = ["Obedient", "join_ours", "obey"]

_STOP: Final = "stop"


class Obedient(Protocol):
    """Has a method for each of its orders; it takes the words and returns the answer."""

    rank: int

    @property
    def orders(self) -> Sequence[str]: ...

    def close(self) -> None: ...


def obey(rank: Obedient) -> None:
    """Does orders until told to stop, or until the harness is gone."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(sys.argv[1])
        with sock.makefile("rw") as harness:
            print(json.dumps({"rank": rank.rank, "pid": os.getpid()}), file=harness, flush=True)
            for line in harness:
                name, *words = line.split()
                if name == _STOP:
                    break
                if name not in rank.orders:
                    raise SystemExit(f"no such order: {name}")
                print(json.dumps(getattr(rank, name)(*words)), file=harness, flush=True)
    rank.close()


def join_ours(arguments: dict[str, Any], plan: Plan | None = None, name: str = "world") -> Communicator:
    secret = load_secret(arguments["secret_file"])
    store = StoreClient(arguments["store"], secret)
    try:
        return Communicator.create(
            rank=arguments["rank"],
            world_size=arguments["world_size"],
            node=arguments["node"],
            store=store,
            secret=secret,
            transport=arguments["transport"],
            plan=plan,
            name=name,
            host=arguments["host"],
        )
    finally:
        store.close()
