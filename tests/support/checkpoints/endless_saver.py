"""A process that saves checkpoint after checkpoint until it is killed. Arguments: directory, attempt."""

from __future__ import annotations

import sys

import torch

from fireflyer.checkpoint import CheckpointManager, State
from fireflyer.runtime.disk import RealDisk

__all__ = ["state_of"]


def state_of(step: int) -> State:
    generator = torch.Generator().manual_seed(step)
    return State({f"w{index}": torch.rand(64, 64, generator=generator) for index in range(8)}, {}, {"step": step})


def main(directory: str, attempt: int) -> None:
    manager = CheckpointManager(directory, rank=0, world_size=1, store=None, disk=RealDisk(), attempt=attempt, keep=2)
    restored = manager.restore()
    step = 0
    if restored is not None:
        step = restored.step
        expected = state_of(step)
        if not all(torch.equal(restored.shared[name], tensor) for name, tensor in expected.shared.items()):
            raise SystemExit("restored tensors are not those of the step")
    print("restored", step, flush=True)
    while True:
        step += 1
        manager.save(step, state_of(step), blocking=True).result()
        print("saved", step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
