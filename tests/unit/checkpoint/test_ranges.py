"""Reads of parts of stored tensors: what is read, what is verified, and which manifests are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.support.checkpoints.counting import Counting
from tests.support.checkpoints.states import flip

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.checkpoint.core.blocks import BLOCK_BYTES
from fireflyer.checkpoint.core.manifest import (
    Manifest,
    TensorRecord,
    decode_manifest,
    encode_manifest,
    version_of,
)
from fireflyer.checkpoint.core.names import shard_name
from fireflyer.checkpoint.core.safetensors import TensorSpec, place
from fireflyer.checkpoint.core.slices import Box, Slice, slice_name
from fireflyer.checkpoint.engine.image import header_of
from fireflyer.checkpoint.engine.ranges import Request, TensorReader
from fireflyer.checkpoint.engine.stream import write_stream
from fireflyer.checkpoint.tensors import bytes_of
from fireflyer.runtime.disk import RealDisk

ROWS = 3 * BLOCK_BYTES // 1024
"""Of 1 KiB each: a slice of half of them has one and a half blocks."""


def tensor() -> torch.Tensor:
    return torch.arange(ROWS * 256, dtype=torch.int32).view(ROWS, 256)


def stored(directory: Path) -> Manifest:
    """A tensor in two slices of rows, one in the shard of each rank."""
    records = []
    (directory / "c").mkdir(parents=True)
    for rank, begin in enumerate((0, ROWS // 2)):
        box = Box((begin, 0), (ROWS // 2, 256))
        spec = TensorSpec(slice_name("w", box), "I32", box.shape, Slice("w", (ROWS, 256), box.offset, (2,), ("S(0)",)))
        part = tensor()[begin : begin + ROWS // 2].contiguous()
        placed = place([spec])
        header = header_of(placed, step=1, rank=rank)
        path = f"{directory}/c/{shard_name(rank, 2)}"
        records.append(
            write_stream(RealDisk(), path, header, placed, lambda _, part=part: [bytes_of(part)], rank=rank)  # type: ignore[misc]
        )
    return Manifest(version_of(records), 1, 0, 2, tuple(records), {})


def read(directory: Path, manifest: Manifest, rows: slice, disk: RealDisk | None = None) -> torch.Tensor:
    found = torch.full((rows.stop - rows.start, 256), -1, dtype=torch.int32)
    box = Box((rows.start, 0), tuple(found.shape))
    TensorReader(disk or RealDisk(), str(directory), "c", manifest).read([Request("w", box, bytes_of(found))])
    return found


def test_a_part_is_read_by_its_blocks_and_files_without_it_are_not_opened(tmp_path: Path) -> None:
    manifest = stored(tmp_path)
    assert manifest.version == 2
    disk = Counting()
    assert torch.equal(read(tmp_path, manifest, slice(3, 9), disk), tensor()[3:9])
    assert disk.opened == 1
    assert BLOCK_BYTES <= disk.read_bytes <= BLOCK_BYTES + 8192, "the first block of the first slice"

    across = slice(ROWS // 2 - 2, ROWS // 2 + 2)
    disk = Counting()
    assert torch.equal(read(tmp_path, manifest, across, disk), tensor()[across])
    assert disk.opened == 2
    assert disk.read_bytes <= 3 * BLOCK_BYTES // 2 + 2 * 8192, "the last half block of one, the first of the other"
    assert torch.equal(read(tmp_path, manifest, slice(0, ROWS)), tensor())


def test_one_wrong_bit_in_a_block_that_is_read_is_refused(tmp_path: Path) -> None:
    manifest = stored(tmp_path)
    first = manifest.shards[0].tensors[0]
    flip(tmp_path / "c" / shard_name(0, 2), first.offset + 5 * 1024 + 3)
    with pytest.raises(DataCorruption, match=r"tensor 'w\[0:\d+,0:256\]' in .*shard-00000-of-00002"):
        read(tmp_path, manifest, slice(3, 9))
    with pytest.raises(DataCorruption):
        read(tmp_path, manifest, slice(10, 12))
    below = slice(BLOCK_BYTES // 1024, BLOCK_BYTES // 1024 + 4)
    assert torch.equal(read(tmp_path, manifest, below), tensor()[below]), "another block is whole"


def test_what_is_no_part_of_a_tensor_is_refused(tmp_path: Path) -> None:
    manifest = stored(tmp_path)
    reader = TensorReader(RealDisk(), str(tmp_path), "c", manifest)
    row = memoryview(bytearray(1024))
    with pytest.raises(NotFound, match="has no tensor 'v'"):
        reader.read([Request("v", Box((0, 0), (1, 256)), row)])
    for box in (Box((ROWS, 0), (1, 256)), Box((-1, 0), (1, 256)), Box((0,), (256,)), Box((0, 1), (1, 256))):
        with pytest.raises(UsageError, match="is no part of 'w'"):
            reader.read([Request("w", box, row)])
    with pytest.raises(UsageError, match="1024 bytes are not those of"):
        reader.read([Request("w", Box((0, 0), (2, 256)), row)])


def changed(manifest: Manifest, **changes: Any) -> Manifest:
    """With other fields in the first tensor of the first shard, or in its slice (`part`)."""
    shard = manifest.shards[0]
    record: TensorRecord = shard.tensors[0]
    if (part := changes.pop("part", None)) is not None and record.slice is not None:
        record = msgspec.structs.replace(record, slice=msgspec.structs.replace(record.slice, **part))
    record = msgspec.structs.replace(record, **changes)
    first = msgspec.structs.replace(shard, tensors=(record,))
    return msgspec.structs.replace(manifest, shards=(first, *manifest.shards[1:]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"part": {"offset": (1, 0)}}, "calls a slice of 'w'"),
        ({"part": {"offset": (0,)}}, "is invalid"),
        ({"part": {"offset": (-1, 0)}}, "is invalid"),
        ({"part": {"of": "v"}}, "calls a slice of 'v'"),
        ({"part": {"of": "v"}, "name": f"v[0:{ROWS // 2},0:256]"}, "slices that are not all of tensor 'v'"),
        ({"part": {"offset": (1, 0)}, "name": f"w[1:{ROWS // 2 + 1},0:256]"}, "or overlap"),
        ({"part": {"shape": (ROWS + 1, 256)}}, "in two ways"),
        ({"part": {"shape": (1 << 60, 256)}}, "out of range"),
        ({"blocks": (1,)}, "sums of blocks"),
        ({"blocks": (1, 2, 3)}, "sums of blocks"),
        ({"blocks": (-1, 2)}, "checksum that is out of range"),
        ({"blocks": (1, 1 << 32)}, "checksum that is out of range"),
        ({"slice": None, "name": "w"}, "in two ways"),
    ],
)
def test_a_manifest_with_slices_that_cannot_be_is_refused(tmp_path: Path, changes: Any, reason: str) -> None:
    manifest = stored(tmp_path)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    with pytest.raises(DataCorruption, match=reason):
        decode_manifest(encode_manifest(changed(manifest, **changes)))


def test_the_version_says_whether_there_are_slices(tmp_path: Path) -> None:
    manifest = stored(tmp_path)
    with pytest.raises(DataCorruption, match="format version 1, which its tensors do not have"):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest, version=1)))
