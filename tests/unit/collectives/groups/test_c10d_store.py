"""Stores of torch.distributed behave as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fireflyer.base.errors import Timeout
from fireflyer.base.units import MS, SECOND
from fireflyer.collectives.torch.store import C10dStore


@pytest.mark.parametrize("kind", ["hash", "tcp", "file"])
def test_values_of_many_keys_come_in_their_order(kind: str, tmp_path: Path) -> None:
    """A file store cannot get several at once."""
    torch: Any = dist  # the stubs know no stores
    made = {
        "hash": lambda: torch.HashStore(),
        "tcp": lambda: torch.TCPStore("127.0.0.1", 0, 1, is_master=True),
        "file": lambda: torch.FileStore(str(tmp_path / "store"), 1),
    }
    store = C10dStore(made[kind]())
    for rank in range(3):
        store.set(f"rank/{rank}", b"%d" % rank)
    assert store.get_all(["rank/2", "rank/0", "rank/1"], SECOND) == [b"2", b"0", b"1"]
    if kind == "file":  # its error does not say that it was a timeout
        return
    with pytest.raises(Timeout, match="rank/3 did not appear"):
        store.get_all(["rank/2", "rank/3"], 20 * MS)
