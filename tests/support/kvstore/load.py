"""Writes into a key-value store until it is killed: `python -m tests.support.kvstore.load URL NAME TASKS COUNT`.

Each transaction writes a pair of keys and counts itself, exactly once; its number is printed when it was acknowledged.
COUNT 0: for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

from fireflyer import kvstore
from fireflyer.base.units import SECOND
from fireflyer.kvstore import Transaction, transact_once
from fireflyer.runtime.driver import run


async def main(url: str, name: str, tasks: int, count: int) -> None:
    numbers = itertools.count()

    async def work(kv: kvstore.Engine) -> None:
        for number in numbers:
            if count and number >= count:
                return
            identity = f"{name}/{number}".encode()

            async def body(tx: Transaction, identity: bytes = identity) -> bytes:
                total = b"%d" % (int(await tx.get(b"total") or b"0") + 1)
                tx.set(b"total", total)
                tx.set(b"left/" + identity, total)
                tx.set(b"right/" + identity, total * 100)
                return total

            await transact_once(kv, body, marker=b"done/" + identity, timeout_ns=50 * SECOND)
            print(identity.decode(), flush=True)

    async with await kvstore.open(url) as kv:
        await asyncio.gather(*(work(kv) for _ in range(tasks)))


if __name__ == "__main__":
    run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
