"""Health checks of a node.

`kernel-log/LINES`: so many lines a second, of which each thousandth is an Xid, are followed for 10 s (wall time). The
writer has the kernel's manner: it never waits, and what finds no room is lost. `lost_share`: of
the Xids.
`round`: one round of all checks that are on by default; processor time, that of tools included.
`round-of-a-gpu-node`: the same on files and tools of a node with eight GPUs, where each check comes to a result.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from bench.operators.gpu_node import RULES, make_gpu_node
from bench.report import Measuring, Options, Result, figure, say
from fireflyer.validators.checks.kernel_log import follow_kmsg
from fireflyer.validators.checks.rounds import HealthRounds
from fireflyer.validators.core.checks.policy import HealthPolicy

__all__ = ["run"]

LINES_PER_S: Final = 100_000
XID_EVERY: Final = 1000
SECONDS: Final = {"tiny": 1, "brief": 10, "full": 10}
LOG_LINES: Final = 65_536
"""That the ring holds, as the kernel's with `log_buf_len=4M`."""
_MESSAGE_BYTES: Final = 1024
"""That a message of a socket counts with, whatever its length."""
_PIECE: Final = 100
_SO_SNDBUFFORCE: Final = 32
"""Beyond net.core.wmem_max; needs root."""


def run(options: Options) -> Measuring:
    case = f"kernel-log/{LINES_PER_S}"
    if options.selects(case):
        yield from _kernel_log(case, SECONDS[options.scale])
    if options.selects("round"):
        yield _round("round", options.rounds, HealthPolicy(), HealthRounds(None))
    if options.selects("round-of-a-gpu-node"):
        with tempfile.TemporaryDirectory() as directory:
            root, tools = make_gpu_node(Path(directory))
            policy = msgspec.toml.decode(RULES, type=HealthPolicy)
            rounds = HealthRounds(None, root=root, tool_path=tools)
            yield _round("round-of-a-gpu-node", options.rounds, policy, rounds)
    return ("kernel-log: wall time of a follower; round: processor time",)


def _kernel_log(case: str, seconds: int) -> list[Result]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, LOG_LINES * _MESSAGE_BYTES)
    found: list[int] = []
    wake_r, wake_w = os.pipe()
    ours.setblocking(False)
    follower = threading.Thread(
        target=follow_kmsg, args=(ours.fileno(), 0, wake_r, lambda one: found.append(one.sequence), lambda _: None)
    )
    writer = multiprocessing.get_context("fork").Process(target=_write, args=(theirs, seconds))
    writer.start()
    theirs.close()
    began_s = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF)
    follower.start()
    follower.join()
    took_s = time.monotonic() - began_s
    after = resource.getrusage(resource.RUSAGE_SELF)
    writer.join()
    for fd in (wake_r, wake_w):
        os.close(fd)
    ours.close()
    total = LINES_PER_S * seconds
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lost = total // XID_EVERY - len(found)
    note = f"{total} lines in {took_s:.1f} s, {len(found)} Xids found, {used / took_s:.0%} of a processor"
    at_rate = took_s < 1.2 * seconds  # else the machine was too busy for the writer
    met = False if lost else True if at_rate else None
    return [
        Result(
            suite="operators", case=case, metric="lost_share", better="lower",
            ours=figure([lost / (total // XID_EVERY)]), peers={}, bound=None, target="no Xid is lost", note=note,
            met=met, verdicts={"no Xid is lost": met},
        )
    ]  # fmt: skip


def _write(to: socket.socket, seconds: int) -> None:
    to.setblocking(False)
    began_s = time.monotonic()
    for number in range(1, LINES_PER_S * seconds + 1):
        text = "NVRM: Xid (PCI:0000:3b:00): 63, row" if number % XID_EVERY == 0 else "zone0: port 2 entered a state"
        try:
            to.send(b"6,%d,%d,-;%s\n" % (number, number, text.encode()))
        except BlockingIOError:
            pass  # lost
        if number % _PIECE == 0:
            ahead_s = began_s + number / LINES_PER_S - time.monotonic()
            if ahead_s > 0.001:
                time.sleep(ahead_s)


def _round(case: str, rounds: int, policy: HealthPolicy, checks: HealthRounds) -> Result:
    samples = []
    events = checks.run(policy)  # warms up
    for _ in range(rounds):
        before = os.times()
        events = checks.run(policy)
        after = os.times()
        samples.append(sum(after[:4]) - sum(before[:4]))
    ours = figure(samples)
    ran = len({event.check for event in events if not event.could_not_run})
    for event in events:
        if event.could_not_run or event.severity != "ok":
            say(f"{case} {event.check} {event.severity}: {event.words}")
    note = f"{ran} of {len({event.check for event in events})} checks came to a result on this machine"
    return Result(
        suite="operators", case=case, metric="processor_s", better="lower", ours=ours, peers={}, bound=None,
        target="< 1 s", note=note, met=ours.median < 1, verdicts={"< 1 s": ours.median < 1},
    )  # fmt: skip
