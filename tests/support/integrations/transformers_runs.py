"""Runs of `transformers.Trainer` with our callback. To be imported in tests and not at their heads: the library takes
seconds of every process that collects tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from fireflyer.integrations.transformers import CheckpointCallback
from fireflyer.runtime.reporter import Reporter

__all__ = ["Told", "losses", "run"]


class Died(Exception):
    pass


class DieAt(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Died


class Told(Reporter):
    def __init__(self) -> None:
        super().__init__(None, None, "")
        self.reports: list[object] = []

    def _put(self, report: object) -> None:
        self.reports.append(report)


def run(directory: Path, *, die_at: int | None = None, reporter: Reporter | None = None, **options: Any) -> Trainer:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2)  # dropout 0.1
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (20, 8))]
    arguments = TrainingArguments(
        output_dir=str(directory / "out"),
        per_device_train_batch_size=2,
        num_train_epochs=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=5,
        **options,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=data,
        callbacks=[DieAt(die_at)],
    )
    callback = CheckpointCallback(directory / "checkpoints", period_steps=4, keep=9, reporter=reporter)
    if die_at is None:
        callback.train(trainer)
    else:
        with pytest.raises(Died):
            callback.train(trainer)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
