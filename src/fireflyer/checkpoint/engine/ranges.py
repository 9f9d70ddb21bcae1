"""Reads boxes of stored tensors, however they are cut into slices: the ranges that are needed, and no others.

What is read is verified before it counts: a box is usable when `read` has returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from fireflyer.base.errors import NotFound, UsageError
from fireflyer.base.ports import Disk
from fireflyer.checkpoint.core.manifest import Manifest, TensorRecord
from fireflyer.checkpoint.core.safetensors import DTYPE_BYTES
from fireflyer.checkpoint.core.slices import Box, overlap, runs
from fireflyer.checkpoint.engine.loading import Scattered, load, sink_of

__all__ = ["Request", "StoredTensor", "TensorReader", "scatter"]


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, whole or in slices."""

    name: str
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    parts: tuple[TensorRecord, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


class Request(NamedTuple):
    """`box` of the tensor `name`, row-major into `target`."""

    name: str
    box: Box
    target: memoryview


def scatter(record: TensorRecord, wanted: Iterable[tuple[Box, memoryview]]) -> Scattered | None:
    """Where the bytes of a stored tensor or slice go; None where none of them is wanted."""
    element_bytes = DTYPE_BYTES[record.dtype]
    found = [(runs(record.box, box, element_bytes), target) for box, target in wanted]
    parts = [(ranges, target) for ranges, target in found if ranges]
    return Scattered(parts) if parts else None


class TensorReader:
    """The tensors of the checkpoint in the directory `root`/`name`, by their whole names."""

    def __init__(self, disk: Disk, root: str, name: str, manifest: Manifest) -> None:
        self._disk, self._root, self._name, self._manifest = disk, root, name, manifest
        parts: dict[str, list[TensorRecord]] = {}
        self._shard_of: dict[str, int] = {}
        for number, shard in enumerate(manifest.shards):
            for record in shard.tensors:
                parts.setdefault(record.whole_name, []).append(record)
                self._shard_of[record.name] = number
        self.tensors = {
            name: StoredTensor(name, records[0].dtype, records[0].whole_shape, tuple(records))
            for name, records in sorted(parts.items())
        }
        """Sorted by name."""

    def read(self, requests: Sequence[Request]) -> None:
        """Fills every target. Raises `NotFound` for a tensor that is not in the checkpoint, `UsageError` for a box that
        is not in its tensor or has another size than its target, `DataCorruption`, and what the disk raises."""
        by_name: dict[str, list[tuple[Box, memoryview]]] = {}
        for request in requests:
            self._check(request)
            by_name.setdefault(request.name, []).append((request.box, request.target))
        needed: dict[int, list[TensorRecord]] = {}
        for name, wanted in by_name.items():
            for record in self.tensors[name].parts:
                if any(overlap(record.box, box) for box, _ in wanted):
                    needed.setdefault(self._shard_of[record.name], []).append(record)
        if not needed:
            return
        shards = tuple(
            msgspec.structs.replace(
                self._manifest.shards[number], tensors=tuple(sorted(records, key=lambda record: record.offset))
            )
            for number, records in sorted(needed.items())
        )

        def place_of(_writer: int, record: TensorRecord) -> Scattered | None:
            return scatter(record, by_name[record.whole_name])

        manifest = msgspec.structs.replace(self._manifest, shards=shards)
        load(self._disk, self._root, self._name, manifest, sink_of(place_of), only_wanted=True)

    def _check(self, request: Request) -> None:
        tensor = self.tensors.get(request.name)
        if tensor is None:
            raise NotFound(f"{self._root}/{self._name} has no tensor {request.name[:80]!r}")
        offset, shape = request.box
        fits = len(offset) == len(shape) == len(tensor.shape) and all(
            begin >= 0 and size >= 0 and begin + size <= whole
            for begin, size, whole in zip(offset, shape, tensor.shape, strict=True)
        )
        if not fits:
            raise UsageError(f"{request.box} is no part of {request.name[:80]!r}, which has the shape {tensor.shape}")
        if len(request.target) != request.box.elements * DTYPE_BYTES[tensor.dtype]:
            raise UsageError(f"{len(request.target)} bytes are not those of {request.box} of {request.name[:80]!r}")
