"""One rank of the conformance tests of process groups. Run as `python -m tests.support.torch_ranks.conformance
JSON`."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.support.collectives.thread_device import ThreadCopies
from tests.support.torch_ranks.calls import SCENARIOS

import fireflyer.collectives.torch_group  # noqa: F401 - registers the backend
from fireflyer.collectives.torch.cuda import DEVICES


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if arguments.get("device") == "threads":  # every tensor takes the way of tensors on a device
        DEVICES["cpu"] = ThreadCopies
    dist.init_process_group(arguments["backend"], timeout=timedelta(seconds=40))
    rank, size = dist.get_rank(), dist.get_world_size()
    results: dict[str, Any] = {}
    for name in arguments["scenarios"]:
        try:
            results[name] = SCENARIOS[name](rank, size)
            dist.barrier()
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    dist.destroy_process_group()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
