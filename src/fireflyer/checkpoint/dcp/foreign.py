"""Checkpoints that DCP's own `FileSystemWriter` has written, read where they are.

Their metadata is a pickle, which may run anything when it is loaded: `metadata_pickle` takes what DCP writes, and
nothing else. They have no checksums, so damage within a tensor is not noticed.
"""

from __future__ import annotations

import contextlib
import io
import os
from typing import IO, Any, Final

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.checkpoint.dcp.metadata_pickle import StorageInfo, load_metadata
from fireflyer.checkpoint.dcp.objects import check_safe
from fireflyer.checkpoint.storage import Storage

__all__ = ["DcpFiles", "is_dcp"]

_METADATA: Final = ".metadata"
_MAX_METADATA_BYTES: Final = 1 << 30


def is_dcp(storage: Storage) -> bool:
    """Whether the directory is a checkpoint of DCP's own format."""
    return storage.disk.exists(f"{storage.root}/{_METADATA}")


def _is_place(info: object) -> bool:
    """Of a pickle, whose classes are as they should be, and whose values are anything."""
    if not isinstance(info, StorageInfo):
        return False
    path: Any = info.relative_path
    numbers: tuple[Any, ...] = (info.offset, info.length)
    return isinstance(path, str) and all(isinstance(one, int) and one >= 0 for one in numbers)


class DcpFiles(FileSystemReader):
    """DCP's reader, which loads no pickle that could run code unless `trust_pickles`."""

    def __init__(self, storage: Storage, *, trust_pickles: bool = False) -> None:
        super().__init__(storage.root)
        self._storage = storage
        self._trusts = trust_pickles

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        path = f"{self._storage.name}/{_METADATA}"
        with contextlib.closing(self._storage.disk.open(f"{self._storage.root}/{_METADATA}")) as file:
            size = file.size()
            if size > _MAX_METADATA_BYTES:
                raise DataCorruption(f"{path} has more than {_MAX_METADATA_BYTES} bytes")
            content = file.pread(size, 0)
        try:
            found = load_metadata(content, trusted=self._trusts)
        except Exception as error:  # a damaged pickle raises anything
            raise DataCorruption(
                f"{path} cannot be read: {error}; if you trust who wrote it, give trust_pickles=True"
            ) from error
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise DataCorruption(f"{path} is no metadata of a DCP checkpoint")
        for info in found.storage_data.values():
            if not _is_place(info):
                raise DataCorruption(f"{path} has an item without a file, an offset and a length")
            if not self._trusts and os.path.basename(info.relative_path) != info.relative_path:
                raise DataCorruption(f"{path} names file {info.relative_path[:80]!r}, which is in no checkpoint")
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self.object_bytes(item.storage_index)))
                continue
            stored = self.load_tensor(item.storage_index)
            part = self._part(item, stored)
            target = planner.resolve_tensor(item).detach()
            if target.size() != part.size():
                name = item.storage_index.fqn[:80]
                raise DataCorruption(f"tensor {name!r} in {self._storage.name} has other sizes than its metadata says")
            target.copy_(part)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _part(self, item: ReadItem, stored: torch.Tensor) -> torch.Tensor:
        """What is wanted of a stored chunk. Raises `DataCorruption` where it is smaller than the metadata says."""
        try:
            return narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
        except (RuntimeError, IndexError) as error:
            name = item.storage_index.fqn[:80]
            raise DataCorruption(
                f"tensor {name!r} in {self._storage.name} has other sizes than its metadata says"
            ) from error

    def object_bytes(self, index: Any) -> bytes:
        """What `torch.save` made of an object that is no tensor. Raises `DataCorruption` for what is not safe."""
        with self.open_item(index) as stream:
            data = stream.read()
        if not self._trusts:
            check_safe(data, f"{index.fqn[:80]!r} in {self._storage.name}")
        return data

    def load_tensor(self, index: Any) -> torch.Tensor:
        """A stored chunk, on the CPU. Raises `DataCorruption`."""
        with self.open_item(index) as stream:
            try:
                found = torch.load(stream, map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged file raises anything
                raise DataCorruption(
                    f"tensor {index.fqn[:80]!r} in {self._storage.name} cannot be read: {error}"
                ) from error
        if not isinstance(found, torch.Tensor):
            raise DataCorruption(f"tensor {index.fqn[:80]!r} in {self._storage.name} is a {type(found).__name__}")
        return found

    def open_item(self, index: Any) -> IO[bytes]:
        """The bytes of a stored item, in memory."""
        info = self.storage_data[index]
        if getattr(info, "transform_descriptors", None):
            raise UsageError(
                f"{self._storage.name} was written with stream extensions, which are not read; load it with DCP"
            )
        with contextlib.closing(self._storage.disk.open(f"{self._storage.root}/{info.relative_path}")) as file:
            inside = info.offset + info.length <= file.size()  # before there is memory for what is only claimed
            data = file.pread(info.length, info.offset) if inside else b""
        if not inside or len(data) != info.length:
            raise DataCorruption(f"{self._storage.name}/{info.relative_path} ends within {index.fqn[:80]!r}")
        return io.BytesIO(data)
