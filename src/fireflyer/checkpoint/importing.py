"""Makes a checkpoint of ours from one of DCP's own format, or from safetensors files such as Hugging Face's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.base.ports import Disk
from fireflyer.base.units import MIB
from fireflyer.checkpoint.core.exporting import INDEX_FILE
from fireflyer.checkpoint.core.manifest import Manifest, version_of
from fireflyer.checkpoint.core.names import MAX_STEP, candidates, final_name, shard_name
from fireflyer.checkpoint.core.safetensors import MAX_HEADER_BYTES, TensorSpec, parse_header, place
from fireflyer.checkpoint.engine.image import header_of
from fireflyer.checkpoint.engine.stream import Source, write_stream
from fireflyer.checkpoint.fresh import commit_manifest, filling
from fireflyer.checkpoint.saved import saved_now
from fireflyer.checkpoint.storage import CheckpointPath, Storage, open_storage

__all__ = ["Imported", "import_checkpoint"]

_PIECE_BYTES: Final = 16 * MIB


class Imported(NamedTuple):
    name: str
    tensors: int
    size_bytes: int


class Content(NamedTuple):
    """What is to become a checkpoint."""

    specs: list[TensorSpec]
    source: Source
    values: dict[str, Any]


def import_checkpoint(
    source: CheckpointPath,
    directory: CheckpointPath,
    *,
    step: int,
    prefix: str = "",
    model: str | None = None,
    trust_pickles: bool = False,
    disk: Disk | None = None,
) -> Imported:
    """Makes `directory`/step-… from `source`: a directory that DCP's `FileSystemWriter` wrote, or a safetensors file or
    a directory of them; both paths as of `open_storage`. Its name is returned. A checkpoint of DCP keeps its names, so
    that `dcp.load` takes the new one for the old; with `model`, the key of the model in the nested state that was
    saved, its tensors get the names that `capture` gives (`model/…`), for `TrainingLoop`. Tensors of other files get
    `prefix` before their names.

    Raises `NotFound`, `UsageError` for a step that is there, `DataCorruption` for files that cannot be read; nothing in
    them is trusted, but what they lack are checksums, so damage within a tensor goes unnoticed."""
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"step {step} is out of range; it must be between 0 and {MAX_STEP}")
    content = _content(open_storage(source, disk=disk), prefix, model, trust_pickles)
    into, root, shown = open_storage(directory, disk=disk)
    name = final_name(step, [])
    if any(candidate.step == step for candidate in candidates(into.list(root) if into.is_dir(root) else [])):
        raise UsageError(f"{shown} has a checkpoint of step {step} already; give another --step")
    placed = place(content.specs)
    header = header_of(placed, step=step, rank=0)
    with filling(into, root, name) as temporary:
        record = write_stream(into, f"{root}/{temporary}/{shard_name(0, 1)}", header, placed, content.source)
        manifest = Manifest(version_of([record]), step, 0, 1, (record,), content.values, saved=saved_now())
        commit_manifest(into, root, name, temporary, manifest)
    return Imported(name, len(content.specs), record.file_bytes)


def _content(source: Storage, prefix: str, model: str | None, trust_pickles: bool) -> Content:
    if source.disk.exists(f"{source.root}/.metadata"):
        if prefix:
            raise UsageError("a checkpoint of DCP keeps its names; --prefix is for safetensors files")
        from fireflyer.checkpoint.dcp.conversion import dcp_content

        return Content(*dcp_content(source, model, trust_pickles=trust_pickles))
    if model is not None:
        raise UsageError(f"{source.name} is no checkpoint of DCP (it has no .metadata); --model is for those")
    return _of_files(source.disk, _files(source), prefix)


def _files(source: Storage) -> list[str]:
    disk, root, shown = source
    if not disk.is_dir(root):
        if disk.exists(root):
            return [root]
        raise NotFound(f"{shown} does not exist; give a checkpoint of DCP, a safetensors file, or a directory of them")
    names = [name for name in disk.list(root) if name.endswith(".safetensors") and not name.startswith(".")]
    if not names:
        raise UsageError(
            f"{shown} holds no checkpoint of DCP (.metadata) and no *.safetensors; {INDEX_FILE} alone is none"
        )
    return [f"{root}/{name}" for name in names]


class _Place(NamedTuple):
    path: str
    offset: int
    """In the file."""


def _of_files(disk: Disk, paths: list[str], prefix: str) -> Content:
    places: dict[str, _Place] = {}
    specs: list[TensorSpec] = []
    for path in paths:
        for spec, offset in _read_header(disk, path):
            name = prefix + spec.name
            if name in places:
                raise UsageError(f"{path} and {places[name].path} both have a tensor {spec.name[:80]!r}")
            places[name] = _Place(path, offset)
            specs.append(TensorSpec(name, spec.dtype, spec.shape))

    def source(spec: TensorSpec) -> Iterator[memoryview]:
        return _pieces(disk, places[spec.name], spec.size_bytes)

    return Content(specs, source, {})


def _read_header(disk: Disk, path: str) -> list[tuple[TensorSpec, int]]:
    """The tensors of a file, and where in it they begin."""
    with contextlib.closing(disk.open(path)) as file:
        size = file.size()
        length = int.from_bytes(file.pread(8, 0), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise DataCorruption(f"{path} is no safetensors file: its header would have {length} bytes")
        text = file.pread(length, 8)
    begin = 8 + length
    return [(item.spec, begin + item.offset) for item in parse_header(text, size - begin, path)]


def _pieces(disk: Disk, place: _Place, size_bytes: int) -> Iterator[memoryview]:
    with contextlib.closing(disk.open(place.path)) as file:
        done = 0
        while done < size_bytes:
            piece = file.pread(min(size_bytes - done, _PIECE_BYTES), place.offset + done)
            if not piece:
                raise DataCorruption(f"{place.path} ends within a tensor")
            done += len(piece)
            yield memoryview(piece)
