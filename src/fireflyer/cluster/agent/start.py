"""`python -P -m fireflyer.cluster.agent.start RECORD`: becomes the guard of one node, which no agent is a parent of.

The agent runs it with the guard's orders on standard input, the file for the guard's words as standard output and that
for its log as standard error; other descriptors that it has (the lock by which others see that the guard lives) go to
the guard. It leaves its parent, writes to the file RECORD which process it is, and becomes the guard: so an agent that
is killed meanwhile loses nothing.
"""

from __future__ import annotations

import os
import sys

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS
from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.cluster.schema.hosts import NodeOrders
from fireflyer.cluster.supervisor.remote import guard_program, read_orders
from fireflyer.identity.private_files import write_private_file
from fireflyer.runtime.processes.identity import identity_of

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Does not return in the guard."""
    try:
        (record,) = arguments
        orders = msgspec.json.decode(read_orders(0), type=NodeOrders)
        if os.fork():
            return 0
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        argv, environment = guard_program(orders, detached=True)
        identity = identity_of(os.getpid())
        if identity is None:
            raise UsageError("/proc does not show this process; mount it")
        write_private_file(record, msgspec.json.encode(identity))
        os.execve(argv[0], argv, environment)  # noqa: S606
    except (FireflyerError, OSError, *DECODE_ERRORS) as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
