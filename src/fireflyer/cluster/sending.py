"""Sends a directory to the platform before the task that names it.

sent = send_directory(client, "/home/ada/experiment")
client.submit(TaskSpec(name="train", program=Program(script="train.py", snapshot=sent.snapshot)), key="train-1")
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.units import MIB
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.objects.blobs import hash_of
from fireflyer.cluster.core.objects.frames import HEADER_BYTES, frame_header
from fireflyer.cluster.core.objects.manifest import FileEntry, Manifest, encode_manifest, files_by_blob
from fireflyer.cluster.objects import StatCache, open_pieces, take_snapshot

__all__ = ["Sent", "SnapshotOf", "batches", "default_cache_directory", "send_directory", "snapshot_of"]

BATCH_BYTES: Final = 64 * MIB
BATCH_BLOBS: Final = 512
"""Most blobs in one request, so that one that fails is little to send again."""


class SnapshotOf(NamedTuple):
    directory: str
    snapshot: str
    manifest: Manifest
    encoded: bytes


class Sent(NamedTuple):
    snapshot: str
    files: int
    size_bytes: int
    sent_files: int
    """Distinct contents that were not there already."""
    sent_bytes: int


def default_cache_directory() -> str:
    """Directory in which hashes of unchanged files are kept: below XDG_CACHE_HOME, by default ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "fireflyer", "snapshots")


def snapshot_of(directory: str, *, cache_directory: str = "") -> SnapshotOf:
    """Files that have not changed since the last time are not read again where there is a cache. Raises `UsageError`
    for what cannot be in a snapshot, `Busy` for a file that is being written, `NotFound`, `PermissionDenied`."""
    directory = os.path.abspath(directory)
    try:
        cache = StatCache.below(cache_directory, directory) if cache_directory else None
    except OSError:
        cache = None  # a home that cannot be written: all files are read
    manifest = take_snapshot(directory, cache=cache)
    encoded = encode_manifest(manifest)
    return SnapshotOf(directory, hash_of(encoded), manifest, encoded)


def send_directory(client: Client, found: SnapshotOf) -> Sent:
    """Send what the platform does not have yet, then seal the snapshot. Raises what `Client` raises, and `UsageError`
    for a file that changed meanwhile."""
    files = files_by_blob(found.manifest)
    missing = client.begin_snapshot(found.snapshot, found.encoded)
    wanted = {blob: files[blob] for blob in missing if blob in files}
    if len(wanted) < len(set(missing) - {found.snapshot}):
        raise DataCorruption("the platform asks for blobs that are not in the snapshot; update one of both")
    for batch in batches(wanted):
        size_bytes = sum(HEADER_BYTES + entry.size_bytes for entry in batch)
        client.send_blobs(found.snapshot, size_bytes, partial(_frames, found.directory, batch))
    client.seal_snapshot(found.snapshot)
    entries = [entry for entry in found.manifest.entries if isinstance(entry, FileEntry)]
    sent_bytes = sum(entry.size_bytes for entry in wanted.values())
    return Sent(found.snapshot, len(entries), found.manifest.size_bytes, len(wanted), sent_bytes)


def batches(
    wanted: Mapping[str, FileEntry], max_bytes: int = BATCH_BYTES, max_blobs: int = BATCH_BLOBS
) -> Iterator[list[FileEntry]]:
    """Divide `wanted` into batches, in its order; a file that is larger is one by itself. Pure."""
    batch: list[FileEntry] = []
    size_bytes = 0
    for entry in wanted.values():
        if batch and (size_bytes + entry.size_bytes > max_bytes or len(batch) >= max_blobs):
            yield batch
            batch, size_bytes = [], 0
        batch.append(entry)
        size_bytes += entry.size_bytes
    if batch:
        yield batch


def _frames(directory: str, batch: Iterable[FileEntry]) -> Iterator[bytes]:
    """Exactly as many bytes as were announced. Raises `UsageError` for a file that has changed."""
    for entry in batch:
        yield frame_header(entry.blob, entry.size_bytes)
        left = entry.size_bytes
        for piece in open_pieces(directory, entry.path):
            left -= len(piece)
            if left < 0:
                break
            yield piece
        if left:
            raise UsageError(f"{entry.path} changed while it was sent; submit again when it is complete")
