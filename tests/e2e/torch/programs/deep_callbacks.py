"""A callback that waits for a future whose callback waits, and so on: more of them than gloo has threads."""

from __future__ import annotations

from typing import Any

from tests.e2e.torch.programs.callbacks_that_wait import total


def nested(depth: int) -> list[float]:
    if depth == 0:
        return list(total(2).wait()[0].tolist())
    return list(total(depth).then(lambda _: nested(depth - 1)).wait())


def main() -> Any:
    return nested(6)
