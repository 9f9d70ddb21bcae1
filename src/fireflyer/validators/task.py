"""`python -m fireflyer.validators.task node|link`: what tasks of `ff validate nodes` and `ff validate links` run.

It prints one line for who has submitted the task (`core.validation.reports`). Faults that it finds are its result: it
exits with 0, so that the task is no failure of a user's program, and is not begun again for them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.units import MIB, SECOND, parse_duration
from fireflyer.collectives.communicator import Communicator
from fireflyer.runtime.environment import read_environment
from fireflyer.validators.core.checks.policy import HealthPolicy
from fireflyer.validators.core.validation.reports import LinkReport, NodeReport, report_line
from fireflyer.validators.stress import cuda, run

__all__ = ["exchange", "main", "validate_node"]

_BLOCK_BYTES: Final = 32 * MIB
_GO_ON: Final = 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see python -m fireflyer.validators.task --help")


def validate_node(only: tuple[str, ...], limit_s: float, directory: str) -> NodeReport:
    """All validators, or those of `only`, one after the other."""
    torch = cuda.usable_torch()
    chosen = [name for name in run.VALIDATORS if (not only and (torch or not name.startswith("gpu_"))) or name in only]
    found = list(run.validate(chosen, run.Load(limit_s, os.path.abspath(directory), torch)))
    now_ns = time.time_ns()
    record = run.record_of(found, run.model_of_node(), now_ns)
    links = run.links(HealthPolicy()) if not only or "links" in only else []
    serials = run.gpu_serials() if torch is not None else {}
    return NodeReport(events=(*links, *run.events_of(found, record, (), now_ns, serials)), record=record)


def exchange(communicator: Any, limit_s: float, block_bytes: int = _BLOCK_BYTES) -> LinkReport:
    """Blocks to the other of two ranks and from it, both at the same time, until rank 0 says that `limit_s` is over. A
    block has another content in each round, and is compared: what came twice, or from the round before, is wrong."""
    other, me = 1 - communicator.rank, communicator.rank
    words = block_bytes // 8
    sent, got = np.empty(words, np.int64), np.zeros(words, np.int64)
    verdict: NDArray[np.int64] = np.array([_GO_ON], np.int64)
    rounds = wrong = 0
    seconds = 0.0
    communicator.barrier().wait()
    began_s = time.monotonic()
    while verdict[0] == _GO_ON:
        sent[:] = _content(me, rounds, words)
        began_round_s = time.monotonic()
        pending = [
            communicator.send(sent, to=other, async_op=True),
            communicator.recv(got, source=other, async_op=True),
        ]
        for one in pending:
            one.wait()
        seconds += time.monotonic() - began_round_s if rounds else 0.0  # the first makes connections and touches memory
        wrong += not np.array_equal(got, _content(other, rounds, words))
        rounds += 1
        verdict[0] = _GO_ON if time.monotonic() - began_s < limit_s or rounds < 2 else 0
        communicator.broadcast(verdict, root=0).wait()
    counts = np.array([wrong], np.int64)
    communicator.allreduce(counts).wait()
    return LinkReport(bytes_per_s=(rounds - 1) * block_bytes / seconds, wrong_blocks=int(counts[0]))


def _content(rank: int, round_number: int, words: int) -> NDArray[np.int64]:
    return np.arange(words, dtype=np.int64) * 2 + rank + round_number * 1_000_003


def main(arguments: list[str] | None = None) -> int:
    parser = _Parser(prog="python -m fireflyer.validators.task", description=__doc__)
    parser.add_argument("what", choices=("node", "link"))
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--time", default="10s", metavar="DURATION", help="of each validator, or of a link")
    parser.add_argument("--directory", default=".", metavar="DIR", help="on the storage that is tested")
    try:
        given = parser.parse_args(arguments)
        limit_s = parse_duration(given.time) / SECOND
        if given.what == "node":
            print(report_line(validate_node(tuple(given.only), limit_s, given.directory)), flush=True)
            return 0
        with Communicator.from_environment(read_environment()) as communicator:
            report = exchange(communicator, limit_s)
            if communicator.rank == 0:
                print(report_line(report), flush=True)
    except FireflyerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
