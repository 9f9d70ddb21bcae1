"""`FireFlyerReader`: `torch.distributed.checkpoint` loads our checkpoints, and those of its own format in place."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fireflyer.base.errors import DataCorruption, NotFound, StaleVersion
from fireflyer.base.ports import Disk
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.slices import Box, whole
from fireflyer.checkpoint.dcp.foreign import DcpFiles, is_dcp
from fireflyer.checkpoint.dcp.objects import BYTES_PREFIX, VALUES_KEY, check_safe, saved_bytes
from fireflyer.checkpoint.engine.ranges import Request, TensorReader
from fireflyer.checkpoint.reader import open_checkpoint
from fireflyer.checkpoint.storage import open_storage
from fireflyer.checkpoint.tensors import DTYPES, bytes_of, can_be_filled
from fireflyer.native import crc32c

__all__ = ["FireFlyerReader"]

_log = logging.getLogger(__name__)

STAGED_BYTES: Final = 256 * MIB
"""What a load holds beside the state at a time, for tensors that cannot be filled where they are; or one of them."""


class _Chosen(NamedTuple):
    """The checkpoint that a rank has opened."""

    name: str
    manifest_crc32c: int


class _Read(NamedTuple):
    """A part of a tensor that is read, and where it goes in the end."""

    item: ReadItem
    target: torch.Tensor
    staged: torch.Tensor
    """`target` itself, where it can be filled as it is."""


class FireFlyerReader(StorageReader):
    """Storage reader of `dcp.load`.

        dcp.load(state, storage_reader=FireFlyerReader("checkpoints/step-00000100"))
        dcp.load(state, storage_reader=FireFlyerReader("checkpoints"))                  # the newest one

    `path` is a checkpoint, a directory of checkpoints (then the newest with a readable manifest is taken; all ranks
    must find the same one), or a checkpoint of DCP's own format (`.metadata` and `*.distcp`). Ranks read the ranges
    that they need and verify them; of DCP's format there is nothing to verify. Objects that are no plain values are
    handed to the planner, which unpickles them, only if `torch.load(weights_only=True)` takes them, unless
    `trust_pickles`.

    Raises `NotFound` where there is no checkpoint, `DataCorruption`, `StaleVersion` where ranks have found different
    checkpoints as one was committed meanwhile, and other `FireflyerError`s of the disk. DCP wraps
    what a rank raises into `CheckpointException`, which is no `Exception`; `fireflyer.checkpoint.dcp.load` unwraps it.
    """

    def __init__(
        self, path: str | os.PathLike[str] = "", *, trust_pickles: bool = False, disk: Disk | None = None
    ) -> None:
        self._given, self._trusts = os.fspath(path), trust_pickles
        self._disk = disk
        self._tensors: TensorReader | None = None
        self._foreign: DcpFiles | None = None
        self._chosen: _Chosen | None = None
        self.error: Exception | None = None
        """What went wrong when the checkpoint was opened: DCP tells only its text."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._given = os.fspath(checkpoint_id)
        self._tensors = self._foreign = self._chosen = self.error = None

    @property
    def checkpoint_id(self) -> str:
        """The path that was given."""
        return self._given

    def read_metadata(self) -> Metadata:  # without `kwargs`: DCP would ask again for one of the rank alone
        try:
            return self._read_metadata()
        except Exception as error:
            self.error = error
            raise

    def _read_metadata(self) -> Metadata:
        storage = open_storage(self._given, disk=self._disk)
        if is_dcp(storage):
            self._foreign = DcpFiles(storage, trust_pickles=self._trusts)
            self._chosen = _Chosen(self._given, 0)
            return self._foreign.read_metadata()
        opened = open_checkpoint(self._given, self._disk)
        for skipped in opened.passed_over:
            _log.warning("checkpoint skipped name=%s reason=%s", skipped.name, skipped.reason)
        self._chosen = _Chosen(opened.name, crc32c(msgspec.json.encode(opened.manifest)))
        reader = self._tensors = TensorReader(opened.disk, opened.root, opened.name, opened.manifest)
        of_dcp = opened.manifest.values.get(VALUES_KEY)
        of_dcp = of_dcp if isinstance(of_dcp, dict) else {}
        self._values = _mapping(of_dcp, "values")
        found: dict[str, Any] = dict.fromkeys(self._values, BytesStorageMetadata())
        for tensor in reader.tensors.values():
            if tensor.name.startswith(BYTES_PREFIX):
                found[tensor.name.removeprefix(BYTES_PREFIX)] = BytesStorageMetadata()
                continue
            chunks = [
                ChunkStorageMetadata(torch.Size(part.box.offset), torch.Size(part.box.shape)) for part in tensor.parts
            ]
            properties = TensorProperties(dtype=DTYPES[tensor.dtype])
            found[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        paths = {name: tuple(parts) for name, parts in _mapping(of_dcp, "paths").items()}
        meta = StorageMeta(checkpoint_id=f"{opened.root}/{opened.name}")
        return Metadata(found, planner_data=paths or None, storage_data={}, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        if self._foreign is not None:
            self._foreign.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._chosen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises `StaleVersion` where ranks have opened different checkpoints, which DCP would load. Called by the
        coordinator."""
        chosen = sorted({plan.storage_data for plan in plans if isinstance(plan.storage_data, _Chosen)})
        if len(chosen) > 1:
            names = ", ".join(dict.fromkeys(each.name for each in chosen))
            raise StaleVersion(
                f"ranks have opened different checkpoints in {self._given} ({names}): one was written meanwhile; load "
                "again, or name one of them"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._foreign is not None:
            return self._foreign.read_data(plan, planner)
        self._load_objects([item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner)
        self._load_tensors([item for item in plan.items if item.type != LoadItemType.BYTE_IO], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _reader(self) -> TensorReader:
        if self._tensors is None:
            raise NotFound("no checkpoint is open; DCP calls read_metadata first")
        return self._tensors

    def _load_objects(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        reader = self._reader()
        for item in items:
            name = item.storage_index.fqn
            if name in self._values:
                planner.load_bytes(item, io.BytesIO(saved_bytes(self._values[name])))
                continue
            stored = reader.tensors.get(f"{BYTES_PREFIX}{name}")
            if stored is None or stored.dtype != "U8" or len(stored.shape) != 1:
                raise DataCorruption(f"{self._given} has no object {name[:80]!r}")
            content = torch.empty(stored.shape, dtype=torch.uint8)
            reader.read([Request(stored.name, whole(stored.shape), bytes_of(content))])
            data = content.numpy().tobytes()
            if not self._trusts:
                check_safe(data, f"{name[:80]!r} in {self._given}")
            planner.load_bytes(item, io.BytesIO(data))

    def _load_tensors(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        batch: list[_Read] = []
        staged_bytes = 0
        for item in items:
            read = self._read_of(item, planner)
            if read.staged is not read.target:
                staged_bytes += read.staged.numel() * read.staged.element_size()
            batch.append(read)
            if staged_bytes >= STAGED_BYTES:
                self._finish(batch, planner)
                batch, staged_bytes = [], 0
        self._finish(batch, planner)

    def _read_of(self, item: ReadItem, planner: LoadPlanner) -> _Read:
        tensor = self._reader().tensors[item.storage_index.fqn]
        target = planner.resolve_tensor(item).detach()
        shape = tuple(item.lengths)
        fits = target.device.type == "cpu" and can_be_filled(target, tensor.dtype, shape)
        return _Read(item, target, target if fits else torch.empty(shape, dtype=DTYPES[tensor.dtype]))

    def _finish(self, batch: Sequence[_Read], planner: LoadPlanner) -> None:
        requests = []
        for read in batch:
            begin = read.item.storage_index.offset or (0,) * len(read.item.lengths)
            offset = tuple(a + b for a, b in zip(begin, read.item.storage_offsets, strict=True))
            box = Box(offset, tuple(read.item.lengths))
            requests.append(Request(read.item.storage_index.fqn, box, bytes_of(read.staged)))
        self._reader().read(requests)
        for read in batch:
            if read.staged is not read.target:
                read.target.copy_(read.staged)
            planner.commit_tensor(read.item, read.target)


def _mapping(of_dcp: dict[str, Any], key: str) -> dict[str, Any]:
    found = of_dcp.get(key) or {}
    if not isinstance(found, dict):
        raise DataCorruption(f"the manifest's values have {key!r} of type {type(found).__name__}")
    return found
