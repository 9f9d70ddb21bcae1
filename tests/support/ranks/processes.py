"""Real processes as the ranks of a group, and what they say while they run a scenario.

Each rank runs a function of `tests.support.ranks.collective_scenarios` and prints one JSON object a line: its events.
The test waits for events, kills and stops ranks, and lets no process survive.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.network.namespaces import Host, Network, enter_namespace
from tests.support.patience import allowed_s
from tests.support.ranks.forked import NUMPY, Forked

from fireflyer.base.units import SECOND
from fireflyer.identity.secrets import new_secret, save_secret
from fireflyer.runtime.rpc import Accepts, RpcServer
from fireflyer.runtime.store import StoreService

__all__ = ["Event", "Ranks", "ranks_running", "store_running"]

Event = dict[str, Any]


class Ranks:
    def __init__(self) -> None:
        self.processes: list[Forked] = []
        self._events: list[list[Event]] = []
        self._changed = threading.Condition()
        self._readers: list[threading.Thread] = []

    def start(
        self,
        arguments: dict[str, Any],
        module: str = "tests.support.ranks.collective_scenarios",
        *,
        imports: tuple[str, ...] = NUMPY,
        env: Mapping[str, str] | None = None,
    ) -> None:
        process = Forked(module, json.dumps(arguments), imports=imports, env=env)
        self.processes.append(process)
        self._events.append([])
        reader = threading.Thread(target=self._read, args=(process, self._events[-1]))
        reader.start()
        self._readers.append(reader)

    def _read(self, process: Forked, events: list[Event]) -> None:
        for line in process.stdout:
            with self._changed:
                events.append(json.loads(line) | {"at": time.monotonic()})
                self._changed.notify_all()
        with self._changed:
            events.append({"event": "end of output", "at": time.monotonic()})
            self._changed.notify_all()

    def wait_for(
        self, name: str, ranks: Sequence[int] | None = None, *, count: int = 1, limit_s: float = 60
    ) -> dict[int, Event]:
        """The `count`-th event of that name of each rank. `limit_s`: of a machine that is not busy."""
        wanted = range(len(self.processes)) if ranks is None else ranks

        def found() -> dict[int, Event] | None:
            seen = {rank: [e for e in self._events[rank] if e["event"] == name] for rank in wanted}
            for rank, events in seen.items():
                over = any(e["event"] == "end of output" for e in self._events[rank])
                assert not over or len(events) >= count, f"rank {rank} ended: {self._events[rank]}"
            if any(len(events) < count for events in seen.values()):
                return None
            return {rank: events[count - 1] for rank, events in seen.items()}

        began = time.monotonic()
        with self._changed:
            while (result := found()) is None:
                left = began + allowed_s(limit_s) - time.monotonic()
                assert left > 0, f"no {name!r} within {limit_s} s: {[e[-3:] for e in self._events]}"
                self._changed.wait(left)
        return result

    def send_signal(self, rank: int, number: signal.Signals) -> float:
        """The instant (monotonic seconds) just before the signal."""
        at = time.monotonic()
        self.processes[rank].send_signal(number)
        return at

    def say_to(self, rank: int) -> None:
        """Gives it the line that it waits for."""
        self.processes[rank].stdin.write("\n")
        self.processes[rank].stdin.flush()

    def exit_codes(self, limit_s: float = 60) -> list[int]:
        return [process.wait(allowed_s(limit_s)) for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()  # also ends a stopped one
            process.wait()
            process.stdin.close()  # which also ends the children of scenarios
        for reader in self._readers:
            reader.join()
        for process in self.processes:
            process.stdout.close()


@contextmanager
def store_running(directory: Path, where: Host | None = None) -> Iterator[tuple[str, str]]:
    """The address of a store served from this process, and its secret file; on another host by one of its threads."""
    secret = new_secret()
    secret_file = str(directory / "secret")
    save_secret(secret, secret_file)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> tuple[RpcServer, str]:
        if where is not None:
            enter_namespace(where.namespace)
        server = RpcServer(Accepts(secret))
        StoreService(server)
        return server, str(await server.start("127.0.0.1" if where is None else where.address, 0))

    server, address = asyncio.run_coroutine_threadsafe(begin(), loop).result(30)
    try:
        yield address, secret_file
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def ranks_running(
    directory: Path,
    nodes: Sequence[int],
    scenario: str,
    *,
    timeout_ns: int = 20 * SECOND,
    module: str = "tests.support.ranks.collective_scenarios",
    network: Network | None = None,
    **params: Any,
) -> Iterator[Ranks]:
    """One process for each entry of `nodes`, which names the node of that rank, or the host of `network`."""
    directory.mkdir(exist_ok=True)
    os.chmod(directory, 0o700)
    with store_running(directory, None if network is None else network.control) as (address, secret_file):
        ranks = Ranks()
        try:
            for rank, node in enumerate(nodes):
                host = None if network is None else network.hosts[node]
                ranks.start(
                    {
                        "rank": rank,
                        "world_size": len(nodes),
                        "node": node,
                        "store": address,
                        "host": "127.0.0.1" if host is None else host.address,
                        "namespace": None if host is None else host.namespace,
                        "secret_file": secret_file,
                        "scenario": scenario,
                        "timeout_ns": timeout_ns,
                        "params": params,
                    },
                    module,
                )
            yield ranks
        finally:
            ranks.close()
