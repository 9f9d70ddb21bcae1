"""Started by `ff run`: Lightning trains over several ranks, of which the last kills itself in the first attempt.

`killed_lightning.py DIRECTORY STEP`; a STEP of 0 kills nobody. Writes the losses of the attempt and, at the end, a
digest of the weights to DIRECTORY/RANK-ATTEMPT.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
import torch.distributed as dist

from fireflyer.integrations.lightning import CheckpointCallback

STEPS = 10


class Loader:
    """The batches of this rank, and where it is among them."""

    def __init__(self) -> None:
        self._next = 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._next %= STEPS
        while self._next < STEPS:
            self._next += 1
            yield torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * self._next + dist.get_rank()))

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Module(lightning.LightningModule):
    def __init__(self, die_at: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.losses: dict[int, float] = {}
        self._die_at = die_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss: torch.Tensor = self.net(batch).square().mean()
        self.losses[self.global_step] = loss.item()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


def main() -> None:
    directory, step = Path(sys.argv[1]), int(sys.argv[2])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("hfreduce")
    rank, size = dist.get_rank(), dist.get_world_size()
    dies = step > 0 and attempt == 0 and rank == size - 1
    torch.manual_seed(1 + rank)
    module = Module(step if dies else -1)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=size,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(directory),
    )
    CheckpointCallback(directory / "checkpoints", period_steps=2, keep=9).fit(trainer, module, Loader())
    weights = b"".join(value.detach().numpy().tobytes() for value in module.parameters())
    found = {"losses": module.losses, "weights": hashlib.sha256(weights).hexdigest()}
    (directory / f"{rank}-{attempt}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
