"""The communicator with which our data parallelism serves a process group of `torch.distributed`.

One for each group and process: models that are wrapped with the same group share it, as they share the group with
torch's DDP, so their operations have one order, which must be the same on all ranks.
"""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from fireflyer.base.errors import UsageError
from fireflyer.collectives import Communicator
from fireflyer.collectives.torch_join import communicator_of

__all__ = ["chosen_group", "communicator_beside", "default_group"]

_TORCH_TIMEOUT: Final = timedelta(minutes=30)
_lock = threading.Lock()
_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()


def default_group() -> dist.ProcessGroup | None:
    """That of `init_process_group`, None before it."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def chosen_group(process_group: Any, device_mesh: Any) -> dist.ProcessGroup:
    """The group that torch's DDP would use. Raises `UsageError`."""
    if process_group is not None and device_mesh is not None:
        raise UsageError("process_group and device_mesh both name the ranks; pass one of them")
    if device_mesh is not None:
        if device_mesh.ndim != 1 or device_mesh._get_root_mesh() != device_mesh:  # noqa: SLF001 - as torch's DDP asks
            raise UsageError(
                f"device_mesh {device_mesh} has several dimensions, or is a part of one that has; "
                "pass process_group=mesh.get_group(NAME), with a module that is not sharded"
            )
        return cast("dist.ProcessGroup", device_mesh.get_group(0))
    group = default_group() if process_group is None else process_group
    if group is None:
        raise UsageError(
            "there is no process group yet; call torch.distributed.init_process_group first, or pass comm="
        )
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"process_group is a {type(group).__name__}; pass a process group, or a communicator as comm=")
    if group.rank() < 0:
        raise UsageError("this process is not in process_group; wrap the module on its ranks only")
    return group


def communicator_beside(group: dist.ProcessGroup) -> Communicator:
    """That of the group. Collective when it is first asked for; an hfreduce group has one already."""
    own = getattr(group, "communicator", None)
    if isinstance(own, Communicator):
        return own
    with _lock:
        found = _beside.get(group)
        if found is None:
            found = _beside[group] = communicator_of(group, timeout=_timeout_of(group))
        return found


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a rank may hold up the others: as long as with the group itself."""
    try:
        backend: Any = group._get_backend(torch.device("cpu"))  # noqa: SLF001 - there is no public way to it
        timeout = backend.options._timeout  # noqa: SLF001
    except (RuntimeError, AttributeError):  # a group without a backend for the CPU, or one that has no options
        return _TORCH_TIMEOUT
    return timeout if isinstance(timeout, timedelta) else _TORCH_TIMEOUT
