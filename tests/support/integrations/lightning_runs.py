"""Runs of Lightning's `Trainer` with our callback. To be imported in tests and not at their heads: the library takes
seconds of every process that collects tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch

from fireflyer.integrations.lightning import CheckpointCallback
from fireflyer.runtime.reporter import Reporter

__all__ = ["Told", "run"]


class Died(Exception):
    pass


class Told(Reporter):
    def __init__(self) -> None:
        super().__init__(None, None, "")
        self.reports: list[object] = []

    def _put(self, report: object) -> None:
        self.reports.append(report)


class Loader:
    """Ten batches, and where it is among them."""

    def __init__(self) -> None:
        self._next = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._next %= 10
        while self._next < 10:
            self._next += 1
            yield torch.full((4, 3), float(self._next))

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Module(lightning.LightningModule):
    def __init__(self, die_at: int | None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.losses: list[float] = []
        self._die_at = die_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self._die_at:
            raise Died
        loss: torch.Tensor = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def run(directory: Path, *, die_at: int | None = None, reporter: Reporter | None = None) -> Module:
    torch.manual_seed(1)
    module = Module(die_at)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(directory),
    )
    callback = CheckpointCallback(directory / "checkpoints", period_steps=4, keep=9, reporter=reporter)
    if die_at is None:
        callback.fit(trainer, module, Loader())
    else:
        with pytest.raises(Died):
            callback.fit(trainer, module, Loader())
    return module
