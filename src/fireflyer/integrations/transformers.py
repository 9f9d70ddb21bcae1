"""Checkpoints and reports for `transformers.Trainer`.

    callback = CheckpointCallback("checkpoints", period_steps=100)
    callback.train(trainer)              # instead of trainer.train()

Killed at any moment and started again it goes on after the newest checkpoint with the same weights, moments, schedule,
random numbers and samples. Trainer's own way to resume places it in the data: it is given a temporary directory with
its state, the weights and the random generators; optimizer and schedule are put back exactly when training begins.
Trainer's own checkpoints are not needed: `save_strategy="no"`.
"""

from __future__ import annotations

import os
import random
import tempfile
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint import Restored, State, capture, load_into, load_rng
from fireflyer.integrations.saving import Saving
from fireflyer.runtime.reporter import Reporter

__all__ = ["CheckpointCallback"]


class CheckpointCallback(TrainerCallback):
    """`directory`, `period_steps`, `period` ("10m"), `mttf`, `keep`, `keep_every` and `reporter` are those of
    `fireflyer.checkpoint.TrainingLoop`; a step is one of the optimizer. For one `train`. Works on one process and with
    data parallelism (any launcher that `TrainingArguments` understands); FSDP and DeepSpeed are refused."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        period_steps: int | None = None,
        period: str | None = None,
        mttf: str | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self._saving = Saving(
            directory,
            period_steps=period_steps,
            period=period,
            mttf=mttf,
            keep=keep,
            keep_every=keep_every,
            reporter=reporter,
        )
        self._trainer: Trainer | None = None
        self._restored: Restored | None = None

    def train(self, trainer: Trainer, **options: Any) -> Any:
        """Restores, then `trainer.train(**options)`. Returns what that returns. Raises `UsageError` for what cannot be
        saved this way, and what `CheckpointManager` raises."""
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise UsageError("FSDP and DeepSpeed keep parts of the state on each rank; use their own checkpoints")
        if "resume_from_checkpoint" in options:
            raise UsageError("leave resume_from_checkpoint out: the newest checkpoint of the directory is resumed from")
        trainer.add_callback(self)
        self._trainer = trainer
        failed = True
        try:
            self._restored = self._saving.open()
            with tempfile.TemporaryDirectory(prefix="resume-") as place:
                if self._restored is not None:
                    self._lay_out(self._restored, place)
                    options["resume_from_checkpoint"] = place
                result = trainer.train(**options)
            failed = False
            return result
        finally:
            self._saving.close(failed=failed)
            trainer.remove_callback(self)

    def _lay_out(self, restored: Restored, place: str) -> None:
        """What Trainer reads when it resumes."""
        trainer = self._chosen()
        load_into(restored.shared, restored.values, self._model())
        prefix = "model/"
        weights = {name.removeprefix(prefix): it for name, it in restored.shared.items() if name.startswith(prefix)}
        save_file(weights, os.path.join(place, "model.safetensors"), metadata={"format": "pt"})
        with open(os.path.join(place, "trainer_state.json"), "w", encoding="utf-8") as file:
            file.write(restored.values["user"]["trainer_state"])
        if restored.own is not None:
            load_rng(restored.own)
            generators: dict[str, Any] = {
                "python": random.getstate(),
                "numpy": np.random.get_state(),
                "cpu": torch.get_rng_state(),
            }
            if torch.cuda.is_available():
                generators["cuda"] = torch.cuda.get_rng_state()
            many = trainer.args.world_size > 1
            name = f"rng_state_{trainer.args.process_index}.pth" if many else "rng_state.pth"
            torch.save(generators, os.path.join(place, name))

    def _chosen(self) -> Trainer:
        if self._trainer is None:
            raise UsageError("call the callback's train(trainer), which restores; not trainer.train()")
        return self._trainer

    def _model(self) -> torch.nn.Module:
        model = self._chosen().model
        if model is None:
            raise UsageError("the trainer has no model; give it one, or model_init and call it first")
        return model

    def _optimizer(self) -> torch.optim.Optimizer:
        """The one that Accelerate has wrapped."""
        optimizer: Any = self._chosen().optimizer
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        return inner

    def _state(self) -> State:
        trainer = self._chosen()
        scheduler: Any = trainer.lr_scheduler
        scaler: Any = trainer.accelerator.scaler
        values = {
            # As text: its history of losses may hold numbers that are not finite.
            "trainer_state": _encoded(trainer.state),
            "scheduler": scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        return capture(self._model(), self._optimizer(), values=values)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        restored, self._restored = self._restored, None
        if restored is None:
            return
        trainer = self._chosen()
        user = load_into(restored.shared, restored.values, self._model(), self._optimizer())
        scheduler: Any = trainer.lr_scheduler
        scheduler.load_state_dict(user["scheduler"])
        scaler: Any = trainer.accelerator.scaler
        if scaler is not None and user["scaler"] is not None:
            scaler.load_state_dict(user["scaler"])

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._saving.step_begins()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._saving.step_ends(state.global_step, samples, self._state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if args.logging_steps == 1 and logs is not None and "loss" in logs:  # else it is the mean of several steps
            self._saving.send_report(float(logs["loss"]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._saving.ends(state.global_step, self._state)


def _encoded(state: TrainerState) -> str:
    with tempfile.NamedTemporaryFile(mode="r", encoding="utf-8", suffix=".json") as file:
        state.save_to_json(file.name)
        return file.read()
