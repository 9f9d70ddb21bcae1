"""What a rank does in the tests of the collectives. Run as `python -m tests.support.ranks.collective_scenarios
JSON`."""

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
from tests.support.collectives.calls import DTYPES, KINDS, Begun, Call, agrees, all_calls, begin, data_of
from tests.support.collectives.fp8_overflow import count_clipped, overflows
from tests.support.network.namespaces import enter_namespace
from tests.support.ranks import dispatch_scenarios, exchange_scenarios

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives import Communicator, Plan, Route, make_plan
from fireflyer.collectives.p2p.peer_listener import ListenAddress
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.store import StoreClient


def say(event: str, **fields: Any) -> None:
    """In one write, whichever thread says it and whenever the process is killed."""
    os.write(1, (json.dumps({"event": event} | fields) + "\n").encode())


def correctness(comm: Communicator, params: dict[str, Any]) -> None:
    """Every operation with every type, some of them under way side by side; says a digest of the results that all ranks
    have, which must be the same everywhere."""
    bits = hashlib.sha256()
    pending: list[Begun] = []

    def finish() -> None:
        for begun in reversed(pending):
            begun.check()
        for begun in pending:
            for result in begun.results:
                bits.update(result.tobytes())
        pending.clear()

    kinds, dtypes = params.get("kinds", KINDS), params.get("dtypes", DTYPES)
    rounds = range(*params.get("rounds", (0, 1)))
    for number, call in enumerate(all_calls(comm.world_size, params["counts"], rounds=rounds)):
        if call.kind not in kinds or call.dtype not in dtypes:
            continue
        pending.append(begin(comm, call, async_op=number % 3 > 0))
        if len(pending) == 5:
            finish()
    finish()
    comm.barrier()
    say("result", digest=bits.hexdigest(), operations=sum(comm.stats().operations.values()))


def overflowing(comm: Communicator, params: dict[str, Any]) -> None:
    """Every way to add up fp8 numbers that often do not fit; says how many of each this rank has counted."""
    calls = overflows(params["counts"], comm.world_size)
    say("result", clipped=[count_clipped(comm, call) for call in calls])


def summing(comm: Communicator, params: dict[str, Any]) -> None:
    """Some allreduces of one size; says a digest of the last result, and how long they took together."""
    parts = [data_of(Call("allreduce", "f32"), rank, params["count"]) for rank in range(comm.world_size)]
    got = [parts[comm.rank].copy() for _ in range(params["times"])]
    comm.barrier()
    began = time.monotonic()
    for work in [comm.allreduce(array, async_op=True) for array in got]:
        work.wait()
    took = time.monotonic() - began
    assert agrees(got[-1], parts, "f32", "sum")
    say("result", digest=hashlib.sha256(got[-1].tobytes()).hexdigest(), seconds=took)


def endless(comm: Communicator, params: dict[str, Any]) -> None:
    """Allreduces until one fails; a rank named in `late` stops calling after `late_after` of them, but lives on."""
    array = comm.empty(params["count"]) if params.get("registered") else np.ones(params["count"], "f4")
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
    """Publishes a proxy's port in place of the one at which this node, or this rank, listens, and says the true one."""

    proxy_port: int | None = None
    listen_port: int | None = None

    def set(self, key: str, value: bytes) -> None:
        of_rank, of_node = ("/door/", "rank listening", self.listen_port), ("/node/", "listening", self.proxy_port)
        for place, event, proxy_port in (of_rank, of_node):
            if place in key and proxy_port is not None:
                address = msgspec.json.decode(value, type=ListenAddress)
                say(event, port=address.port)
                value = msgspec.json.encode(msgspec.structs.replace(address, port=proxy_port))
        super().set(key, value)


SCENARIOS: dict[str, Callable[[Communicator, dict[str, Any]], None]] = (
    {function.__name__: function for function in (correctness, overflowing, summing, endless, aborting, leaving)}
    | exchange_scenarios.SCENARIOS
    | dispatch_scenarios.SCENARIOS
)


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
        kinds = params.get("kinds", ["allreduce"])
        routes = algorithm and [Route(kind, None, algorithm, params["chunk_bytes"]) for kind in kinds]
        plan = make_plan(
            nodes,
            chunk_bytes=params["chunk_bytes"],
            window=params["window"],
            routes=routes,
            sockets=params.get("sockets", 1),
        )
    os.environ.update(params.get("environment", {}))
    comm = Communicator.create(
        rank=arguments["rank"],
        world_size=arguments["world_size"],
        node=arguments["node"],
        store=store,
        secret=secret,
        plan=plan,
        host=arguments["host"],
        timeout_ns=arguments["timeout_ns"],
        peer_memory=params.get("peer_memory", True),
        transport=params.get("transport", "tcp"),
    )
    store.close()
    say("joined", pid=os.getpid(), at_ns=time.monotonic_ns(), transport=comm.transport)
    SCENARIOS[arguments["scenario"]](comm, params)
    if arguments["scenario"] != "leaving":
        comm.close()
    say("done")


if __name__ == "__main__":
    main()
