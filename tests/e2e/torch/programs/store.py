"""The store of the job: counters, and one rank that waits for what another sets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store


def main() -> Any:
    store: Any = PrefixStore("of a program", _get_default_store())
    store.add("ranks", 1)
    dist.barrier()
    if dist.get_rank() == 0:
        store.set("word", "hello")
    store.wait(["word"], timedelta(seconds=20))
    found = [store.get("word").decode(), int(store.get("ranks"))]
    dist.barrier()
    return found
