"""`train_gpt`, of which rank 1 is killed (SIGKILL) in the first attempt, and which may lose something when it resumes.

`ff run ... killed_gpt.py STEP LOST ARGUMENTS`: killed before STEP, when the save that is under way is committed. LOST
is "nothing" or a name in `LOSSES`; ARGUMENTS are those of `train_gpt`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Final

import torch

from fireflyer.data import Batch
from fireflyer.recipes import train_gpt
from fireflyer.recipes.train_gpt import Job

__all__ = ["LOSSES"]


def _lose_position(job: Job, steps_done: int, position: int) -> tuple[int, int]:
    return steps_done, 0


def _lose_one_bit(job: Job, steps_done: int, position: int) -> tuple[int, int]:
    """Of one weight, on all ranks."""
    weight = next(iter(job.model.parameters())).detach().view(-1)[:1]
    weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
    return steps_done, position


LOSSES: Final[dict[str, Callable[[Job, int, int], tuple[int, int]]]] = {
    "nothing": lambda job, steps_done, position: (steps_done, position),
    "position": _lose_position,
    "one bit": _lose_one_bit,
}


def main(kill_step: int, lost: str, *arguments: str) -> int:
    restore, train_step = train_gpt.restore, train_gpt.train_step

    def restore_less(job: Job) -> tuple[int, int]:
        steps_done, position = restore(job)
        return LOSSES[lost](job, steps_done, position) if steps_done else (steps_done, position)

    def train_step_or_die(job: Job, step: int, batch: Batch) -> float:
        if (job.env.attempt, job.env.rank, step) == (0, 1, kill_step):
            job.checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(job, step, batch)

    train_gpt.restore, train_gpt.train_step = restore_less, train_step_or_die
    return train_gpt.main(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
