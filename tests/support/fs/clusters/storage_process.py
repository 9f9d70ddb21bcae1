"""A storage process as tests start it: `python -m tests.support.fs.clusters.storage_process CONFIG.json
[FSIZE=bytes]`."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import msgspec

from fireflyer.base.units import MS
from fireflyer.cli.fs.processes import run_process
from fireflyer.fs.core.chain.replica import Limits
from fireflyer.fs.service.storage.config import StorageConfig
from fireflyer.fs.service.storage.process import run_storage

LIMITS = Limits(resend_ns=500 * MS, stall_ns=1000 * MS, rest_ns=500 * MS)


def main(path: str, *limits: str) -> int:
    for limit in limits:
        name, value = limit.split("=")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), int(value)))
    config = msgspec.json.decode(Path(path).read_bytes(), type=StorageConfig)
    return run_process(lambda on_ready: run_storage(config, on_ready=on_ready, limits=LIMITS))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
