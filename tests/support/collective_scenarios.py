"""What a rank does in the tests of the collectives. Run as `python -m tests.support.collective_scenarios JSON`."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tests.support import exchange_scenarios
from tests.support.namespaces import enter_namespace

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives import Communicator, Plan, Route, kernels, make_plan
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.store import StoreClient

Array = npt.NDArray[Any]
STORAGE = {
    "f64": "f8",
    "f32": "f4",
    "f16": "f2",
    "bf16": "u2",
    "f8e4m3": "u1",
    "f8e5m2": "u1",
    "i32": "i4",
    "i64": "i8",
}


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event} | fields), flush=True)


def data_of(rank: int, seed: int, count: int, dtype: str) -> Array:
    """What `rank` contributes; every rank can compute it for all."""
    rng = np.random.default_rng([rank, seed, count])
    if dtype in ("i32", "i64"):
        return rng.integers(-(2**31), 2**31, count).astype(STORAGE[dtype])
    values = rng.standard_normal(count).astype("f8" if dtype == "f64" else "f4")
    if dtype in ("f64", "f32"):
        return values
    out = np.empty(count, STORAGE[dtype])
    kernels.round_from_accum(out, values.astype("f4"), dtype)
    return out


def widened(array: Array, dtype: str) -> Array:
    """The exact values, in the accumulation type."""
    if dtype not in ("f16", "bf16", "f8e4m3", "f8e5m2"):
        return array
    wide = np.empty(array.size, "f4")
    kernels.reduce_to_accum(wide, [array], dtype)
    return wide


def close_enough(got: Array, parts: list[Array], dtype: str) -> bool:
    """Exact for integers; floats within the roundings that the order of sums allows, and one of the element type."""
    wide = [widened(part, dtype) for part in parts]
    if dtype in ("i32", "i64"):
        with np.errstate(over="ignore"):
            return bool(np.array_equal(got, np.sum(np.stack(wide), axis=0, dtype=got.dtype)))
    exact = np.sum(np.stack(wide).astype("f8"), axis=0)
    size = np.sum(np.abs(np.stack(wide).astype("f8")), axis=0)
    unit = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7, "f8e4m3": 2.0**-3, "f8e5m2": 2.0**-2}[
        dtype
    ]
    tiny = {"f16": 2.0**-24, "f8e4m3": 2.0**-9, "f8e5m2": 2.0**-16}.get(dtype, 0.0)
    sums = (2.0**-52 if dtype == "f64" else 2.0**-23) * len(parts) * size
    return bool(np.all(np.abs(widened(got, dtype).astype("f8") - exact) <= np.abs(exact) * unit + tiny + sums))


def correctness(comm: Communicator, params: dict[str, Any]) -> None:
    """Every type, operation and size; says a digest of all results, which must be the same on all ranks."""
    rank, world = comm.rank, comm.world_size
    bits = hashlib.sha256()
    for number, (dtype, count) in enumerate((d, n) for d in params["dtypes"] for n in params["counts"]):
        parts = [data_of(r, number, count, dtype) for r in range(world)]
        got = parts[rank].copy()
        comm.allreduce(got, dtype=dtype)
        assert close_enough(got, parts, dtype), f"allreduce of {count} {dtype}"
        bits.update(got.tobytes())
        root = number % world
        summed = parts[rank].copy()
        comm.reduce(summed, root=root, dtype=dtype)
        expected = summed if rank == root else parts[rank]
        assert np.array_equal(summed.view("u1"), expected.view("u1"))
        assert rank != root or close_enough(summed, parts, dtype), f"reduce of {count} {dtype} to {root}"
        copied = parts[rank].copy()
        comm.broadcast(copied, root=root)
        assert copied.tobytes() == parts[root].tobytes(), f"broadcast of {count} {dtype} from {root}"
    comm.barrier()
    say("result", digest=bits.hexdigest())


def pipelined(comm: Communicator, params: dict[str, Any]) -> None:
    """Many operations of different kinds and sizes under way at once; each ends with its own result."""
    rank, world = comm.rank, comm.world_size
    rng = np.random.default_rng(7)
    works = []
    for number in range(params["operations"]):
        count = int(rng.choice([0, 1, 17, 4096, 70_000]))
        kind = str(rng.choice(["allreduce", "reduce", "broadcast"]))
        root = int(rng.integers(world))
        parts = [data_of(r, number, count, "f32") for r in range(world)]
        mine = parts[rank].copy()
        if kind == "allreduce":
            work = comm.allreduce(mine, async_op=True)
        elif kind == "reduce":
            work = comm.reduce(mine, root=root, async_op=True)
        else:
            work = comm.broadcast(mine, root=root, async_op=True)
        works.append((work, mine, kind, root, parts))
    for work, mine, kind, root, parts in reversed(works):
        work.wait()
        assert work.done()
        if kind == "broadcast":
            assert np.array_equal(mine, parts[root])
        elif kind == "allreduce" or rank == root:
            assert close_enough(mine, parts, "f32")
        else:
            assert np.array_equal(mine, parts[rank])
    say("result", operations=len(works))


def summing(comm: Communicator, params: dict[str, Any]) -> None:
    """Some allreduces of one size; says a digest of the last result, and how long they took together."""
    parts = [data_of(rank, 0, params["count"], "f32") for rank in range(comm.world_size)]
    got = [parts[comm.rank].copy() for _ in range(params["times"])]
    comm.barrier()
    begin = time.monotonic()
    for work in [comm.allreduce(array, async_op=True) for array in got]:
        work.wait()
    took = time.monotonic() - begin
    assert close_enough(got[-1], parts, "f32")
    say("result", digest=hashlib.sha256(got[-1].tobytes()).hexdigest(), seconds=took)


def endless(comm: Communicator, params: dict[str, Any]) -> None:
    """Allreduces until one fails; a rank named in `late` stops calling after `late_after` of them, but lives on."""
    array = np.ones(params["count"], "f4")
    if params.get("forks") and os.fork() == 0:
        os.read(0, 1)  # ends with the test, not with its parent
        os._exit(0)
    step = 0
    while True:
        if comm.rank in params.get("late", ()) and step == params["late_after"]:
            say("late")
            sys.stdin.read()
        try:
            comm.allreduce(array)
        except FireflyerError as error:
            say(
                "failed", type=type(error).__name__, culprit=getattr(error, "rank", None), message=str(error), step=step
            )
            break
        step += 1
        if step in (1, 20):
            say("step", step=step)
    try:
        comm.barrier()
    except FireflyerError as error:
        say("failed again", type=type(error).__name__, culprit=getattr(error, "rank", None), message=str(error))
    say("gave up")
    sys.stdin.read()


def aborting(comm: Communicator, params: dict[str, Any]) -> None:
    try:
        comm.barrier()
        if comm.rank == params["by"]:
            comm.abort("enough")
        while True:
            comm.allreduce(np.ones(10, "f4"))
    except FireflyerError as error:
        say("failed", type=type(error).__name__, culprit=getattr(error, "rank", None), message=str(error))


def leaving(comm: Communicator, params: dict[str, Any]) -> None:
    """Some ranks end the process with operations pending, without close()."""
    array = np.ones(1_000_000, "f4")
    if comm.rank in params["leavers"]:
        comm.barrier()
        comm.allreduce(array, async_op=True)
        comm.allreduce(array, async_op=True)
        say("leaving")
        return
    try:
        comm.barrier()  # which the leaver may have left, and more than that, before this rank notices that it is over
        for _ in range(3):
            comm.allreduce(array)
    except FireflyerError as error:
        say("failed", type=type(error).__name__, culprit=getattr(error, "rank", None), message=str(error))


class DivertedStore(StoreClient):
    """Publishes a proxy's port in place of the one at which this node listens, and says the true one."""

    proxy_port: int | None = None

    def set(self, key: str, value: bytes) -> None:
        if "/node/" in key and self.proxy_port is not None:
            doors = json.loads(value)
            say("listening", port=doors["port"])
            value = json.dumps(doors | {"port": self.proxy_port}).encode()
        super().set(key, value)


SCENARIOS: dict[str, Callable[[Communicator, dict[str, Any]], None]] = {
    function.__name__: function for function in (correctness, pipelined, summing, endless, aborting, leaving)
} | exchange_scenarios.SCENARIOS


def main() -> None:
    arguments = json.loads(sys.argv[1])
    params = arguments["params"]
    if arguments["namespace"] is not None:
        enter_namespace(arguments["namespace"])
    secret = load_secret(arguments["secret_file"])
    store = DivertedStore(arguments["store"], secret)
    store.proxy_port = params.get("proxies", {}).get(str(arguments["node"]))
    nodes = params.get("plan_nodes")
    plan = msgspec.json.decode(params["plan"], type=Plan) if "plan" in params else None
    if nodes is not None:
        algorithm = params.get("algorithm")
        routes = None if algorithm is None else [Route("allreduce", None, algorithm, params["chunk_bytes"])]
        plan = make_plan(
            nodes,
            chunk_bytes=params["chunk_bytes"],
            window=params["window"],
            routes=routes,
            sockets=params.get("sockets", 1),
        )
    comm = Communicator.create(
        rank=arguments["rank"],
        world_size=arguments["world_size"],
        node=arguments["node"],
        store=store,
        secret=secret,
        plan=plan,
        host=arguments["host"],
        timeout_ns=arguments["timeout_ns"],
    )
    store.close()
    say("joined", pid=os.getpid(), at_ns=time.monotonic_ns())
    SCENARIOS[arguments["scenario"]](comm, params)
    if arguments["scenario"] != "leaving":
        comm.close()
    say("done")


if __name__ == "__main__":
    main()
