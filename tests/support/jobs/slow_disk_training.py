"""A small model, trained in a `TrainingLoop` on a disk that becomes slow: for jobs that are suspended then.

`ff run … slow_disk_training.py CHECKPOINTS SLOW SAVED STEPS`: prints where it begins; after step SAVED, of which there
is a checkpoint, it says so and takes 20 steps a second. The disk is slow while the file SLOW exists."""

import os
import sys
import time
from typing import Final

import torch

from fireflyer.base.ports import Data
from fireflyer.checkpoint import TrainingLoop, storage
from fireflyer.runtime.disk import RealDisk, RealFile

OPERATION_S: Final = 2.0


def be_slow() -> None:
    if os.path.exists(sys.argv[2]):
        time.sleep(OPERATION_S)


class SlowFile(RealFile):
    def pwrite(self, data: Data, offset: int) -> None:
        be_slow()
        super().pwrite(data, offset)

    def fsync(self) -> None:
        be_slow()
        super().fsync()


class SlowDisk(RealDisk):
    """Whose changes are all made, but late."""

    def create(self, path: str, *, direct: bool = False) -> RealFile:
        be_slow()
        del direct
        return SlowFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path)

    def mkdir(self, path: str) -> None:
        be_slow()
        super().mkdir(path)

    def rename(self, source: str, target: str) -> None:
        be_slow()
        super().rename(source, target)

    def sync_dir(self, path: str) -> None:
        be_slow()
        super().sync_dir(path)


def main(checkpoints: str, saved: int, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    storage.RealDisk = SlowDisk  # type: ignore[attr-defined]  # the script's file system, in place of the machine's
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with TrainingLoop(checkpoints, model, optimizer, period_steps=saved, stop_signals=()) as loop:
        print(f"from {loop.step}", flush=True)
        for step in loop.steps(steps):
            optimizer.zero_grad()
            model(torch.rand(4, 8)).square().mean().backward()
            optimizer.step()
            if step == saved + 1:
                loop.manager.wait()
                print(f"after {saved}", flush=True)
            if step > saved:
                time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]), int(sys.argv[4]))
