"""Many seeds of the chunk store: `python -m tests.support.fs.chain_sim.campaign --seeds 5000` (that is `make sim`).

Worlds: `replicas` with clients that follow a script, `clients` with the machine of real ones, `whole` with real
managers and storage processes besides, `managers` with those alone. Prints how many seeds a second were run, and for
the first one that fails what was wrong and how to run it again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.support.fs.chain_sim.request_world import RequestWorld, WholeWorld, run_seed
from tests.support.fs.chain_sim.world import ReplicaWorld
from tests.support.fs.manager_sim.chaos import chaos, inject_faults, some_cluster

__all__ = ["WORLDS", "history", "main"]

BLOCK = 25
MANAGERS = "managers"
WORLDS: dict[str, type[ReplicaWorld]] = {"replicas": ReplicaWorld, "clients": RequestWorld, "whole": WholeWorld}


def history(seed: int, world_type: type[ReplicaWorld] = ReplicaWorld) -> bytes:
    """All that happened, for comparing runs. Also of a seed that fails."""
    world = world_type(seed)
    world.plan_faults()
    try:
        world.run()
    except AssertionError:
        pass
    return world.sim.trace.to_bytes()


def _run(seed: int, name: str) -> None:
    if name == MANAGERS:
        chaos(seed)
    else:
        run_seed(seed, WORLDS[name])


def _trace(seed: int, name: str) -> bytes:
    if name != MANAGERS:
        return history(seed, WORLDS[name])
    cluster = some_cluster(seed)
    with contextlib.suppress(AssertionError):
        inject_faults(cluster)
    return cluster.world.trace.to_bytes()


def _block(seeds: range, name: str) -> tuple[int, str] | None:
    for seed in seeds:
        try:
            _run(seed, name)
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--world", choices=[*WORLDS, MANAGERS], default="replicas")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="run only the first seed, and write its history here")
    options = parser.parse_args()
    if options.trace:
        options.trace.write_bytes(_trace(options.first, options.world))
        return 0
    end = options.first + options.seeds
    blocks = [range(start, min(start + BLOCK, end)) for start in range(options.first, end, BLOCK)]
    start = time.perf_counter()
    with ProcessPoolExecutor(options.workers) as pool:
        failed = next(
            (found for found in pool.map(_block, blocks, itertools.repeat(options.world)) if found is not None), None
        )
        if failed is not None:
            pool.shutdown(cancel_futures=True)
            print(f"seed {failed[0]} fails: {failed[1]}", file=sys.stderr)
            again = f"--world {options.world} --first {failed[0]} --seeds 1 [--trace FILE]"
            print(f"again: python -m tests.support.fs.chain_sim.campaign {again}")
            return 1
    seconds = time.perf_counter() - start
    print(f"{options.world}: {options.seeds} seeds in {seconds:.1f} s, {options.seeds / seconds:.0f} seeds/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
