"""A rank on a host of a network: ours by several plans, each a group of its own, and gloo; does what it is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from bench.collectives.data import NATIVE, Array
from bench.collectives.ranks.arrays import Rank
from bench.collectives.ranks.orders import join_ours, obey
from fireflyer.collectives import Communicator, Plan


class NetworkRank(Rank):
    orders: tuple[str, ...] = (*Rank.orders, "join_plan")

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__(arguments)
        self._groups: dict[str, Communicator] = {}

    def join_plan(self, name: str, path: str) -> dict[str, Any]:
        """A group that computes by the plan in that file, as JSON."""
        with open(path, "rb") as file:
            plan = msgspec.json.decode(file.read(), type=Plan)
        self._groups[name] = join_ours(self.arguments, plan, name)
        return {}

    def close(self) -> None:
        super().close()
        for group in self._groups.values():
            group.close()

    def _call(self, what: str) -> tuple[Array, Callable[[], object]]:
        group = self._groups.get(what)
        if group is None:
            return super()._call(what)
        array, dtype = self.arrays["private"], NATIVE[self.dtype]
        return array, lambda: group.allreduce(array, dtype=dtype)


if __name__ == "__main__":
    obey(NetworkRank(json.loads(sys.argv[2])))
