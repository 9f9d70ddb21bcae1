"""Snapshots of users' directories, environments and logs: what is kept as blobs by their hash.

On the client: `take_snapshot`. In the manager: `SnapshotStore` and `LogStore`, over `Objects` (`open_objects`). On a
node: `NodeCache`, `EnvironmentCache`, `ship_logs`. The decisions are in `cluster.core.objects`.

Names are imported when they are first used: a client that sends a directory pays for no store.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fireflyer.cluster.core.objects.collection import Quota, Usage
    from fireflyer.cluster.core.objects.manifest import (
        Manifest,
        ManifestLimits,
        decode_manifest,
        encode_manifest,
        files_by_blob,
    )
    from fireflyer.cluster.objects.directory import DirectoryObjects
    from fireflyer.cluster.objects.environments import (
        Environment,
        EnvironmentCache,
        check_environment,
        hold_environment,
    )
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

_HOME = {
    "DirectoryObjects": "fireflyer.cluster.objects.directory",
    "Environment": "fireflyer.cluster.objects.environments",
    "EnvironmentCache": "fireflyer.cluster.objects.environments",
    "LockFile": "fireflyer.cluster.objects.lock_files",
    "LogAnswer": "fireflyer.cluster.schema.logs",
    "LogChunk": "fireflyer.cluster.schema.logs",
    "LogEnd": "fireflyer.cluster.schema.logs",
    "LogStore": "fireflyer.cluster.objects.log_store",
    "MAX_LOCK_BYTES": "fireflyer.cluster.objects.lock_files",
    "Manifest": "fireflyer.cluster.core.objects.manifest",
    "ManifestLimits": "fireflyer.cluster.core.objects.manifest",
    "NodeCache": "fireflyer.cluster.objects.node_cache",
    "Objects": "fireflyer.cluster.objects.port",
    "Quota": "fireflyer.cluster.core.objects.collection",
    "RunKey": "fireflyer.cluster.objects.log_store",
    "SnapshotStore": "fireflyer.cluster.objects.snapshot_store",
    "StatCache": "fireflyer.cluster.objects.stat_cache",
    "UrlObjects": "fireflyer.cluster.objects.url",
    "Usage": "fireflyer.cluster.core.objects.collection",
    "check_environment": "fireflyer.cluster.objects.environments",
    "decode_manifest": "fireflyer.cluster.core.objects.manifest",
    "encode_manifest": "fireflyer.cluster.core.objects.manifest",
    "files_by_blob": "fireflyer.cluster.core.objects.manifest",
    "hold_environment": "fireflyer.cluster.objects.environments",
    "open_objects": "fireflyer.cluster.objects.url",
    "open_pieces": "fireflyer.cluster.objects.snapshot",
    "ship_logs": "fireflyer.cluster.objects.log_tail",
    "take_snapshot": "fireflyer.cluster.objects.snapshot",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
