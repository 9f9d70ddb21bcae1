"""Saves a job's state so that no crash loses it, and finds the newest whole checkpoint afterwards.

Sharded safetensors files and one manifest per checkpoint, a checksum per tensor, commit by rename. The names that need
torch (`CheckpointManager`, `State`, …) are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fireflyer.checkpoint.core.manifest import PlanRecord
from fireflyer.checkpoint.reader import CheckpointInfo, describe, stored_job_plan, stored_plans, verify
from fireflyer.checkpoint.storage import open_storage

if TYPE_CHECKING:
    from fireflyer.checkpoint.engine.save import SaveHandle
    from fireflyer.checkpoint.loop import Stateful, TrainingLoop
    from fireflyer.checkpoint.manager import CheckpointManager
    from fireflyer.checkpoint.restored import Restored
    from fireflyer.checkpoint.state import (
        State,
        capture,
        capture_rng,
        layouts_of,
        load_into,
        load_rng,
        needed_by,
    )

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "PlanRecord",
    "Restored",
    "SaveHandle",
    "State",
    "Stateful",
    "TrainingLoop",
    "capture",
    "capture_rng",
    "describe",
    "layouts_of",
    "load_into",
    "load_rng",
    "needed_by",
    "open_storage",
    "stored_job_plan",
    "stored_plans",
    "verify",
]

_LAZY = {
    "CheckpointManager": "manager",
    "Restored": "restored",
    "SaveHandle": "engine.save",
    "State": "state",
    "Stateful": "loop",
    "TrainingLoop": "loop",
    "capture": "state",
    "capture_rng": "state",
    "layouts_of": "state",
    "load_into": "state",
    "load_rng": "state",
    "needed_by": "state",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
