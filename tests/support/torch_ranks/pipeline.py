"""What a rank does in the tests of pipelines. Run as `python -m tests.support.torch_ranks.pipeline JSON`."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from tests.support.pipeline.models import EXECUTED, batch_of, gradients_of, pipeline_of, schedule_of
from tests.support.ranks.joining import joined

from fireflyer.base.errors import PeerFailed
from fireflyer.base.units import SECOND
from fireflyer.collectives import Communicator

MICRO_BATCHES = 8
STEPS = 2


def all_schedules(comm: Communicator, params: dict[str, Any]) -> dict[str, Any]:
    """Each of them twice, in fp64 and where bits are promised in fp32; gradients go into a file."""
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    overhead_us: dict[str, float] = {}
    equal = []
    for name in EXECUTED:
        for dtype in (torch.float64, torch.float32) if name in ("gpipe", "1f1b") else (torch.float64,):
            schedule = schedule_of(name, comm.world_size, MICRO_BATCHES)
            pipeline = pipeline_of(schedule, comm, dtype=dtype)
            found = []
            for _ in range(STEPS):
                for module in pipeline.modules.values():
                    module.zero_grad()
                pipeline.step(*batch_of(0, MICRO_BATCHES, unequal=True))
                found.append(gradients_of(pipeline))
            equal.append(all(torch.equal(found[0][key], found[1][key]) for key in found[0]))
            gradients[f"{name} {str(dtype).removeprefix('torch.')}"] = found[0]
            assert pipeline.record is not None
            overhead_us[name] = pipeline.record.overhead_ns / 1000
    torch.save(gradients, f"{params['gradients']}/{comm.rank}.pt")
    return {"equal": equal, "overhead_us": overhead_us}


def lose_a_rank(comm: Communicator, params: dict[str, Any]) -> dict[str, Any]:
    """The last rank dies in the middle of its second step."""
    schedule = schedule_of(params["schedule"], comm.world_size, MICRO_BATCHES)
    pipeline = pipeline_of(schedule, comm)
    pipeline.step(*batch_of(0, MICRO_BATCHES))
    if comm.rank == comm.world_size - 1:
        third = iter((False, False, True))

        def die(*_: object) -> None:
            if next(third, False):
                os.kill(os.getpid(), signal.SIGKILL)

        next(iter(pipeline.modules.values())).register_forward_hook(die)
    try:
        pipeline.step(*batch_of(1, MICRO_BATCHES))
    except PeerFailed as error:
        return {"error": "PeerFailed", "rank": error.rank, "text": str(error)}
    return {"error": None}


def main() -> None:
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    comm = joined(arguments, timeout_ns=60 * SECOND)
    scenario = {"all_schedules": all_schedules, "lose_a_rank": lose_a_rank}[arguments["scenario"]]
    result = scenario(comm, arguments["params"])
    if result.get("error") is None:
        comm.close()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
