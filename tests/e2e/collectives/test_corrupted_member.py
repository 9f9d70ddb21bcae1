"""A rank of the group sends frames that are wrong: every other rank gets one error that names it, in time. Real
processes; a proxy alters what rank 2 sends, as a rank with corrupted memory would send it.

What a checksum cannot show, numbers that are wrong in themselves, is not here: a rank can always contribute wrong ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.campaigns.shards import rotating
from tests.support.network.frame_proxy import Alteration, FrameProxy
from tests.support.patience import allowed_s
from tests.support.ranks.processes import Ranks, ranks_running

from fireflyer.base.units import MS, SECOND

pytestmark = pytest.mark.processes

TIMEOUT_NS = 2000 * MS
LIMIT_S = 1.125 * TIMEOUT_NS / SECOND + 0.3 + 0.7
"""docs/design/0023-collective-failures.md, and the slack of a busy machine."""
NODES = [0, 0, 1]
CORRUPTED = 2
CONTROL, DATA, ALL = range(1), range(1, 1 << 16), range(1 << 16)
TURNS = rotating(expected_s=2)
OTHER_OPERATION = 3


@contextmanager
def ranks_over(proxies: dict[int, FrameProxy], tmp_path: Path, kind: str) -> Iterator[Ranks]:
    """One proxy: the connections between the leaders, which rank 2 makes to rank 0. Three: those between ranks."""
    ports = {str(number): proxy.port for number, proxy in proxies.items()}
    between_ranks = len(proxies) > 1
    usual: dict[str, Any] = {
        "call": {"kind": kind, "count": 10_000 if between_ranks else 1_000_000},
        "listen_ports" if between_ranks else "proxies": ports,
    }
    try:
        with ranks_running(
            tmp_path / "job", NODES, "", timeout_ns=TIMEOUT_NS, module="tests.support.ranks.fault_ranks", **usual
        ) as ranks:
            for rank, proxy in proxies.items():
                event = "rank listening" if between_ranks else "listening"
                proxy.begin(ranks.wait_for(event, [rank])[rank]["port"])
            ranks.wait_for("under way")
            yield ranks
    finally:
        for proxy in proxies.values():
            proxy.close()


def the_others_name_it(ranks: Ranks, since_s: float) -> None:
    failed = ranks.wait_for("failed", limit_s=LIMIT_S + 20)
    for rank, event in failed.items():
        if rank == CORRUPTED:
            continue
        assert f"rank {CORRUPTED} " in event["message"], f"rank {rank}: {event}"
        assert event["type"] in ("PeerFailed", "DataCorruption", "UsageError"), f"rank {rank}: {event}"
        assert event["type"] != "PeerFailed" or event["culprit"] == CORRUPTED, f"rank {rank}: {event}"
        assert "\n" not in event["message"]
        assert event["at"] - since_s < allowed_s(LIMIT_S), f"rank {rank} took {event['at'] - since_s:.2f} s: {event}"


ALTERED = {
    "wrong header checksum": Alteration("header checksum"),
    "wrong payload checksum": Alteration("payload checksum"),
    "too long": Alteration("bytes", 0x7FFFFFFF),
    "too short": Alteration("bytes", 4),
    "another number": Alteration("number", 1 << 40),
    "another chunk": Alteration("chunk", 77),
    "another operation": Alteration("operation", OTHER_OPERATION),
    "another type of elements": Alteration("dtype", 7),
    "another count": Alteration("count", 12345),
    "an unknown frame": Alteration("type", 99),
    "another version": Alteration("version", 9),
    "another protocol": Alteration("magic"),
    "noise": Alteration("noise"),
}


@pytest.mark.parametrize(
    "wrong", [pytest.param(name, marks=() if name == "wrong payload checksum" else TURNS) for name in ALTERED]
)
def test_wrong_frames_on_a_lane_between_nodes(wrong: str, tmp_path: Path) -> None:
    proxy = FrameProxy()
    with ranks_over({0: proxy}, tmp_path, "allreduce") as ranks:
        at_s = time.monotonic()
        proxy.alter(ALTERED[wrong], DATA, "server")
        the_others_name_it(ranks, at_s)


HARMLESS = ("another chunk", "another count", "another number", "another operation", "another type of elements")
"""In one heartbeat, which says what its sender does; the next one says it again.
"another chunk": a short message between two ranks has none."""


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("too long", "another version") else TURNS)
        for name in ALTERED
        if name not in HARMLESS
    ],
)
def test_wrong_frames_on_the_control_connection(wrong: str, tmp_path: Path) -> None:
    proxy = FrameProxy()
    with ranks_over({0: proxy}, tmp_path, "allreduce") as ranks:
        at_s = time.monotonic()
        proxy.alter(ALTERED[wrong], CONTROL, "server")
        the_others_name_it(ranks, at_s)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(name, marks=() if name == "another number" else TURNS)
        for name in ALTERED
        if name != "another chunk"
    ],
)
def test_wrong_messages_between_two_ranks(wrong: str, tmp_path: Path) -> None:
    """Rank 2 is alone on its node, so each of its connections is over TCP, and goes through a proxy."""
    proxies = {rank: FrameProxy() for rank in range(len(NODES))}
    with ranks_over(proxies, tmp_path, "all_to_all") as ranks:
        at_s = time.monotonic()
        for rank, proxy in proxies.items():
            proxy.alter(ALTERED[wrong], ALL, "client" if rank == CORRUPTED else "server")
        the_others_name_it(ranks, at_s)
