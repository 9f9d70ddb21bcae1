"""What is in a checkpoint: the manifest and the job's plan, as files that prove themselves.

Both files are JSON of the form `{"crc32c": "1a2b3c4d", "body": {…}}`; the checksum is CRC32C over the exact bytes of
the body. `decode_*` take bytes from a disk that may hold anything: sizes are bounded, every number is checked, and what
comes out is safe to act upon: file names are ours, tensors lie inside their file and do not overlap.
A body of a newer `version` is refused; unknown fields of the same version are ignored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.checkpoint.core.blocks import BLOCK_BYTES
from fireflyer.checkpoint.core.names import MAX_RANKS, MAX_STEP, shard_name
from fireflyer.checkpoint.core.safetensors import DTYPE_BYTES, MAX_HEADER_BYTES, TensorSpec
from fireflyer.checkpoint.core.slices import Box, Slice, covers, slice_name
from fireflyer.native import crc32c

__all__ = [
    "FORMAT_VERSION",
    "MAX_MANIFEST_BYTES",
    "MAX_SHARD_BYTES",
    "SLICED_VERSION",
    "Manifest",
    "PlanRecord",
    "Saved",
    "ShardRecord",
    "TensorRecord",
    "check_listed",
    "check_manifest",
    "continue_plans",
    "decode_job_plan",
    "decode_manifest",
    "decode_record",
    "encode_job_plan",
    "encode_manifest",
    "encode_record",
    "plans_of",
    "version_of",
]

FORMAT_VERSION = 1
SLICED_VERSION = 2
"""Of a checkpoint in which a tensor is stored as slices: releases that read version 1 alone cannot load it."""
MAX_MANIFEST_BYTES = 256 << 20
MAX_SHARD_BYTES = 1 << 50
MAX_DIMENSIONS = 64
MAX_PLANS = 1000
"""A job that changed more often forgets the oldest."""
_MAX_CRC32C = (1 << 32) - 1

T = TypeVar("T")


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the start of the file, in bytes."""
    size_bytes: int
    crc32c: int
    blocks: tuple[int, ...] = ()
    """CRC32C of each `BLOCK_BYTES` of it, where it is larger than that: what verifies a part of it. Releases that wrote
    none did so for all tensors."""
    slice: Slice | None = None
    """Of what it is a slice, if it is one."""

    @property
    def whole_name(self) -> str:
        """Of the tensor that it is, or is a slice of."""
        return self.name if self.slice is None else self.slice.of

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.slice is None else self.slice.shape

    @property
    def box(self) -> Box:
        """What it is of the whole tensor."""
        return Box((0,) * len(self.shape) if self.slice is None else self.slice.offset, self.shape)


class ShardRecord(msgspec.Struct, frozen=True):
    """One shard file, as its writer saw it. Tensors are in the order of the file and fill it up to its end."""

    rank: int
    file: str
    file_bytes: int
    header_bytes: int
    header_crc32c: int
    layout: int
    """Digest of the list of shared tensors that the writer had."""
    tensors: tuple[TensorRecord, ...]


class PlanRecord(msgspec.Struct, frozen=True):
    """Number of ranks with which the job went on from `step`, the first that they did, and by which plan."""

    step: int
    world_size: int
    plan: dict[str, Any] = {}
    """Parallel plan as the script gave it; plain values."""


class Saved(msgspec.Struct, frozen=True):
    """When and by whom a checkpoint was saved; for people, nothing is decided by it."""

    at: str = ""
    """UTC, as 2026-01-31T12:00:00Z, by the clock of rank 0."""
    user: str = ""
    host: str = ""
    program: str = ""


class Manifest(msgspec.Struct, frozen=True):
    version: int
    step: int
    attempt: int
    world_size: int
    shards: tuple[ShardRecord, ...]
    """One per rank, in order of rank."""
    values: dict[str, Any]
    job_plan: dict[str, Any] | None = None
    plans: tuple[PlanRecord, ...] = ()
    """From the job's first step to this one. Empty: written by a release that did not record them."""
    saved: Saved | None = None
    """None: written by a release that did not record it."""


class _Envelope(msgspec.Struct, frozen=True):
    crc32c: str
    body: msgspec.Raw


class _JobBody(msgspec.Struct, frozen=True):
    version: int
    job_plan: dict[str, Any]


def _seal(body: bytes) -> bytes:
    return b'{"crc32c":"%08x","body":%b}\n' % (crc32c(body), body)


def _unseal(data: bytes, kind: type[T], what: str) -> T:
    if len(data) > MAX_MANIFEST_BYTES:
        raise DataCorruption(f"{what} has {len(data)} bytes, above {MAX_MANIFEST_BYTES}")
    try:
        envelope = decode_json(data, _Envelope)
        body = bytes(envelope.body)
        if envelope.crc32c != f"{crc32c(body):08x}":
            raise DataCorruption(f"{what} does not match its checksum")
        return decode_json(body, kind)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{what} is not readable: {error}") from error


def encode_manifest(manifest: Manifest) -> bytes:
    """Raises `UsageError` for what would be too long to be read again."""
    body = msgspec.structs.asdict(manifest)
    if not manifest.plans:
        del body["plans"]  # as it is in checkpoints of releases that recorded none
    if manifest.saved is None:
        del body["saved"]
    data = _seal(msgspec.json.encode(body))
    if len(data) > MAX_MANIFEST_BYTES:
        if 2 * len(msgspec.json.encode(manifest.values)) < len(data):
            raise _too_many(sum(len(shard.tensors) for shard in manifest.shards), len(data))
        raise UsageError(
            f"the manifest has {len(data)} bytes, above {MAX_MANIFEST_BYTES}; keep long lists of values as tensors"
        )
    return data


def check_listed(specs: Iterable[tuple[TensorSpec, int]]) -> None:
    """Raises `UsageError` where a manifest cannot list these tensors and slices, each so many times (slices of one
    tensor are alike): before anything is written. What is as long as it may be is found by `encode_manifest` alone."""
    count, size_bytes = 0, 0
    for spec, times in specs:
        record = TensorRecord(spec.name, spec.dtype, spec.shape, 0, spec.size_bytes, 0, (), spec.slice)
        count += times
        size_bytes += times * len(msgspec.json.encode(record))
    if size_bytes > MAX_MANIFEST_BYTES:
        raise _too_many(count, size_bytes)


def _too_many(count: int, size_bytes: int) -> UsageError:
    return UsageError(
        f"the manifest of {count} tensors and slices of tensors has {size_bytes} bytes or more, above "
        f"{MAX_MANIFEST_BYTES}; shard over fewer ranks, with replicas beside them (hybrid sharding): each slice is "
        "listed once"
    )


def decode_manifest(data: bytes, what: str = "manifest.json") -> Manifest:
    """Raises `DataCorruption` naming what is wrong."""
    manifest = _unseal(data, Manifest, what)
    check_manifest(manifest, what)
    return manifest


def check_manifest(manifest: Manifest, what: str = "manifest.json") -> None:
    """Whether `decode_manifest` would take it. Raises `DataCorruption` naming what is wrong."""
    if manifest.version not in (FORMAT_VERSION, SLICED_VERSION):
        known = f"{FORMAT_VERSION} and {SLICED_VERSION}"
        raise DataCorruption(f"{what} has format version {manifest.version}; this program reads {known}")
    if manifest.version != version_of(manifest.shards):
        raise DataCorruption(f"{what} has format version {manifest.version}, which its tensors do not have")
    if not 0 <= manifest.step <= MAX_STEP or not 0 < manifest.world_size <= MAX_RANKS:
        raise DataCorruption(f"{what} names step {manifest.step} of {manifest.world_size} ranks, which is out of range")
    if [shard.rank for shard in manifest.shards] != list(range(manifest.world_size)):
        raise DataCorruption(f"{what} does not list one shard for each of {manifest.world_size} ranks")
    _check_plans(manifest, what)
    for shard in manifest.shards:
        _check_record(shard, manifest.world_size, what)
    _check_names(manifest, what)
    _check_slices(manifest, what)


def _check_names(manifest: Manifest, what: str) -> None:
    names = [tensor.name for shard in manifest.shards for tensor in shard.tensors]
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise DataCorruption(f"{what} lists tensor {twice[:80]!r} twice")


def version_of(shards: Iterable[ShardRecord]) -> int:
    """The format version that a manifest of `shards` has."""
    sliced = any(tensor.slice is not None for shard in shards for tensor in shard.tensors)
    return SLICED_VERSION if sliced else FORMAT_VERSION


def _check_slices(manifest: Manifest, what: str) -> None:
    """All slices of a tensor are of the same tensor, and are all of it."""
    if manifest.version == FORMAT_VERSION:  # it has no slices
        return
    parts: dict[str, list[TensorRecord]] = {}
    for shard in manifest.shards:
        for tensor in shard.tensors:
            if tensor.slice is not None:
                parts.setdefault(tensor.slice.of, []).append(tensor)
    plain = {tensor.name: None for shard in manifest.shards for tensor in shard.tensors if tensor.slice is None}
    for name, records in parts.items():
        if name in plain or len({(record.dtype, record.whole_shape) for record in records}) > 1:
            raise DataCorruption(f"{what} describes tensor {name[:80]!r} in two ways")
        if not covers((record.box for record in records), records[0].whole_shape):
            raise DataCorruption(f"{what} lists slices that are not all of tensor {name[:80]!r}, or overlap")


def _check_plans(manifest: Manifest, what: str) -> None:
    steps = [record.step for record in manifest.plans]
    in_range = all(0 <= step <= MAX_STEP + 1 for step in steps) and all(
        0 < record.world_size <= MAX_RANKS for record in manifest.plans
    )
    if len(steps) > MAX_PLANS or steps != sorted(steps) or not in_range:
        raise DataCorruption(f"{what} lists {len(steps)} plans that are out of range or out of order")
    if manifest.plans and manifest.plans[-1].world_size != manifest.world_size:
        raise DataCorruption(f"{what} is of {manifest.world_size} ranks, and its last plan is of another number")


def plans_of(manifest: Manifest) -> tuple[PlanRecord, ...]:
    """Also of a manifest that records none: there the last one is known to have held at its step."""
    return manifest.plans or (PlanRecord(manifest.step, manifest.world_size, manifest.job_plan or {}),)


def continue_plans(plans: tuple[PlanRecord, ...], now: PlanRecord) -> tuple[PlanRecord, ...]:
    """With the plan that holds now, where it is another one than the last."""
    if plans and (plans[-1].world_size, plans[-1].plan) == (now.world_size, now.plan):
        return plans
    return (*plans, now)[-MAX_PLANS:]


def encode_record(record: ShardRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_record(data: bytes, rank: int, world_size: int) -> ShardRecord:
    """A record from another rank. Raises `DataCorruption`."""
    what = f"shard record of rank {rank}"
    try:
        record = decode_json(data, ShardRecord)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{what} is not readable: {error}") from error
    if record.rank != rank:
        raise DataCorruption(f"{what} names rank {record.rank}")
    _check_record(record, world_size, what)
    return record


def _check_record(shard: ShardRecord, world_size: int, what: str) -> None:
    if shard.file != shard_name(shard.rank, world_size):
        raise DataCorruption(f"{what} names file {shard.file[:80]!r} for rank {shard.rank}")
    if not 8 <= shard.header_bytes <= MAX_HEADER_BYTES + 8 or not 0 <= shard.file_bytes <= MAX_SHARD_BYTES:
        raise DataCorruption(f"{what} gives {shard.file} sizes that are out of range")
    if not 0 <= shard.header_crc32c <= _MAX_CRC32C:
        raise DataCorruption(f"{what} gives the header of {shard.file} a checksum that is out of range")
    end = shard.header_bytes
    known: dict[
        tuple[str, tuple[int, ...]], int
    ] = {}  # most tensors of a model have a dtype and shape that others have
    for tensor in shard.tensors:
        kind = (tensor.dtype, tensor.shape)
        size_bytes = known.get(kind)
        if size_bytes is None:
            size_bytes = known[kind] = _checked_size(tensor, what)
        if tensor.size_bytes != size_bytes or tensor.offset != end:
            raise DataCorruption(f"{what} gives tensor {tensor.name[:80]!r} an invalid offset or size")
        if not 0 <= tensor.crc32c <= _MAX_CRC32C:
            raise DataCorruption(f"{what} gives tensor {tensor.name[:80]!r} a checksum that is out of range")
        if tensor.blocks or tensor.slice is not None:
            _check_parts(tensor, what)
        end += size_bytes
    if end != shard.file_bytes:
        raise DataCorruption(f"{what} gives {shard.file} {shard.file_bytes} bytes, its tensors need {end}")


def _checked_size(tensor: TensorRecord, what: str) -> int:
    """In bytes, by dtype and shape, which are checked."""
    element_bytes = DTYPE_BYTES.get(tensor.dtype)
    if element_bytes is None or len(tensor.shape) > MAX_DIMENSIONS or min(tensor.shape, default=0) < 0:
        raise DataCorruption(f"{what} gives tensor {tensor.name[:80]!r} an unknown dtype or an invalid shape")
    # Of an empty tensor the other dims count too: torch cannot have strides that overflow.
    if math.prod(max(1, size) for size in tensor.shape) * element_bytes > MAX_SHARD_BYTES:
        raise DataCorruption(f"{what} describes tensor {tensor.name[:80]!r}, which is out of range")
    return math.prod(tensor.shape) * element_bytes


def _check_parts(tensor: TensorRecord, what: str) -> None:
    """Its blocks, and what it is a slice of."""
    if len(tensor.blocks) not in (0, -(-tensor.size_bytes // BLOCK_BYTES)) or len(tensor.blocks) == 1:
        raise DataCorruption(f"{what} gives tensor {tensor.name[:80]!r} {len(tensor.blocks)} sums of blocks")
    if min(tensor.blocks, default=0) < 0 or max(tensor.blocks, default=0) > _MAX_CRC32C:
        raise DataCorruption(f"{what} gives tensor {tensor.name[:80]!r} a checksum that is out of range")
    part = tensor.slice
    if part is None:
        return
    ranks = {len(part.offset), len(part.shape), len(tensor.shape)}
    if len(ranks) > 1 or min((*part.offset, *part.shape), default=0) < 0:
        raise DataCorruption(f"{what} says of tensor {tensor.name[:80]!r} that it is a slice, which is invalid")
    if math.prod(max(1, size) for size in part.shape) * DTYPE_BYTES[tensor.dtype] > MAX_SHARD_BYTES:
        raise DataCorruption(f"{what} describes tensor {part.of[:80]!r}, which is out of range")
    if tensor.name != slice_name(part.of, tensor.box):
        raise DataCorruption(f"{what} calls a slice of {part.of[:80]!r} {tensor.name[:80]!r}")


def encode_job_plan(job_plan: Mapping[str, Any]) -> bytes:
    return _seal(msgspec.json.encode(_JobBody(FORMAT_VERSION, dict(job_plan))))


def decode_job_plan(data: bytes, what: str = "job.json") -> dict[str, Any]:
    """Raises `DataCorruption`."""
    body = _unseal(data, _JobBody, what)
    if body.version != FORMAT_VERSION:
        raise DataCorruption(f"{what} has format version {body.version}; this program reads {FORMAT_VERSION}")
    return body.job_plan
