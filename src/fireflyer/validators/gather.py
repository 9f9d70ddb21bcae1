"""Gathers the evidence on this node, within a bounded time."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, TypeVar

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.node_counters import COUNTERS_NAME, MAX_PEERS, PEERS_NAME, NodeCounters
from fireflyer.base.units import GIB
from fireflyer.runtime.node_counters import read_counters, read_meminfo, read_mounts
from fireflyer.validators.core.evidence import DirectoryTest, Evidence, PeerTest
from fireflyer.validators.disk import distinct_directories, write_and_read_file
from fireflyer.validators.link import connect_to
from fireflyer.validators.memory import write_and_read_memory

__all__ = ["Plan", "gather", "plan_of"]

_Test = TypeVar("_Test")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    before: NodeCounters | None = None
    """Read when the ranks were started; None: nobody did."""
    directories: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    memory_bytes: int = GIB
    """At most, and no more than an eighth of what is available."""
    memory_s: float = 1.0
    disk_s: float = 30.0
    """A file that is not written and read back in this time is not waited for."""
    sys_root: str = "/sys"
    proc_root: str = "/proc"


def plan_of(environ: Mapping[str, str], directory: str) -> Plan:
    """What the contract's environment asks for; `directory`: the working directory."""
    paths = (environ.get("FF_RUN_DIR", ""), directory, tempfile.gettempdir())
    peers = [peer for peer in environ.get(PEERS_NAME, "").split(",") if peer]
    return Plan(
        before=_before(environ.get(COUNTERS_NAME, "")),
        directories=tuple(path for path in paths if path),
        peers=tuple(peers[:MAX_PEERS]),
    )


def _before(text: str) -> NodeCounters | None:
    """Of a supervisor of another release it may be something else: then as if nothing was read."""
    try:
        return decode_json(text, NodeCounters) if text else None
    except DECODE_ERRORS:
        return None


def gather(plan: Plan) -> Evidence:
    began = read_counters(plan.sys_root, plan.proc_root)
    known = plan.before is not None and plan.before.boot == began.boot
    meminfo = read_meminfo(plan.proc_root)
    available = meminfo.get("MemAvailable", 0) << 10
    mounts = read_mounts(plan.proc_root)
    disks = [
        _Beside(partial(write_and_read_file, path, mounts), DirectoryTest(path=path, finished=False))
        for path in distinct_directories(plan.directories)
    ]
    peers = [_Beside(partial(connect_to, peer), PeerTest(peer, "no answer")) for peer in plan.peers]
    memory = write_and_read_memory(min(plan.memory_bytes, available // 8), plan.memory_s)
    ends_s = time.monotonic() + plan.disk_s
    return Evidence(
        directories=tuple(test.result(ends_s) for test in disks),
        peers=tuple(test.result(ends_s) for test in peers),
        before=plan.before if known and plan.before is not None else began,
        now=read_counters(plan.sys_root, plan.proc_root),
        since="since the ranks were started" if known else "",
        total_bytes=meminfo.get("MemTotal", 0) << 10 if available else 0,
        available_bytes=available,
        memory=memory,
    )


class _Beside(Generic[_Test]):
    """A test in a thread of its own, which the kernel may keep for ever when a disk does not answer."""

    def __init__(self, test: Callable[[], _Test], unfinished: _Test) -> None:
        self._found = unfinished
        self._thread = threading.Thread(target=self._run, args=(test,), daemon=True)
        self._thread.start()

    def _run(self, test: Callable[[], _Test]) -> None:
        self._found = test()

    def result(self, ends_s: float) -> _Test:
        self._thread.join(max(ends_s - time.monotonic(), 0))
        return self._found
