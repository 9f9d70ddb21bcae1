"""What a rank does in the tests of data parallelism. Run as `python -m tests.support.torch_ranks.ddp JSON`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

import torch
from tests.support.jobs.launching import wait_until
from tests.support.patience import allowed_s
from tests.support.ranks.joining import joined
from tests.support.torch_ranks.training import MODELS
from torch import nn

from fireflyer.base.errors import PeerFailed
from fireflyer.base.units import KIB, SECOND
from fireflyer.collectives import Communicator
from fireflyer.training import DistributedDataParallel
from fireflyer.training.overlap import Interval, overlap_of

WIDTH = 192
LAYERS = 6
BATCH = 24


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def loss_of(model: nn.Module, step: int, part: slice) -> Any:
    """Of the samples `part` of the batch of that step."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return (model(x[part]) - x[part].sum(1, keepdim=True)).square().mean()


def my_part(rank: int, world_size: int) -> slice:
    return slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)


def digest(tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().numpy().tobytes())
    return sha.hexdigest()


def train(comm: Communicator, params: dict[str, Any]) -> dict[str, Any]:
    first, second = train_once(comm, params), train_once(comm, params)
    return first | {"again": second["digest"]}


def train_once(comm: Communicator, params: dict[str, Any]) -> dict[str, Any]:
    model = DistributedDataParallel(network(seed=comm.rank), comm, bucket_bytes=100 * KIB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    first: list[torch.Tensor] = []
    for step in range(params["steps"]):
        optimizer.zero_grad()
        loss = loss_of(model, step, my_part(comm.rank, comm.world_size))
        loss.backward()
        first = first or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        losses.append(loss.item())
    if comm.rank == 0:
        torch.save(first, params["gradients"])
    stats = model.stats()
    return {
        "digest": digest(list(model.parameters())),
        "losses": losses,
        "buckets": len(model.buckets),
        "early": stats.allreduces_during_backward,
        "allreduces": stats.allreduces,
        "in_flight_ns": stats.in_flight_ns,
        "blocked_ns": stats.blocked_ns,
    }


def overlap(comm: Communicator, params: dict[str, Any]) -> dict[str, Any]:
    """The share of the time of allreduces that was hidden under the backward passes, by the flight recorder.

    With several buckets, each backward pass does not end before one allreduce of it has: so they must go on beside it,
    and how soon a busy machine lets them does not matter."""
    make, loss_of_model = MODELS[params["model"]]
    torch.manual_seed(3)
    model = DistributedDataParallel(make(), comm, bucket_bytes=params["bucket_bytes"])
    passes: list[Interval] = []
    since_ns = begun_ns = 0
    if len(model.buckets) > 1:
        last = next(iter(model.parameters()))  # whose gradient comes last
        last.register_hook(lambda _: wait_until(lambda: sums_ended(comm, begun_ns), allowed_s(20)))  # type: ignore[no-untyped-call]
    for step in range(params["steps"] + 1):
        if step == 1:  # the first one is slow in its own ways
            since_ns = time.monotonic_ns()
        model.zero_grad()
        begun_ns = time.monotonic_ns()
        loss_of_model(model, step, slice(comm.rank, None, comm.world_size)).backward()  # type: ignore[no-untyped-call]
        assert model.last_pass is not None
        passes += [model.last_pass] if step else []
    found = overlap_of(comm.records().records, passes, since_ns=since_ns)
    return {
        "buckets": len(model.buckets),
        "share": found.hidden_share,
        "communication_ns": found.communication_ns,
        "computing_ns": found.computing_ns,
    }


def sums_ended(comm: Communicator, since_ns: int) -> int:
    """How many that were asked for since then."""
    records = comm.records().records
    return sum(r.kind == "allreduce" and r.state == "done" and r.submitted_ns >= since_ns for r in records)


def lose_a_rank(comm: Communicator, params: dict[str, Any]) -> dict[str, Any]:
    """The last rank dies in the middle of a backward pass, after its first allreduces were started."""
    model = DistributedDataParallel(network(seed=0), comm, bucket_bytes=100 * KIB)
    try:
        loss_of(model, 0, my_part(comm.rank, comm.world_size)).backward()  # which the victim may leave before others
        if comm.rank == comm.world_size - 1:
            first = next(iter(model.parameters()))
            first.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[no-untyped-call]
        loss_of(model, 1, my_part(comm.rank, comm.world_size)).backward()
    except PeerFailed as error:
        return {"error": type(error).__name__, "rank": error.rank}
    return {"error": None}


def main() -> None:
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    comm = joined(arguments, timeout_ns=20 * SECOND)
    result = {"train": train, "overlap": overlap, "lose_a_rank": lose_a_rank}[arguments["scenario"]](
        comm, arguments["params"]
    )
    if result.get("error") is None:
        comm.close()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
