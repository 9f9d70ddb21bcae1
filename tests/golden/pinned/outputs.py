"""What commands print with `--json`, of sample values: the place of every value in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from tests.golden.pinned.given import GIVEN
from tests.golden.pinned.samples import samples

from fireflyer.cli.collectives import command as collectives
from fireflyer.cli.collectives import plan as collective_plans
from fireflyer.cli.fs import status as fs_status
from fireflyer.cli.fs.admin import placement, users
from fireflyer.cli.fs.files import maintenance, show
from fireflyer.cli.platform import status as whole_status
from fireflyer.cli.train import schedule as train_schedule
from fireflyer.cluster.core.platform.views import ClusterView, NodeView, TaskView
from fireflyer.collectives.flight.explain import Verdict
from fireflyer.collectives.planning.declaration import Declaration
from fireflyer.collectives.planning.plan import Plan
from fireflyer.fs.core.placement import place, uniform_cluster
from fireflyer.fs.schema.inodes import Layout
from fireflyer.fs.schema.manager import FilesStatus, MoveStatus, Status
from fireflyer.fs.schema.sessions import SessionList
from fireflyer.fs.tools.measuring import Load, Measurement
from fireflyer.identity import UserInfo

__all__ = ["keys_of_outputs"]


def _placement() -> list[bytes]:
    cluster = uniform_cluster(3, 2)
    return [placement.to_json(cluster, place(cluster, 2), 2, 0, 0)]


def _plan() -> list[bytes]:
    return [
        collective_plans._Shown(plan, Declaration(), (), "allreduce", 1, declared=False).to_json()
        for plan in samples(Plan, given=GIVEN)
    ]


def _stat() -> list[bytes]:
    return [show.to_json("/f", os.stat(__file__), "target", Layout(1, 1, 1, 1))]


def _status() -> list[bytes]:
    moves, files = samples(MoveStatus), samples(FilesStatus)
    return [fs_status.to_json(status, moves, one) for status in samples(Status) for one in files]


def _whole_status() -> list[bytes]:
    platform = {"cluster": samples(ClusterView)[0], "nodes": samples(NodeView), "tasks": samples(TaskView)}
    (status, *_), (files, *_) = samples(Status), samples(FilesStatus)
    return [
        whole_status.to_json(platform, fs_status.shown(status, samples(MoveStatus), files), ok=True),
        whole_status.to_json({"error": "why"}, None, ok=False),
    ]


def _bench() -> list[bytes]:
    return [maintenance.to_json(samples(Load)[0], samples(Measurement), samples(Measurement))]


def _train_schedule() -> list[bytes]:
    layers = (1.0, 2.0, 2.0)
    times: train_schedule.Times = {"forward": 1, "backward": 2, "weights": 1, "pair": None, "send": 0.1}
    asked = train_schedule.Asked(2, 4, 1, times, layers, replicas=2)
    return [train_schedule.to_json([train_schedule.row(name, asked) for name in ("1f1b", "dualpipev")])]


OUTPUTS: Final[dict[str, Callable[[], list[bytes]]]] = {
    "collectives explain": lambda: [collectives.to_json(samples(Verdict))],
    "collectives plan": _plan,
    "fs admin sessions": lambda: [msgspec.json.encode(one.sessions) for one in samples(SessionList)],
    "fs bench": _bench,
    "fs placement": _placement,
    "fs stat": _stat,
    "fs status": _status,
    "status": _whole_status,
    "train schedule": _train_schedule,
    "fs user list": lambda: [users.to_json(samples(UserInfo))],
}


def keys_of_outputs() -> set[str]:
    found = set()
    for command, outputs in OUTPUTS.items():
        for output in outputs():
            found |= {f"{command}: {path}" for path in _paths(msgspec.json.decode(output), "")}
    return found


def _paths(value: Any, at: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _paths(inner, f"{at}.{key}")
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _paths(inner, f"{at}[]")
    else:
        yield at or "."
