"""Real processes as the ranks of a torch.distributed job, started as torchrun would start them.

This process serves the store at which they meet. Each rank runs `python -m MODULE JSON`; its last line is its result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.support.patience import allowed_s
from tests.support.ranks.forked import TORCH, Forked
from tests.support.ranks.processes import Ranks
from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["Ended", "run_torch_ranks", "torch_ranks_running"]


class Ended(NamedTuple):
    code: int
    result: Any
    """None if it printed nothing."""
    errors: str


def run_torch_ranks(
    module: str, nodes: Sequence[int], *, limit_s: float = 100, imports: Sequence[str] = (), **arguments: Any
) -> list[Ended]:
    """One process for each entry of `nodes`, which names the node of that rank. `imports`: what they need beside torch,
    imported once for all."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes: list[Forked] = []
    try:
        for rank in range(len(nodes)):
            environment = _environment(rank, nodes, store.port)
            processes.append(
                Forked(module, json.dumps(arguments), imports=(*TORCH, *imports), env=environment, errors=True)
            )
        outputs = [process.communicate(timeout=allowed_s(limit_s)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [
        Ended(process.wait(), json.loads(output.splitlines()[-1]) if output.strip() else None, errors)
        for process, (output, errors) in zip(processes, outputs, strict=True)
    ]


@contextmanager
def torch_ranks_running(module: str, nodes: Sequence[int], **arguments: Any) -> Iterator[Ranks]:
    """The same, of ranks that say events while they run; none survives the block."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = Ranks()
    try:
        for rank in range(len(nodes)):
            ranks.start(arguments, module, imports=TORCH, env=_environment(rank, nodes, store.port))
        yield ranks
    finally:
        ranks.close()


def _environment(rank: int, nodes: Sequence[int], port: int) -> dict[str, str]:
    node = nodes[rank]
    values = {
        "RANK": rank,
        "WORLD_SIZE": len(nodes),
        "LOCAL_RANK": list(nodes[:rank]).count(node),
        "LOCAL_WORLD_SIZE": list(nodes).count(node),
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": max(nodes) + 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "OMP_NUM_THREADS": 1,
    }
    return os.environ | {name: str(value) for name, value in values.items()}
