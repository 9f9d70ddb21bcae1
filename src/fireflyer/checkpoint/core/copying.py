"""In which order the tensors of a snapshot are copied, where devices copy beside training. Pure.

A device does what a stream is given in that order, later than it was given. Training uses the *current stream* of a
device, the copies another one. `save` gives this order to them:

    1. the copies of a device begin after a point of its current stream: what training has given it before `save`
    2. tensors that may change at any time are copied first, and the current stream waits for their end at once
    3. *deferred* tensors follow; the current stream waits for them in `before_update` only. The caller promises to
       change none of them before that, so what training computes meanwhile (forward, backward) runs beside the copies
    4. tensors in host memory are copied by the caller itself, while the devices copy

Without deferred tensors everything is of the second kind: no call can be forgotten, and the host never waits. The
image is complete, and may be read, when the last copy of each device has ended: the thread of the save waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Batch", "CopyPlan", "plan_copies"]

D = TypeVar("D")


class Batch(NamedTuple, Generic[D]):
    """Copies that one device makes one after the other. Batches of a device are given to it in their order."""

    device: D
    deferred: bool
    tensors: list[int]


class CopyPlan(NamedTuple, Generic[D]):
    """Each tensor is in one batch, or in `host`; by their numbers."""

    batches: list[Batch[D]]
    host: list[int]


def plan_copies(devices: Sequence[D | None], deferred: Sequence[bool]) -> CopyPlan[D]:
    """`devices[i]` is where tensor i lies, None for host memory. Of all devices the batches that training waits for at
    once come first, so that none of them starts later than it must."""
    batches: dict[tuple[bool, D], list[int]] = {}
    host: list[int] = []
    for number, (device, later) in enumerate(zip(devices, deferred, strict=True)):
        if device is None:
            host.append(number)
        else:
            batches.setdefault((later, device), []).append(number)
    ordered = [key for later in (False, True) for key in batches if key[0] is later]
    return CopyPlan([Batch(device, later, batches[later, device]) for later, device in ordered], host)
