"""Which tensors of a checkpoint go into which file of an export, and under which names.

Names and index are those of Hugging Face: `model.safetensors`, or `model-00001-of-00003.safetensors`, … with
`model.safetensors.index.json`, which says for each tensor in which file it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.checkpoint.core.shares import OWN_PREFIX
from fireflyer.checkpoint.core.slices import Box, whole

__all__ = ["INDEX_FILE", "MODEL_PREFIX", "ExportFile", "band_boxes", "export_names", "index_json", "plan_export"]

INDEX_FILE = "model.safetensors.index.json"
MODEL_PREFIX = "model/"
"""Of the names under which `capture` stores a model."""
_WRAPPER = "module."
"""What `DistributedDataParallel` puts before each name."""


class ExportFile(NamedTuple):
    name: str
    tensors: tuple[TensorSpec, ...]
    """By their exported names."""


def export_names(stored: Iterable[str], prefix: str | None) -> dict[str, str]:
    """Stored name for each exported one. With a `prefix` the tensors whose name begins with it, without it; with none
    those of the model, without `model/` and `module.`, or all but those of a rank where no name begins with `model/`.
    Raises `UsageError` where nothing is left."""
    names = [name for name in stored if not name.startswith(OWN_PREFIX)]
    if prefix is None:
        prefix = MODEL_PREFIX if any(name.startswith(MODEL_PREFIX) for name in names) else ""
        wrapped = prefix + _WRAPPER
        if prefix and all(name.startswith(wrapped) for name in names if name.startswith(prefix)):
            prefix = wrapped
    found = {name.removeprefix(prefix): name for name in names if name.startswith(prefix) and name != prefix}
    if not found:
        raise UsageError(f"no tensor has a name that begins with {prefix!r}; `ff ckpt show` lists the names")
    return found


def plan_export(tensors: Iterable[TensorSpec], max_file_bytes: int) -> list[ExportFile]:
    """Files of at most `max_file_bytes` of tensors (a larger tensor has one of its own), in the order of `tensors`."""
    files: list[list[TensorSpec]] = [[]]
    filled_bytes = 0
    for spec in tensors:
        if files[-1] and filled_bytes + spec.size_bytes > max_file_bytes:
            files.append([])
            filled_bytes = 0
        files[-1].append(spec)
        filled_bytes += spec.size_bytes
    if len(files) == 1:
        return [ExportFile("model.safetensors", tuple(files[0]))]
    return [
        ExportFile(f"model-{number:05d}-of-{len(files):05d}.safetensors", tuple(specs))
        for number, specs in enumerate(files, 1)
    ]


def band_boxes(shape: Sequence[int], max_elements: int) -> Iterator[Box]:
    """All of a tensor, which is not empty, as boxes that lie one after the other in it row-major, each of at most
    `max_elements` (1 or more). The first is the largest."""
    dim, inner = len(shape), 1  # dims from `dim` on are in a box as a whole
    while dim and inner * shape[dim - 1] <= max_elements:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield whole(shape)
        return
    count, rest = shape[dim - 1], tuple(shape[dim:])
    rows = max_elements // inner
    for index in itertools.product(*map(range, shape[: dim - 1])):
        for first in range(0, count, rows):
            offset = (*index, first, *(0 for _ in rest))
            yield Box(offset, (*(1 for _ in index), min(rows, count - first), *rest))


def index_json(files: Iterable[ExportFile]) -> bytes:
    """Of `model.safetensors.index.json`."""
    weight_map: Mapping[str, str] = {spec.name: file.name for file in files for spec in file.tensors}
    total_size = sum(spec.size_bytes for file in files for spec in file.tensors)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
