"""The content of a checkpoint of DCP's own format, for one of ours: slices stay slices, as large as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.checkpoint.core.exporting import MODEL_PREFIX
from fireflyer.checkpoint.core.plain import check_plain
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.checkpoint.core.slices import Box, Slice, slice_name, whole
from fireflyer.checkpoint.dcp.foreign import DcpFiles
from fireflyer.checkpoint.dcp.objects import BYTES_PREFIX, VALUES_KEY, plain_value
from fireflyer.checkpoint.engine.stream import Source
from fireflyer.checkpoint.storage import Storage
from fireflyer.checkpoint.tensors import bytes_of, spec_of

__all__ = ["dcp_content"]


def dcp_content(
    source: Storage, model: str | None, *, trust_pickles: bool = False
) -> tuple[list[TensorSpec], Source, dict[str, Any]]:
    """What there is to store, where its bytes come from, and the values. Reads a stored chunk at a time. `model` as of
    `import_checkpoint`. Raises `UsageError` where there is nothing below that key, and `DataCorruption`."""
    files = DcpFiles(source, trust_pickles=trust_pickles)
    metadata = files.read_metadata()
    files.set_up_storage_reader(metadata, is_coordinator=True)
    paths = dict(metadata.planner_data or {})
    names = {name: _new_name(name, paths.get(name), model) for name in metadata.state_dict_metadata}
    if model is not None and not any(new != old for old, new in names.items()):
        keys = sorted({str(path[0]) for path in paths.values() if path})
        raise UsageError(
            f"the state in {source.name} has no model below {model!r}; its keys are {', '.join(keys) or 'none'}"
        )
    specs: list[TensorSpec] = []
    where: dict[str, MetadataIndex] = {}
    objects: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            for spec, index in _chunks(name, names[name], stored):
                specs.append(spec)
                where[spec.name] = index
        elif isinstance(stored, BytesStorageMetadata):
            content = files.object_bytes(MetadataIndex(name))
            is_plain, value = plain_value(content)
            if is_plain:
                values[names[name]] = value
                continue
            tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            specs.append(spec_of(f"{BYTES_PREFIX}{names[name]}", tensor))
            objects[specs[-1].name] = tensor

    def source_of(spec: TensorSpec) -> Iterator[memoryview]:
        tensor = objects[spec.name] if spec.name in objects else files.load_tensor(where[spec.name])
        found = spec_of(spec.name, tensor)
        if (found.dtype, found.shape) != (spec.dtype, spec.shape):
            raise DataCorruption(f"{source.name} holds {spec.name[:80]!r} as {found}, its metadata says {spec}")
        yield bytes_of(tensor.contiguous())

    kept = {names[name]: check_plain(path, "path") for name, path in paths.items() if name in names}
    return specs, source_of, {VALUES_KEY: {"paths": kept if model is None else None, "values": values}}


def _new_name(name: str, path: Any, model: str | None) -> str:
    if model is None or not path or len(path) < 2 or str(path[0]) != model:
        return name
    return MODEL_PREFIX + ".".join(map(str, path[1:]))


def _chunks(name: str, new: str, stored: TensorStorageMetadata) -> Iterator[tuple[TensorSpec, MetadataIndex]]:
    shape = tuple(stored.size)
    dtype = spec_of(new, torch.empty(0, dtype=stored.properties.dtype)).dtype
    for number, chunk in enumerate(stored.chunks):
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        index = MetadataIndex(name, chunk.offsets, number)
        if box == whole(shape):
            yield TensorSpec(new, dtype, shape), index
        else:
            yield TensorSpec(slice_name(new, box), dtype, box.shape, Slice(new, shape, box.offset)), index
