"""Ranks that exchange uneven parts, until one of them and another do not mean the same sizes.

Run as `python -m tests.support.ranks.uneven_ranks JSON`, by `processes`. What is received lies between guards.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from tests.support.ranks.collective_scenarios import say
from tests.support.ranks.joining import joined

from fireflyer.base.errors import FireflyerError
from fireflyer.collectives import Communicator

GUARD = 4096
UNTOUCHED = 0xA5


def exchange(comm: Communicator, params: dict[str, Any], *, wrong: bool) -> tuple[FireflyerError | None, bool]:
    """Rank a sends `usual + a + b` elements to rank b; where `wrong`, `sender` sends `sent` to `receiver`, which
    expects `expected`. Returns what was raised, and whether anything was written beside what is to be received."""
    ranks, me = range(comm.world_size), comm.rank
    in_splits = [params["usual"] + me + other for other in ranks]
    out_splits = list(in_splits)
    if wrong and me == params["sender"]:
        in_splits[params["receiver"]] = params["sent"]
    if wrong and me == params["receiver"]:
        out_splits[params["sender"]] = params["expected"]
    elements = sum(out_splits)
    place = np.empty if not params["arena"] else comm.empty
    memory = np.asarray(place((elements + 2 * GUARD) * 4, "u1" if not params["arena"] else "u8"))
    memory[:] = UNTOUCHED
    out = memory[GUARD * 4 : (GUARD + elements) * 4].view("i4")
    array = np.full(sum(in_splits), me, "i4")
    raised = None
    try:
        comm.all_to_all(out, array, in_splits=in_splits, out_splits=out_splits)
        comm.barrier()  # who is not concerned may have done all of its own
    except FireflyerError as error:
        raised = error
    guards = np.concatenate([memory[: GUARD * 4], memory[(GUARD + elements) * 4 :]])
    return raised, not bool(np.all(guards == UNTOUCHED))


def main() -> None:
    arguments = json.loads(sys.argv[1])
    params = arguments["params"]
    comm = joined(arguments, peer_memory=params["peer_memory"])
    raised, overrun = None, False
    for step in range(3):
        if raised is None:  # who is slow hears of it in the barrier before
            if step == 2:
                say("wrong")
            raised, beside = exchange(comm, params, wrong=step == 2)
            overrun |= beside
    say("failed", type=type(raised).__name__, message=str(raised))
    sys.stdin.read()
    comm.close()
    say("done", overrun=overrun)


if __name__ == "__main__":
    main()
