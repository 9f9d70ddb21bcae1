"""What a storage process is told when it starts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fireflyer.base.units import GIB, MIB
from fireflyer.fs.schema.manager import MAX_TARGETS_PER_NODE

__all__ = ["StorageConfig", "StorageTarget"]

_Port = Annotated[int, msgspec.Meta(ge=0, lt=65536)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=256)]
_RealNode = Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)]
_RealTarget = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


class StorageTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`directory` must have been made for this target (`target_directory.make_target`)."""

    id: _RealTarget
    directory: str
    capacity_bytes: _Bytes = 0
    """For all chunks; 0: what the disk has."""


class StorageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    cluster: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    node: _RealNode
    managers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=64)]
    targets: Annotated[tuple[StorageTarget, ...], msgspec.Meta(min_length=1, max_length=MAX_TARGETS_PER_NODE)]
    secret_file: str
    tokens_file: str = ""
    """Not read: managers are asked for users. Earlier releases had them in this file."""
    host: str = "127.0.0.1"
    port: _Port = 0
    """0: any free one."""
    advertise: str = ""
    """The host name under which others reach this process; `host` where it is empty."""
    reserve: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.05
    """Share of each disk that is left free,"""
    reserve_at_most_bytes: _Bytes = 16 * GIB
    """and of a large one no more than this."""
    root_disk: bool = False
    """New targets may be made in the file system of `/`. Without it they are not, because the mount point of a disk
    that is not mounted is there."""
    durable: bool = True
    """False: what was acknowledged may be lost in a power cut, and the target says that it is not clean."""
    io_threads: _Count = 4
    job_threads: _Count = 4
    """Of each target."""
    cold_reads: Literal["kernel", "threads"] = "kernel"
    """Who fetches what is not in the page cache: the kernel (io_uring; threads where it does not), or threads."""
    buffer_bytes: Annotated[int, msgspec.Meta(ge=128 * MIB)] = 512 * MIB
    """For data that are being received and answers that are not read. Users share half of it: a user gets more while
    they have less than is free."""
    unread_s: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 60
    """Who takes less than 64 KiB of their answers in this time, while more wait, is cut off."""
    scrub_bytes_per_s: _Bytes = 16 * MIB
    """Of each target; 0: no scrub."""
    scrub_rest_s: Annotated[int, msgspec.Meta(ge=1, le=30 * 24 * 3600)] = 600
    """Between two of its passes."""
    metrics_listen: str = ""
    """host:port of an HTTP endpoint for Prometheus, open to whoever reaches it; empty: none."""
