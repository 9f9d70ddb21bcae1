"""Makes a checkpoint of ours from one of DCP's own format, or from safetensors files such as Hugging Face's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
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
_MAX_INDEX_BYTES: Final = 128 * MIB
_ONE_OF_SEVERAL: Final = re.compile(r"(.*)-([0-9]{1,10})-of-([0-9]{1,10})\.safetensors", re.DOTALL)


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

    Of a directory with `model.safetensors.index.json` the files that it names are taken, and no others.

    Raises `NotFound`, also where a file of several (`model-00002-of-00003.safetensors`) is missing, `UsageError` for a
    step that is there, `DataCorruption` for files that cannot be read; nothing in them is trusted, but what they lack
    are checksums, so damage within a tensor goes unnoticed."""
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
    weight_map = _weight_map(source)
    content = _of_files(source.disk, _files(source, weight_map), prefix)
    there = {spec.name for spec in content.specs}
    for name, file in weight_map.items():
        if prefix + name not in there:
            raise DataCorruption(f"{source.name} has no tensor {name[:80]!r}, which should be in {file[:200]!r}")
    return content


def _files(source: Storage, weight_map: Mapping[str, str]) -> list[str]:
    """All of one model. Raises `NotFound` where some are missing."""
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
    # Beside the files that an index names may be the same model once more (`consolidated.safetensors`).
    chosen = {*weight_map.values()} if weight_map else {*names}
    missing = min(chosen - {*names}, default=None) if weight_map else _missing(names)
    if missing is not None:
        raise NotFound(f"{shown} has no {missing[:200]!r}, which belongs to the files there; download what is missing")
    return [f"{root}/{name}" for name in names if name in chosen]


class _Index(msgspec.Struct, frozen=True):
    """Of `model.safetensors.index.json`."""

    weight_map: dict[str, str]


def _weight_map(source: Storage) -> dict[str, str]:
    """The file of each tensor, as the index of the directory says; empty where there is none. Nothing in it is trusted:
    the names may be any."""
    path = f"{source.root}/{INDEX_FILE}"
    if not source.disk.exists(path):
        return {}
    with contextlib.closing(source.disk.open(path)) as file:
        size = file.size()
        if size > _MAX_INDEX_BYTES:
            raise DataCorruption(f"{path} has {size} bytes, above {_MAX_INDEX_BYTES}")
        content = file.pread(size, 0)
    try:
        found = decode_json(content, _Index).weight_map
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{path} is not readable: {error}") from error
    if not found:
        raise DataCorruption(f"{path} names no tensors")
    return found


def _missing(names: Iterable[str]) -> str | None:
    """Of files that are called one of several, the first that is not there."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = _ONE_OF_SEVERAL.fullmatch(name)
        if match is not None:
            numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, count), found in numbers.items():
        first = 0 if 0 in found else 1  # as Hugging Face counts, or as we do
        for number in range(first, first + int(count)):
            if number not in found:
                return f"{stem}-{number:0{len(count)}}-of-{count}.safetensors"
    return None


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
