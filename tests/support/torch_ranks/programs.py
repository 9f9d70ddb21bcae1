"""One rank that runs small programs of `tests/e2e/torch/programs`, one after the other, over one backend.

Run as `python -m tests.support.torch_ranks.programs JSON`. A program is a module with a function `main`, which uses
`torch.distributed` as users do, and returns what must be the same with every backend.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ["BACKEND"] = arguments["backend"]
    options = None
    if arguments.get("inline_callbacks") is not None:
        from fireflyer.collectives.torch_join import HfreduceOptions

        options = HfreduceOptions(inline_callbacks=arguments["inline_callbacks"])
    dist.init_process_group(arguments["backend"], timeout=timedelta(seconds=30), pg_options=options)
    results: dict[str, Any] = {}
    for name in arguments["programs"]:
        torch.manual_seed(7)
        try:
            results[name] = import_module(f"tests.e2e.torch.programs.{name}").main()
            dist.barrier()
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    dist.destroy_process_group()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
