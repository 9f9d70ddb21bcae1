"""Checkpoints and reports for `lightning.pytorch.Trainer` (or `pytorch_lightning`).

    callback = CheckpointCallback("checkpoints", period_steps=100)
    callback.fit(trainer, module, loader)        # instead of trainer.fit(module, loader)

Killed at any moment and started again it goes on after the newest checkpoint with the same weights, moments, schedules,
loops, callbacks and random numbers. Lightning does not skip samples that were seen: in the middle of an epoch the data
goes on where it stopped only with a loader that has `state_dict` and `load_state_dict`.

What Lightning would write to its own file is taken apart: tensors go to the shards, everything else, which must be
plain values, to the manifest. Lightning reads it back from a temporary file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as lightning
import torch

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint import State, capture_rng, load_rng
from fireflyer.integrations.saving import Saving
from fireflyer.runtime.reporter import Reporter

__all__ = ["CheckpointCallback", "put_together", "take_apart"]


class CheckpointCallback(lightning.Callback):
    """`directory`, `period_steps`, `period` ("10m"), `mttf`, `keep`, `keep_every` and `reporter` are those of
    `fireflyer.checkpoint.TrainingLoop`; a step is one of the optimizer. For one `fit`. Works on one process and with
    the strategies that keep the whole state on each rank (DDP); others are refused."""

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
        self._generators: Mapping[str, torch.Tensor] | None = None
        self._last_step = 0
        self._samples = 0

    def fit(self, trainer: lightning.Trainer, module: lightning.LightningModule, *data: Any, **options: Any) -> None:
        """Restores, then `trainer.fit(module, *data, **options)`. Raises `UsageError` for what cannot be saved this
        way, and what `CheckpointManager` raises."""
        if "ckpt_path" in options:
            raise UsageError("leave ckpt_path out: the newest checkpoint of the directory is resumed from")
        trainer.callbacks.append(self)  # type: ignore[attr-defined]
        failed = True
        try:
            restored = self._saving.open()
            with tempfile.TemporaryDirectory(prefix="resume-") as place:
                if restored is not None:
                    path = os.path.join(place, "resume.ckpt")
                    torch.save(put_together(restored.values["lightning"], restored.shared), path)
                    options["ckpt_path"] = path
                    self._generators = restored.own
                    self._last_step = restored.step
                    restored.shared = {}
                trainer.fit(module, *data, **options)
            failed = trainer.interrupted
        finally:
            self._saving.close(failed=failed)
            trainer.callbacks.remove(self)  # type: ignore[attr-defined]

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.strategy.__class__.__name__ not in ("SingleDeviceStrategy", "DDPStrategy"):
            raise UsageError(f"{type(trainer.strategy).__name__} keeps parts of the state on each rank; use DDP")

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._generators is not None:  # only now: fetching the first batch uses random numbers, too
            load_rng(self._generators)
            self._generators = None
        if self._samples == 0:
            self._saving.step_begins()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += _length(batch)
        if trainer.global_step == self._last_step:  # gradients are being accumulated
            return
        self._last_step = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        known = float(loss) if isinstance(loss, torch.Tensor) and trainer.world_size == 1 else None
        self._saving.step_ends(self._last_step, self._samples, lambda: _state(trainer), loss=known)
        self._samples = 0

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._saving.ends(trainer.global_step, lambda: _state(trainer))


def _state(trainer: lightning.Trainer) -> State:
    content: Any = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)  # noqa: SLF001 - what it saves
    tensors: dict[str, torch.Tensor] = {}
    plain = take_apart(content, "checkpoint", tensors)
    return State(tensors, capture_rng(), {"lightning": plain}, frozenset(tensors))


def _length(batch: Any) -> int:
    """Samples, as far as it can be seen."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return _length(parts[0]) if isinstance(parts, list | tuple) and parts else 1


def take_apart(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Plain values, in which a tensor is its name in `tensors`. Raises `UsageError` naming what is no plain value."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value} if not isinstance(value, float) else {"float": value.hex()}
    if isinstance(value, Mapping):
        pairs = [
            [take_apart(key, f"{name}/key", tensors), take_apart(inner, f"{name}/{key}", tensors)]
            for key, inner in value.items()
        ]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [take_apart(inner, f"{name}/{number}", tensors) for number, inner in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise UsageError(
        f"{name} is {type(value).__name__}; only tensors, None, bool, numbers, text, lists and dicts are saved: "
        "keep it out of the state of the module and its callbacks (save_hyperparameters, on_save_checkpoint)"
    )


def put_together(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put together what `take_apart` took apart."""
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "value":
        return inner
    if kind == "float":
        return float.fromhex(inner)
    if kind == "dict":
        return {put_together(key, tensors): put_together(one, tensors) for key, one in inner}
    items = [put_together(one, tensors) for one in inner]
    return tuple(items) if kind == "tuple" else items
