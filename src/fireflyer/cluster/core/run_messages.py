"""What the machine of a node's runs (`runs`) is told, what it asks for, and what is on disk of a run."""

from __future__ import annotations

import msgspec

from fireflyer.cluster.schema.sync import EndedRun, LaunchOrder, Orders

__all__ = [
    "Begin",
    "Changed",
    "Effect",
    "Event",
    "ExecsLiving",
    "FoundRun",
    "GuardsLiving",
    "KillLauncher",
    "LauncherGone",
    "LauncherUp",
    "Left",
    "Living",
    "OrdersHeard",
    "RanksStarted",
    "Remember",
    "RememberLeader",
    "Remembered",
    "Remove",
    "Removed",
    "RenewLease",
    "RunRecord",
    "StartLauncher",
    "StopGuards",
    "SuspendLauncher",
    "TerminateLauncher",
    "Tick",
    "WatchLauncher",
]


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is on disk of a run."""

    token: str
    task: int = 0
    """Of which it is, where its launcher is here; 0: an older release wrote this."""
    run: int = 0
    lead: bool = False
    """A launcher of it was, or was to be, started here."""
    over: bool = False
    """Nothing of that launcher lives."""
    stopped: bool = False
    """Nothing of the run is started here any more."""
    forgotten: bool = False
    ended: EndedRun | None = None
    grace_ns: int = 0


class FoundRun(msgspec.Struct, frozen=True):
    record: RunRecord
    age_ns: int
    """Since it was written."""


class Begin(msgspec.Struct, frozen=True):
    """`lease_ends_ns`: as an earlier agent of this boot wrote it, or 0."""

    found: tuple[FoundRun, ...]
    term: int = 0
    lease_ends_ns: int = 0
    stop_after_ns: int = 0


class OrdersHeard(msgspec.Struct, frozen=True):
    """`asked_ns`: when the question was sent whose answer they are."""

    orders: Orders
    asked_ns: int


class LauncherUp(msgspec.Struct, frozen=True):
    token: str


class RanksStarted(msgspec.Struct, frozen=True):
    token: str


class LauncherGone(msgspec.Struct, frozen=True):
    """`clean`: nothing that it started on this node lives. `ended`: as it wrote itself. `began` False: it never ran."""

    token: str
    clean: bool
    ended: EndedRun | None = None
    began: bool = True


class GuardsLiving(msgspec.Struct, frozen=True):
    """So many guards that were started by ticket of this run live now."""

    token: str
    count: int


class Remembered(msgspec.Struct, frozen=True):
    record: RunRecord


class Removed(msgspec.Struct, frozen=True):
    """Nothing is left of the directory of this run."""

    token: str


class Left(msgspec.Struct, frozen=True):
    """The machine does not belong to the platform any more: its lease is over."""


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class ExecsLiving(msgspec.Struct, frozen=True):
    """So many exec sessions of this run have processes here now."""

    token: str
    count: int


Living = GuardsLiving | ExecsLiving
Event = Begin | OrdersHeard | LauncherUp | RanksStarted | LauncherGone | Living | Remembered | Removed | Left | Tick


class StartLauncher(msgspec.Struct, frozen=True):
    """Write the record, then start. Answered by `LauncherUp` or `LauncherGone`."""

    record: RunRecord
    order: LaunchOrder


class WatchLauncher(msgspec.Struct, frozen=True):
    """Of an earlier agent. Answered by `LauncherUp` or `LauncherGone`."""

    token: str


class SuspendLauncher(msgspec.Struct, frozen=True):
    token: str


class TerminateLauncher(msgspec.Struct, frozen=True):
    token: str


class KillLauncher(msgspec.Struct, frozen=True):
    """With all that it started. Answered by `LauncherGone`."""

    token: str


class StopGuards(msgspec.Struct, frozen=True):
    """All that live of this run on this node."""

    token: str


class Remember(msgspec.Struct, frozen=True):
    """Write the record. Answered by `Remembered` when it is on disk."""

    record: RunRecord


class Remove(msgspec.Struct, frozen=True):
    """The directory of a run that is forgotten. Answered by `Removed`; the run is known until then, so that nothing is
    written there meanwhile."""

    token: str


class RenewLease(msgspec.Struct, frozen=True):
    """Guards of runs may run until then."""

    ends_ns: int


class RememberLeader(msgspec.Struct, frozen=True):
    """Write it to disk; what follows is done only then."""

    term: int
    managers: tuple[str, ...]
    stop_after_ns: int


class Changed(msgspec.Struct, frozen=True):
    """The manager is to be told of the runs at once."""


Effect = (
    StartLauncher | WatchLauncher | SuspendLauncher | TerminateLauncher | KillLauncher | StopGuards | Remember | Remove
    | RenewLease | RememberLeader | Changed
)  # fmt: skip
