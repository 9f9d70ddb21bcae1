"""Faults planted into the books of a replay and into the policies; each must be found by `checked.check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fireflyer.cluster.core.replay import baselines, meter, replay, rooms
from fireflyer.cluster.core.replay.life import Costs, Parts, cut
from fireflyer.cluster.core.replay.node_driver import RunEnd
from fireflyer.cluster.core.replay.replay import Replay

__all__ = ["MUTANTS"]

Plant = Callable[[pytest.MonkeyPatch], None]


def checkpoints_are_productive(patch: pytest.MonkeyPatch) -> None:
    def wrong(elapsed_ns: int, work_ns: int, costs: Costs) -> tuple[Parts, int]:
        parts, unsaved_ns = cut(elapsed_ns, work_ns, costs)
        return parts._replace(productive=parts.productive + parts.checkpoint, checkpoint=0), unsaved_ns

    patch.setattr(replay, "cut", wrong)


def failures_lose_nothing(patch: pytest.MonkeyPatch) -> None:
    end = Replay._end
    patch.setattr(Replay, "_end", lambda self, run, now_ns, how, **_: end(self, run, now_ns, how, saved=True))


def lost_work_is_productive(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Replay, run: Any, now_ns: int, how: RunEnd, *, saved: bool) -> None:
        lost_ns = 0 if saved else self._so_far(run, now_ns)[1]
        end(self, run, now_ns, how, saved=saved)
        self._parts = self._parts.plus(Parts(productive=lost_ns, lost=-lost_ns), len(run.nodes))

    end = Replay._end
    patch.setattr(Replay, "_end", wrong)


def starting_is_productive(patch: pytest.MonkeyPatch) -> None:
    def wrong(elapsed_ns: int, work_ns: int, costs: Costs) -> tuple[Parts, int]:
        parts, unsaved_ns = cut(elapsed_ns, work_ns, costs)
        return parts._replace(start=0, checkpoint=parts.checkpoint + parts.start), unsaved_ns

    patch.setattr(replay, "cut", wrong)
    patch.setattr(replay, "run_ns", lambda work_ns, costs: work_ns + costs.start_ns)


def down_nodes_are_healthy(patch: pytest.MonkeyPatch) -> None:
    advance = meter.Meter.advance

    most: dict[int, int] = {}

    def wrong(self: meter.Meter, now_ns: int, *, healthy: int, allocated: int, waiting: int) -> None:
        healthy = most.setdefault(id(self), healthy)
        advance(self, now_ns, healthy=healthy, allocated=allocated, waiting=waiting)

    patch.setattr(meter.Meter, "advance", wrong)


def hours_forget_their_last_part(patch: pytest.MonkeyPatch) -> None:
    advance = meter.Meter.advance

    def wrong(self: meter.Meter, now_ns: int, *, healthy: int, allocated: int, waiting: int) -> None:
        crosses = self.at_ns // meter.BUCKET_NS != now_ns // meter.BUCKET_NS
        advance(self, now_ns, healthy=healthy, allocated=allocated, waiting=waiting)
        if crosses:
            self.buckets[-1].allocated = 0

    patch.setattr(meter.Meter, "advance", wrong)


def later_waits_do_not_count(patch: pytest.MonkeyPatch) -> None:
    start = Replay._start

    def wrong(self: Replay, decision: Any, now_ns: int) -> None:
        life = self._lives[decision.task]
        queued_ns, again = life.queued_ns, life.first_start_ns is not None
        start(self, decision, now_ns)
        if again:
            life.queued_ns = queued_ns

    patch.setattr(Replay, "_start", wrong)


def failed_runs_keep_their_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rooms.Rooms, "node_down", lambda self, node: self._down.setdefault(node))


def guarantees_do_not_hold(patch: pytest.MonkeyPatch) -> None:
    victims = baselines.QueuePolicy._victims
    patch.setattr(
        baselines.QueuePolicy,
        "_victims",
        lambda self, head, now_ns: victims(self, head, now_ns + self._cluster.guaranteed_ns),
    )


def runs_end_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replay, "run_ns", lambda work_ns, costs: costs.start_ns + work_ns)


MUTANTS: dict[str, tuple[str, Plant]] = {
    plant.__name__: (policy, plant)
    for policy, plant in (
        ("fifo", checkpoints_are_productive),
        ("fifo", failures_lose_nothing),
        ("preemption", lost_work_is_productive),
        ("fifo", starting_is_productive),
        ("backfill", down_nodes_are_healthy),
        ("fifo", hours_forget_their_last_part),
        ("sharing", later_waits_do_not_count),
        ("fifo", failed_runs_keep_their_nodes),
        ("preemption", guarantees_do_not_hold),
        ("backfill", runs_end_early),
    )
}
