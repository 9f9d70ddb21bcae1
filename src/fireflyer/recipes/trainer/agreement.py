"""What ranks tell each other before training: that they were given the same, and what one of them found wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from fireflyer.base.errors import FireflyerError, UsageError, error_from_wire, error_to_wire

__all__ = ["check_same", "on_rank_0"]

T = TypeVar("T")
_MAX_TEXT: Final = 2048
_MAX_NAMED: Final = 8


def check_same(what: Mapping[str, str], advice: str) -> None:
    """Raises `UsageError`, on all ranks, unless all have the same text under each name; the names must be the same.
    Collective. `advice`: what to do about it."""
    digests = [_word(text) for text in (repr(list(what)), *what.values())]
    rows = _gathered(torch.tensor([len(digests)], dtype=torch.int64))
    if len({int(row[0]) for row in rows}) == 1:
        rows = _gathered(torch.tensor(digests, dtype=torch.int64))
    names = ["their number", *what]
    for column, name in enumerate(names[: rows.shape[1]]):
        others = [rank for rank in range(len(rows)) if int(rows[rank, column]) != int(rows[0, column])]
        if others:
            more = f" and {len(others) - _MAX_NAMED} more" if len(others) > _MAX_NAMED else ""
            shown = ", ".join(map(str, others[:_MAX_NAMED]))
            raise UsageError(f"{name} differs: ranks {shown}{more} have something else than rank 0; {advice}")


def on_rank_0(action: Callable[[], T]) -> T | None:
    """The result of `action` on rank 0, None on the others; what it raises is raised on all. Collective."""
    result, failure = None, None
    if dist.get_rank() == 0:
        try:
            result = action()
        except FireflyerError as error:
            failure = error
    text = b"" if failure is None else "\n".join(error_to_wire(failure)).encode()[:_MAX_TEXT]
    told = torch.zeros(_MAX_TEXT + 2, dtype=torch.uint8)
    told[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    dist.broadcast(told, src=0)
    if failure is not None:
        raise failure
    said = bytes(told.tolist()).rstrip(b"\0").decode(errors="replace")
    if said:
        code, _, message = said.partition("\n")
        raise error_from_wire(code, message)
    return result


def _gathered(mine: torch.Tensor) -> torch.Tensor:
    """Rows of all ranks `[world_size, n]`."""
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.stack(rows)


def _word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
