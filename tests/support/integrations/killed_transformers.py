"""Started by `ff run`: `transformers.Trainer` trains over several ranks, of which the last kills itself in the first
attempt.

`killed_transformers.py DIRECTORY STEP`; a STEP of 0 kills nobody. Writes the losses of the attempt and, at the end, a
digest of the weights to DIRECTORY/RANK-ATTEMPT.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from fireflyer.integrations.transformers import CheckpointCallback

STEPS = 10


class DieAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


class Noting(Trainer):
    """Keeps the losses of this rank; the log has their mean."""

    losses: dict[int, float]

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        loss: Any = super().compute_loss(*args, **options)
        self.losses[self.state.global_step] = loss.item()
        return loss


def main() -> None:
    directory, step = Path(sys.argv[1]), int(sys.argv[2])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("hfreduce")
    rank, size = dist.get_rank(), dist.get_world_size()
    dies = step > 0 and attempt == 0 and rank == size - 1
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (STEPS * size * 2, 8))]
    arguments = TrainingArguments(
        output_dir=str(directory / "out"),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=5,
    )
    trainer = Noting(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, callbacks=[DieAt(step if dies else -1)]
    )
    trainer.losses = {}
    CheckpointCallback(directory / "checkpoints", period_steps=2, keep=9).train(trainer)
    model: Any = trainer.model
    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    found = {"losses": trainer.losses, "weights": hashlib.sha256(weights).hexdigest()}
    (directory / f"{rank}-{attempt}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
