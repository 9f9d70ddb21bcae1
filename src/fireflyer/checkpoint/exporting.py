"""Writes whole tensors of a checkpoint as safetensors files that other programs read, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.base.events import SkippedCheckpoint
from fireflyer.base.ports import Disk
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.blocks import BLOCK_BYTES
from fireflyer.checkpoint.core.exporting import INDEX_FILE, band_boxes, export_names, index_json, plan_export
from fireflyer.checkpoint.core.safetensors import DTYPE_BYTES, TensorSpec, build_header, encode_entries, place
from fireflyer.checkpoint.core.slices import whole
from fireflyer.checkpoint.engine.directory import write_file
from fireflyer.checkpoint.engine.ranges import Request, StoredTensor, TensorReader
from fireflyer.checkpoint.engine.steps import run_steps
from fireflyer.checkpoint.engine.stream import write_stream
from fireflyer.checkpoint.fresh import commit, filling
from fireflyer.checkpoint.reader import open_checkpoint
from fireflyer.checkpoint.storage import CheckpointPath, open_storage

__all__ = ["MAX_FILE_BYTES", "Exported", "export"]

MAX_FILE_BYTES: Final = 5_000_000_000
"""As Hugging Face cuts models."""
_BAND_BYTES: Final = 64 * MIB


class Exported(NamedTuple):
    files: tuple[str, ...]
    tensors: int
    size_bytes: int
    checkpoint: str
    """The name of the one that was read."""
    passed_over: tuple[SkippedCheckpoint, ...]
    """What is newer and cannot be read, newest first."""


def export(
    path: CheckpointPath,
    target: CheckpointPath,
    *,
    prefix: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    disk: Disk | None = None,
) -> Exported:
    """The tensors of the checkpoint `path` (or of the newest in it) as files of a new directory `target`, each tensor
    verified and put together from its slices. `prefix` as of `export_names`. Takes some 150 MiB of memory, or the
    largest tensor where an older release saved it without sums of blocks. Raises `UsageError` for a target that exists,
    `NotFound`, `DataCorruption` and what the disk raises; then there is no `target`."""
    if max_file_bytes < 1:
        raise UsageError(f"max_file_bytes={max_file_bytes} is no size of a file; give 1 or more bytes")
    opened = open_checkpoint(path, disk)
    reader = TensorReader(opened.disk, opened.root, opened.name, opened.manifest)
    stored_name = export_names(reader.tensors, prefix)
    specs = [_spec(name, reader.tensors[stored]) for name, stored in stored_name.items()]
    files = plan_export(specs, max_file_bytes)
    into, root, _ = open_storage(target, disk=disk)
    parent, _, name = root.rpartition("/")

    def source(spec: TensorSpec) -> Iterator[memoryview]:
        return _bands(reader, reader.tensors[stored_name[spec.name]])

    with filling(into, parent or "/", name) as temporary:
        for file in files:
            placed = place(file.tensors)
            header = build_header(encode_entries(placed), {"format": "pt"})
            write_stream(into, f"{parent}/{temporary}/{file.name}", header, placed, source)
        if len(files) > 1:
            run_steps(write_file(into, f"{parent}/{temporary}/{INDEX_FILE}", index_json(files)))
        commit(into, parent or "/", name, temporary)
    size_bytes = sum(spec.size_bytes for spec in specs)
    return Exported(tuple(file.name for file in files), len(specs), size_bytes, opened.name, opened.passed_over)


def _spec(name: str, tensor: StoredTensor) -> TensorSpec:
    return TensorSpec(name, tensor.dtype, tensor.shape)


def _bands(reader: TensorReader, tensor: StoredTensor) -> Iterator[memoryview]:
    """The bytes of a whole tensor, in order, a box at a time."""
    if not tensor.size_bytes:
        return
    element_bytes = DTYPE_BYTES[tensor.dtype]
    # Without sums of blocks a part is verified by reading all of it: once, then.
    in_one = any(part.size_bytes > BLOCK_BYTES and not part.blocks for part in tensor.parts)
    boxes = [whole(tensor.shape)] if in_one else band_boxes(tensor.shape, max(1, _BAND_BYTES // element_bytes))
    buffer = memoryview(b"")
    for box in boxes:
        size_bytes = box.elements * element_bytes
        if len(buffer) < size_bytes:  # the first, as no other is larger
            buffer = memoryview(bytearray(size_bytes))
        target = buffer[:size_bytes]
        reader.read([Request(tensor.name, box, target)])
        yield target
