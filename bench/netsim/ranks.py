"""A rank of `bench.collectives.ranks.arrays` that also measures the speeds that the cost model of collectives takes."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from bench.collectives.ranks.arrays import Rank
from bench.collectives.ranks.orders import obey
from fireflyer.collectives.tuning import measure


class MeasuringRank(Rank):
    orders = (*Rank.orders, "speeds")

    def speeds(self) -> dict[str, Any]:
        """Collective."""
        found: dict[str, Any] = msgspec.to_builtins(measure(self.comm))
        return found


if __name__ == "__main__":
    obey(MeasuringRank(json.loads(sys.argv[2])))
