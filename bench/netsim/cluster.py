"""`python -m bench.netsim.cluster NODES`: one allreduce and storage reads at once, simulated; prints JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Final

from bench.netsim.workload import GPUS_PER_NODE, allreduce, storage_reads, two_zones
from fireflyer.netsim import Settings, simulate

SETTINGS: Final = Settings(routing="static", message_latency_ns=2350, switch_latency_ns=450)
"""Of InfiniBand (DeepSeek-V3 paper, table 5), routed as Fire-Flyer 2 is."""
RADICES: Final = (40, 128)
"""Ports of a switch: the fewest with which two layers are enough for each zone."""
BETWEEN: Final = 14
"""Links between the zones."""


def main(nodes: int) -> None:
    storage = max(4, nodes * 160 // 1250)
    radix = next(radix for radix in RADICES if nodes // 2 + storage + BETWEEN <= radix * radix // 2)
    fabric = two_zones(nodes, storage, radix=radix, between=BETWEEN)
    sums = allreduce(nodes)
    transfers = sums + storage_reads(nodes, storage, nodes * GPUS_PER_NODE, len(sums))
    begun_s, begun_processor_s = time.perf_counter(), time.process_time()
    run = simulate(fabric, transfers, SETTINGS)
    found = {
        "wall_s": time.perf_counter() - begun_s,
        "processor_s": time.process_time() - begun_processor_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "transfers": len(transfers),
        "events": run.events,
        "makespan_s": run.makespan_s,
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
