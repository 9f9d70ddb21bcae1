"""`python -m fireflyer.validators`: the check of this node that comes with Fire-Flyer.

It follows the contract of `ff run --on-failure` (`cluster.core.node_check`): exit code 0, nothing is wrong, 2, the node
is suspect; anything else, it could not be found out. A line for each finding, the verdict last.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Final, NoReturn

import msgspec

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.units import SECOND, parse_bytes, parse_duration
from fireflyer.validators.core.judge import Report, judge
from fireflyer.validators.gather import Plan, gather, plan_of

__all__ = ["main"]

SOUND: Final = 0
CANNOT_TELL: Final = 1
SUSPECT: Final = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """argparse would exit with 2, which blames the node."""
        raise UsageError(f"{message}; see python -m fireflyer.validators --help")


def _plan(arguments: list[str]) -> Plan:
    parser = _Parser(prog="python -m fireflyer.validators", description=__doc__, add_help=True)
    parser.add_argument("--directory", action="append", help="check this directory; by default run, work and temporary")
    parser.add_argument("--peer", action="append", metavar="HOST:PORT", help="connect to it")
    parser.add_argument("--memory", metavar="SIZE", help="test at most so much memory  [default: 1GiB]")
    parser.add_argument("--memory-time", metavar="TIME", help="and for so long  [default: 1s]")
    parser.add_argument("--sys", default="/sys", help=argparse.SUPPRESS)
    parser.add_argument("--proc", default="/proc", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    plan = plan_of(os.environ, os.getcwd())
    return msgspec.structs.replace(
        plan,
        directories=tuple(given.directory or plan.directories),
        peers=tuple(given.peer or plan.peers),
        memory_bytes=parse_bytes(given.memory) if given.memory else plan.memory_bytes,
        memory_s=parse_duration(given.memory_time) / SECOND if given.memory_time else plan.memory_s,
        sys_root=given.sys,
        proc_root=given.proc,
    )


def _show(report: Report) -> None:
    for finding in report.findings:
        print(f"{finding.part:<6}  {finding.level:<5}  {finding.text}")
    print(report.verdict, flush=True)


def main(arguments: list[str]) -> int:
    try:
        report = judge(gather(_plan(arguments)))
    except (FireflyerError, OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return CANNOT_TELL
    _show(report)
    return SUSPECT if report.suspect else SOUND


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # a thread that waits for a disk would hold the process
