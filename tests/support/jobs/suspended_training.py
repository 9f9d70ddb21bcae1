"""A small model, trained by torch's DistributedDataParallel over gloo in a `TrainingLoop`: for jobs that are suspended.

`ff run … suspended_training.py CHECKPOINTS STEPS`: prints each step, and at the end the digest of the weights."""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fireflyer.checkpoint import TrainingLoop


def averaged(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """In doubles, which hold the sums of four floats: torch arranges its buckets anew after the first step of a
    process, and in floats the bits of a sum depend on its place."""
    summed = gradients.double()
    dist.all_reduce(summed)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result((summed / dist.get_world_size()).float())
    return done


def main(checkpoints: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, lambda _, bucket: averaged(bucket.buffer()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)  # from here on each rank has numbers of its own, which checkpoints keep
    with TrainingLoop(checkpoints, model, optimizer) as loop:
        print(f"from {loop.step}", flush=True)
        for step in loop.steps(steps):
            optimizer.zero_grad()
            parallel(torch.rand(4, 8)).square().mean().backward()
            optimizer.step()
            print(f"step {step}", flush=True)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"weights {digest}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
