"""Snapshots of users' directories, environments and logs: what is kept as blobs by their hash.

On the client: `take_snapshot`. In the manager: `SnapshotStore` and `LogStore`, over `Objects` (`open_objects`). On a
node: `NodeCache`, `EnvironmentCache`, `ship_logs`. The decisions are in `cluster.core.objects`.
"""

from fireflyer.cluster.core.objects.collection import Quota, Usage
from fireflyer.cluster.core.objects.manifest import (
    Manifest,
    ManifestLimits,
    decode_manifest,
    encode_manifest,
    files_by_blob,
)
from fireflyer.cluster.objects.directory import DirectoryObjects
from fireflyer.cluster.objects.environments import Environment, EnvironmentCache, check_environment, hold_environment
from fireflyer.cluster.objects.lock_files import MAX_LOCK_BYTES, LockFile
from fireflyer.cluster.objects.log_store import LogStore, RunKey
from fireflyer.cluster.objects.log_tail import ship_logs
from fireflyer.cluster.objects.node_cache import NodeCache
from fireflyer.cluster.objects.port import Objects
from fireflyer.cluster.objects.snapshot import open_pieces, take_snapshot
from fireflyer.cluster.objects.snapshot_store import SnapshotStore
from fireflyer.cluster.objects.stat_cache import StatCache
from fireflyer.cluster.objects.url import UrlObjects, open_objects
from fireflyer.cluster.schema.logs import LogAnswer, LogChunk, LogEnd

__all__ = [
    "MAX_LOCK_BYTES",
    "DirectoryObjects",
    "Environment",
    "EnvironmentCache",
    "LockFile",
    "LogAnswer",
    "LogChunk",
    "LogEnd",
    "LogStore",
    "Manifest",
    "ManifestLimits",
    "NodeCache",
    "Objects",
    "Quota",
    "RunKey",
    "SnapshotStore",
    "StatCache",
    "UrlObjects",
    "Usage",
    "check_environment",
    "decode_manifest",
    "encode_manifest",
    "files_by_blob",
    "hold_environment",
    "open_objects",
    "open_pieces",
    "ship_logs",
    "take_snapshot",
]
