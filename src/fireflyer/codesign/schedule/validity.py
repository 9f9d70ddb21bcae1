"""Whether a schedule is complete: each pass once, on the rank that holds its stage, after what it needs on that rank,
and no circle of ranks that wait for each other."""

from __future__ import annotations

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule.actions import Action, Kind, Pair, Schedule, passes
from fireflyer.codesign.schedule.program import compile_schedule

__all__ = ["check"]

_BEFORE = {Kind.BACKWARD: Kind.FORWARD, Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}


def check(schedule: Schedule) -> None:
    """Raises `UsageError` that names the first fault and where it is."""
    placement = schedule.placement
    if len(schedule.rows) != placement.ranks:
        raise UsageError(f"schedule {schedule.name!r} has {len(schedule.rows)} rows for {placement.ranks} ranks")
    done: set[Action] = set()
    for rank, row in enumerate(schedule.rows):
        for item in row:
            _check_pair(schedule, rank, item)
            for action in passes(item):
                _check_action(schedule, rank, action, done)
            done.update(passes(item))
    for micro_batch in range(schedule.micro_batches):
        for stage in range(placement.stages):
            _check_complete(schedule, stage, micro_batch, done)
    compile_schedule(schedule)


def _check_pair(schedule: Schedule, rank: int, item: Action | Pair) -> None:
    if not isinstance(item, Pair):
        return
    if (item.forward.kind, item.backward.kind) != (Kind.FORWARD, Kind.BACKWARD):
        raise UsageError(f"schedule {schedule.name!r}, rank {rank}: {item} is not a pair of F and B")
    if item.forward.micro_batch == item.backward.micro_batch:
        raise UsageError(f"schedule {schedule.name!r}, rank {rank}: both passes of {item} are of one micro-batch")


def _check_action(schedule: Schedule, rank: int, action: Action, done: set[Action]) -> None:
    where = f"schedule {schedule.name!r}, rank {rank}, {action}"
    if not (0 <= action.stage < schedule.placement.stages and 0 <= action.micro_batch < schedule.micro_batches):
        raise UsageError(f"{where}: there is no such stage or micro-batch")
    holder = schedule.rank_of(action.stage, action.micro_batch)
    if holder != rank:
        raise UsageError(f"{where}: rank {holder} holds this stage")
    if action in done:
        raise UsageError(f"{where}: this pass is there twice")
    before = _BEFORE.get(action.kind)
    if before is not None and action._replace(kind=before) not in done:
        raise UsageError(f"{where}: it comes before {action._replace(kind=before)}, which it needs")


def _check_complete(schedule: Schedule, stage: int, micro_batch: int, done: set[Action]) -> None:
    forward, whole, for_input, for_weights = (Action(kind, stage, micro_batch) in done for kind in Kind)
    if not forward or whole + for_input != 1 or for_input != for_weights:
        kinds = [kind.value for kind in Kind if Action(kind, stage, micro_batch) in done]
        raise UsageError(
            f"schedule {schedule.name!r}: stage {stage} has {', '.join(kinds) or 'no pass'} of micro-batch "
            f"{micro_batch}; it needs F, and either B or I and W"
        )
