"""A callback that waits for the future of a work that was started later."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def main() -> Any:
    first = dist.all_reduce(torch.full((200_000,), 1.0), async_op=True)
    second = dist.all_reduce(torch.full((3,), 2.0), async_op=True)
    assert first is not None
    assert second is not None
    later = second.get_future()
    return first.get_future().then(lambda _: later.wait()[0].tolist()).wait()
