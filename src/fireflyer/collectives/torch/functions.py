"""`monitored_barrier` and `split_group` of torch.distributed, for groups of this backend.

Both refuse, before they ask the group, what is not made by torch itself: the first every backend whose name is not
gloo, the second groups without an accelerator and without a C++ backend. So the module's functions are replaced by ones
that serve our groups and hand all others on. Who imported a name from torch.distributed before has the old function;
the group's method `monitored_barrier` is there for them, and `new_group(..., use_local_synchronization=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from fireflyer.base.errors import UsageError
from fireflyer.collectives.flight import Snapshot

__all__ = ["barrier_failure", "missing_from_barrier", "serve"]


_MOST_NAMED: Final = 64
_NOBODY_SEEN: Final = "no rank that this one can see is missing: see the other ranks' errors"


def serve(group_type: type[dist.ProcessGroup], name: str) -> None:
    """Replaces the functions. To be called once, with the class of our groups and the name of the backend."""

    def own(group: Any) -> bool:
        chosen = dist.group.WORLD if group is None else group
        return isinstance(chosen, group_type)

    def barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen: Any = dist.group.WORLD if group is None else group
        chosen.monitored_barrier(_duration(timeout), wait_all_ranks)

    def split(
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> Any:
        parent: Any = dist.group.WORLD if parent_pg is None else parent_pg
        ranks = _my_part(split_ranks, parent.rank(), parent.size())
        if ranks is None:
            return None
        return dist.new_group(
            [dist.get_global_rank(parent, rank) for rank in ranks],
            timeout=timeout,
            backend=backend or name,
            pg_options=pg_options,
            use_local_synchronization=True,
            group_desc=group_desc,
        )

    _replace("monitored_barrier", "group", barrier, own)
    _replace("split_group", "parent_pg", split, own)


def _replace(name: str, argument: str, ours: Callable[..., Any], own: Callable[[Any], bool]) -> None:
    """`argument`: the first one, which is the group."""
    theirs = getattr(distributed_c10d, name)

    @wraps(theirs)
    def chosen(group: Any = None, *arguments: Any, **options: Any) -> Any:
        group = options.pop(argument, group)
        return (ours if own(group) else theirs)(group, *arguments, **options)

    for module in (distributed_c10d, dist, device_mesh):
        if getattr(module, name, None) is theirs:
            setattr(module, name, chosen)


def _duration(timeout: Any) -> timedelta | None:
    """Of seconds, too, as torch has it."""
    return timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout


def _my_part(split_ranks: Sequence[Sequence[int]] | None, rank: int, size: int) -> list[int] | None:
    """Ranks of the parent, ascending, of the part to which `rank` belongs; None: to none. Raises `UsageError`."""
    parts = [sorted(part) for part in split_ranks or []]
    named = [one for part in parts for one in part]
    if not named or not all(parts):
        raise UsageError(f"split_ranks is {split_ranks!r}; pass a list of lists of ranks, none of them empty")
    if len(set(named)) != len(named) or not all(0 <= one < size for one in named):
        raise UsageError(f"split_ranks is {split_ranks!r}; each of the ranks 0 to {size - 1} may be in one part, once")
    return next((part for part in parts if rank in part), None)


def missing_from_barrier(snapshot: Snapshot) -> list[int]:
    """Which ranks have not entered the barrier that this rank waits in, as far as it can see."""
    waiting = [record.seq for record in snapshot.records if record.kind == "barrier" and record.state == "running"]
    seq = min(waiting, default=snapshot.submitted - 1)
    return sorted(one.rank for one in snapshot.peer_progress if one.entered <= seq)


def barrier_failure(missing: Sequence[int], blamed: int, error: str, *, name_all: bool) -> str:
    """What a monitored barrier says that has failed with `error`: in the words of torch first, then in ours. `blamed`:
    the rank that the error names, or -1; `missing`: those that a barrier waits for that is still pending."""
    if not missing:
        return f"Rank {blamed} failed to pass monitoredBarrier: {error}" if blamed >= 0 else f"{error}; {_NOBODY_SEEN}"
    named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
    many = len(missing) > 1
    subject = f"Ranks {named}" if many and name_all else f"Rank {missing[0]}"
    have = f"ranks {named} have" if many else f"rank {named} has"
    return f"{subject} failed to pass monitoredBarrier: {error}; {have} not called it"
