"""Cases, and the process that tells the ranks what to run.

The bound of a case: all ranks at once read their own array once and write it once (`numpy.add` in place), which no
allreduce can avoid; with the bytes that this moves it is the memory bandwidth of the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from bench.report import Bound, Figure, Result, Suite, figure
from fireflyer.base.units import MIB
from fireflyer.identity.secrets import new_secret, save_secret
from fireflyer.runtime.rpc import Accepts, RpcServer
from fireflyer.runtime.store import StoreService

__all__ = ["run"]


class Case(NamedTuple):
    dtype: str
    size_bytes: int


class Scale(NamedTuple):
    layouts: dict[str, list[int]]
    cases: tuple[Case, ...]
    warm_ups: int
    rounds: int


ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
ONE_HOST = {"1x4": [0, 0, 0, 0]}
TWO_NODES = {"2x2": [0, 0, 1, 1]}
PAPER = Case("fp32", 186 * MIB)
SCALES = {
    "tiny": Scale(ONE_HOST, (Case("fp32", 1 * MIB),), 1, 2),
    "brief": Scale(ONE_HOST | TWO_NODES, (PAPER,), 1, 5),
    "full": Scale(
        {"1x2": [0, 0]} | ONE_HOST | {"1x8": [0] * 8} | TWO_NODES | {"4x1": [0, 1, 2, 3]},
        (
            PAPER,
            Case("bf16", 186 * MIB),
            Case("fp16", 186 * MIB),
            Case("fp32", 25 * MIB),
            Case("fp32", MIB),
            Case("fp32", 4096),
        ),
        2,
        9,
    ),
}


def run(scale: str) -> Suite:
    chosen = SCALES[scale]
    results = [result for name, nodes in chosen.layouts.items() for result in _layout(name, nodes, chosen)]
    remarks = [_bandwidth(result) for result in results if result.bound is not None]
    return Suite(results=tuple(results), remarks=(_versions(), *remarks))


def _layout(name: str, nodes: list[int], scale: Scale) -> Iterator[Result]:
    with _ranks(nodes) as ranks:
        for case in scale.cases:
            yield _measure(
                f"allreduce/{name}/private/{case.dtype}/{_size(case.size_bytes)}", case, ranks, len(nodes), scale
            )


def _measure(name: str, case: Case, ranks: _Ranks, world_size: int, scale: Scale) -> Result:
    missing = ranks.tell("prepare", dtype=case.dtype, count=case.size_bytes // ELEMENT_BYTES[case.dtype])[0]["gloo"]
    contenders = ["ours", *([] if missing else ["gloo"]), "memory"]
    samples: dict[str, list[float]] = {what: [] for what in contenders}
    for number in range(scale.warm_ups + scale.rounds):
        for what in contenders:
            seconds = max(answer["seconds"] for answer in ranks.tell("time", what=what))
            if number >= scale.warm_ups:
                samples[what].append(seconds)
            if what != "memory" and number == scale.warm_ups + scale.rounds - 1:
                wrong = [rank for rank, answer in enumerate(ranks.tell("check")) if not answer["right"]]
                if wrong:
                    raise SystemExit(f"{name}: {what} gave a wrong sum on ranks {wrong}")
    ours = figure(samples["ours"])
    peer: Figure | str = missing or figure(samples["gloo"])
    moved = 2 * world_size * case.size_bytes
    memory = figure(samples["memory"])
    rates = {
        "algorithm_bandwidth_bytes_per_s": case.size_bytes / ours.median,
        "bus_bandwidth_bytes_per_s": case.size_bytes / ours.median * 2 * (world_size - 1) / world_size,
        "memory_bandwidth_bytes_per_s": moved / memory.median,
    }
    return Result(
        suite="collectives",
        case=name,
        metric="time_s",
        better="lower",
        ours=ours,
        peers={"gloo": peer},
        bound=Bound(
            memory.median, f"2 n bytes read and written in place by n={world_size} ranks at once, measured beside"
        ),
        target="ours <= gloo/5" if "/1x" in name else "ours <= gloo",
        more=rates,
    )


class _Ranks:
    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def tell(self, order: str, **details: Any) -> list[dict[str, Any]]:
        """Gives all ranks an order and returns their answers."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"do": order} | details) + "\n")
            process.stdin.flush()
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            raise SystemExit("a rank of the benchmark died; its message is above")
        return [json.loads(line) for line in lines]


@contextmanager
def _ranks(nodes: list[int]) -> Iterator[_Ranks]:
    with tempfile.TemporaryDirectory() as directory, _store(directory) as (address, secret_file):
        processes = []
        try:
            for rank, node in enumerate(nodes):
                arguments = {
                    "rank": rank,
                    "world_size": len(nodes),
                    "node": node,
                    "store": address,
                    "secret_file": secret_file,
                    "rendezvous": os.path.join(directory, "gloo"),
                }
                command = [sys.executable, "-m", "bench.collectives.rank", json.dumps(arguments)]
                environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
                )
            ranks = _Ranks(processes)
            ranks.answers()
            yield ranks
            for process in processes:
                assert process.stdin is not None
                process.stdin.write('{"do": "stop"}\n')
                process.stdin.flush()
            for process in processes:
                process.wait(60)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


@contextmanager
def _store(directory: str) -> Iterator[tuple[str, str]]:
    secret = new_secret()
    secret_file = os.path.join(directory, "secret")
    save_secret(secret, secret_file)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> tuple[RpcServer, str]:
        server = RpcServer(Accepts(secret))
        StoreService(server)
        return server, str(await server.start("127.0.0.1", 0))

    server, address = asyncio.run_coroutine_threadsafe(begin(), loop).result(30)
    try:
        yield address, secret_file
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _bandwidth(result: Result) -> str:
    rates = {name: value / 1e9 for name, value in result.more.items()}
    return (
        f"{result.case}: algorithm bandwidth {rates['algorithm_bandwidth_bytes_per_s']:.2f} GB/s, bus bandwidth "
        f"{rates['bus_bandwidth_bytes_per_s']:.2f} GB/s; memory bandwidth in this run "
        f"{rates['memory_bandwidth_bytes_per_s']:.1f} GB/s"
    )


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"gloo of torch {version('torch')}; {os.cpu_count()} processors; one thread for each rank and library"
    except PackageNotFoundError:
        return f"torch is not installed; {os.cpu_count()} processors"


def _size(count: int) -> str:
    return f"{count // MIB}MiB" if count >= MIB else f"{count // 1024}KiB"
