"""Checkpoints that DCP's own `FileSystemWriter` has written, read where they are.

Their metadata is a pickle, which may run anything when it is loaded: here it may name the classes that DCP writes, and
no others. They have no checksums, so damage within a tensor is not noticed.
"""

from __future__ import annotations

import collections
import enum
import io
import os
import pathlib
import pickle
from typing import IO, Any, Final

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.checkpoint.dcp.objects import check_safe
from fireflyer.runtime.disk import translate_os_error

__all__ = ["DcpFiles", "is_dcp"]

_METADATA: Final = ".metadata"
_MAX_METADATA_BYTES: Final = 1 << 30


def is_dcp(path: str) -> bool:
    """Whether the directory `path` is a checkpoint of DCP's own format."""
    return os.path.isfile(f"{path}/{_METADATA}")


class _Unpickler(pickle.Unpickler):
    """Of what `FileSystemWriter.finish` pickles."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = _allowed()
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is nothing that DCP writes")
        return allowed[module, name]


def _allowed() -> dict[tuple[str, str], Any]:
    classes: list[Any] = [
        dcp_metadata.Metadata,
        dcp_metadata.MetadataIndex,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.TensorProperties,
        dcp_metadata.StorageMeta,
        dcp_metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001 - part of DCP's format
        filesystem._StorageInfo,  # noqa: SLF001 - part of DCP's format
        torch.Size,
        collections.OrderedDict,
        pathlib.PosixPath,
        pathlib.Path,
        pathlib.PurePosixPath,
    ]
    found = {(each.__module__, each.__qualname__): each for each in classes}
    found["pathlib._local", "PosixPath"] = pathlib.PosixPath  # of Python 3.13
    found["builtins", "getattr"] = _enumeration_member
    found["torch.serialization", "_get_layout"] = torch.serialization._get_layout  # noqa: SLF001 - as above
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        found |= {("torch", name): each for name, each in vars(torch).items() if isinstance(each, kind)}
    return found


def _enumeration_member(kind: object, name: str) -> enum.Enum:
    """Stands for `getattr`, by which some releases of Python 3.11 pickle the members of enumerations."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError("it takes an attribute of something that is no enumeration")
    return kind[name]


class DcpFiles(FileSystemReader):
    """DCP's reader, which loads no pickle that could run code unless `trust_pickles`."""

    def __init__(self, path: str, *, trust_pickles: bool = False) -> None:
        super().__init__(path)
        self._trusts = trust_pickles

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._trusts:
            return super().read_metadata(*args, **kwargs)
        path = f"{self.path}/{_METADATA}"
        try:
            with open(path, "rb") as file:
                content = file.read(_MAX_METADATA_BYTES + 1)
        except OSError as error:
            raise translate_os_error(error, f"read {path}") from error
        if len(content) > _MAX_METADATA_BYTES:
            raise DataCorruption(f"{path} has more than {_MAX_METADATA_BYTES} bytes")
        try:
            found = _Unpickler(io.BytesIO(content)).load()
        except Exception as error:  # a damaged pickle raises anything
            raise DataCorruption(
                f"{path} cannot be read: {error}; if you trust who wrote it, give trust_pickles=True"
            ) from error
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise DataCorruption(f"{path} is no metadata of a DCP checkpoint")
        for info in found.storage_data.values():
            if os.path.basename(info.relative_path) != info.relative_path:
                raise DataCorruption(f"{path} names file {str(info.relative_path)[:80]!r}, which is in no checkpoint")
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        tensors: list[ReadItem] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self.object_bytes(item.storage_index)))
            else:
                tensors.append(item)
        return super().read_data(LoadPlan(tensors), planner)

    def object_bytes(self, index: Any) -> bytes:
        """What `torch.save` made of an object that is no tensor. Raises `DataCorruption` for what is not safe."""
        with self.open_item(index) as stream:
            data = stream.read()
        if not self._trusts:
            check_safe(data, f"{index.fqn[:80]!r} in {self.path}")
        return data

    def load_tensor(self, index: Any) -> torch.Tensor:
        """A stored chunk, on the CPU. Raises `DataCorruption`."""
        with self.open_item(index) as stream:
            try:
                found = torch.load(stream, map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged file raises anything
                raise DataCorruption(f"tensor {index.fqn[:80]!r} in {self.path} cannot be read: {error}") from error
        if not isinstance(found, torch.Tensor):
            raise DataCorruption(f"tensor {index.fqn[:80]!r} in {self.path} is a {type(found).__name__}")
        return found

    def open_item(self, index: Any) -> IO[bytes]:
        """The bytes of a stored item, in memory."""
        info = self.storage_data[index]
        if getattr(info, "transform_descriptors", None):
            raise UsageError(f"{self.path} was written with stream extensions, which are not read; load it with DCP")
        path = f"{self.path}/{info.relative_path}"
        try:
            with open(path, "rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
        except OSError as error:
            raise translate_os_error(error, f"read {path}") from error
        if len(data) != info.length:
            raise DataCorruption(f"{path} ends within {index.fqn[:80]!r}")
        return io.BytesIO(data)
