"""Weights in the files of Hugging Face: `config.json` and `*.safetensors` of one directory.

Names differ from the model's own in three places: routed experts are one tensor each, prediction modules are numbered
as layers behind the last, and what these share with the main model is stored again. A matrix in FP8 (E4M3) comes with
`NAME_scale_inv`, a factor for each block of 128 x 128, as in the published DeepSeek-V3.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.recipes.deepseek.config import DeepseekConfig
from fireflyer.recipes.deepseek.experts import RoutedExperts
from fireflyer.recipes.deepseek.model import DeepseekModel

__all__ = ["BLOCK", "dequantise", "load_weights", "read_config", "save_weights"]

BLOCK: Final = 128
"""Rows and columns of a matrix in FP8 that share a factor."""

_MAX_CONFIG_BYTES: Final = 1 << 20
_SCALE: Final = "_scale_inv"
_PREDICTION: Final = re.compile(r"mtp\.(\d+)\.(.*)")


class _Files:
    """Tensors of all safetensors files of a directory, read one at a time."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        try:
            names = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
        except OSError as error:
            raise translate_os_error(error, directory) from error
        if not names:
            raise NotFound(f"{directory} has no *.safetensors files; give a directory with a model of Hugging Face")
        self._file_of: dict[str, Any] = {}
        for name in names:
            path = os.path.join(directory, name)
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise DataCorruption(f"{path} is no whole safetensors file: {error}; fetch it again") from error
            for tensor in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - it is no mapping
                if tensor in self._file_of:
                    raise DataCorruption(f"{path}: tensor {tensor!r} is in another file of the directory, too")
                self._file_of[tensor] = file

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """Tensor `name`; one in FP8 is multiplied by its factors, to fp32."""
        if name not in self._file_of:
            raise NotFound(f"{self.directory}: the files have no tensor {name!r}, which this model needs")
        stored: Tensor = self._file_of[name].get_tensor(name)
        if stored.shape != shape:
            raise UsageError(
                f"{self.directory}: tensor {name!r} has shape {tuple(stored.shape)}, the model of config.json "
                f"{tuple(shape)}"
            )
        if stored.dtype != torch.float8_e4m3fn:
            return stored
        scale = name + _SCALE
        if scale not in self._file_of:
            raise NotFound(f"{self.directory}: tensor {name!r} is in FP8 and has no factors {scale!r}")
        return dequantise(stored, self._file_of[scale].get_tensor(scale), name)


def dequantise(stored: Tensor, factors: Tensor, name: str = "matrix") -> Tensor:
    """Matrix `[m, n]` in fp32: `stored [m, n]` in FP8 times `factors [m/128, n/128]` (rounded up) of its blocks. Raises
    `UsageError` naming `name` if their shapes do not fit."""
    wanted = tuple(-(-size // BLOCK) for size in stored.shape)
    if tuple(factors.shape) != wanted:
        raise UsageError(
            f"{name}: {tuple(factors.shape)} factors for a matrix of {tuple(stored.shape)} in FP8; blocks of "
            f"{BLOCK} x {BLOCK} need {wanted}"
        )
    for dim, size in enumerate(stored.shape):
        factors = factors.repeat_interleave(BLOCK, dim)[(slice(None),) * dim + (slice(size),)]
    return stored.float() * factors.float()


def read_config(directory: str, *, seed: int = 0) -> DeepseekConfig:
    """Config of the `config.json` in `directory`. Raises `NotFound`, or `UsageError` for what is no such config."""
    return DeepseekConfig.from_hugging_face(read_keys(os.path.join(directory, "config.json")), seed=seed)


def read_keys(path: str) -> dict[str, Any]:
    """Keys of the `config.json` at `path`, of any model. Raises as `read_config`."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise translate_os_error(error, path) from error
    if len(data) > _MAX_CONFIG_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes; give a model's config.json")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is no JSON object; give a model's config.json")
    return config


@torch.no_grad()
def load_weights(model: DeepseekModel, directory: str, *, stored_hidden_first: bool | None = None) -> None:
    """Fills `model` from the safetensors files in `directory`; each tensor is cast to the model's dtype. A model with a
    part of the experts reads that part.

    `stored_hidden_first`: order in which the files' projections of prediction modules read their two inputs, if it is
    not that of the model; halves are swapped then. Raises `NotFound` for a tensor that is not there, `UsageError` for
    one of another shape, or a shared one that differs from what it is shared with, `DataCorruption` for a broken file.
    """
    files = _Files(directory)
    for name, target in _tensors(model):
        stored = files.read(name, target.shape)
        if name.endswith("eh_proj.weight") and stored_hidden_first not in (None, model.config.mtp_hidden_first):
            stored = stored.roll(model.config.shape.hidden, dims=1)
        target.copy_(stored)
    for name, target in _shared(model):
        if name in files and not torch.equal(files.read(name, target.shape).to(target), target):
            raise UsageError(
                f"{directory}: tensor {name!r} differs from that of the main model, and this model shares them"
            )


@torch.no_grad()
def save_weights(model: DeepseekModel, directory: str, *, stored_hidden_first: bool | None = None) -> None:
    """Writes `config.json` and `model.safetensors` into `directory`, in the model's dtype, for `load_weights` and
    `transformers`. `stored_hidden_first` as of `load_weights`. Raises `UsageError` for a part of a model."""
    for path, module in model.named_modules():
        if isinstance(module, RoutedExperts) and module.numbers != range(model.config.shape.experts.routed):  # type: ignore[union-attr]
            raise UsageError(f"{path} has experts {module.numbers} only; gather the others before writing a model")
    config = model.config.to_hugging_face()
    if stored_hidden_first is not None:
        config["mtp_hidden_states_first"] = stored_hidden_first
    swapped = stored_hidden_first not in (None, model.config.mtp_hidden_first)
    found = {}
    for name, tensor in (*_tensors(model), *_shared(model)):
        moved = (
            tensor.roll(model.config.shape.hidden, dims=1) if swapped and name.endswith("eh_proj.weight") else tensor
        )
        found[name] = moved.detach().cpu().clone(memory_format=torch.contiguous_format)
    try:
        os.makedirs(directory, exist_ok=True)
        save_file(found, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
        with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2, sort_keys=True)
    except OSError as error:
        raise translate_os_error(error, directory) from error


def _tensors(model: DeepseekModel) -> Iterator[tuple[str, Tensor]]:
    """Names in the files and tensors of the model, a part of a stacked one for each expert."""
    experts: Mapping[str, range] = {
        path: module.numbers for path, module in model.named_modules() if isinstance(module, RoutedExperts)
    }
    for name, tensor in model.state_dict(keep_vars=True).items():
        path, _, last = name.rpartition(".")
        stored = _stored_name(name, model.config.shape.layers)
        if path not in experts:
            yield stored, tensor
            continue
        for number, matrix in zip(experts[path], tensor, strict=True):
            yield f"{stored.removesuffix(last)}{number}.{last}.weight", matrix


def _shared(model: DeepseekModel) -> Iterator[tuple[str, Tensor]]:
    """What files have once more for each prediction module."""
    for depth in range(len(model.mtp)):
        layer = f"model.layers.{model.config.shape.layers + depth}"
        yield f"{layer}.embed_tokens.weight", model.embed_tokens.weight
        head = model.embed_tokens if model.config.shape.tied_embeddings else model.lm_head
        yield f"{layer}.shared_head.head.weight", head.weight


def _stored_name(name: str, layers: int) -> str:
    if name.startswith("lm_head."):
        return name
    match = _PREDICTION.fullmatch(name)
    if match is None:
        return f"model.{name}"
    below = match[2].removeprefix("block.")
    return f"model.layers.{layers + int(match[1])}.{'shared_head.' if below.startswith('norm.') else ''}{below}"
