"""The agent of a node in a job of Slurm: `python -P -m fireflyer.cluster.agent.job`, started by `srun` on each node of
the job, with `JobOrders` as JSON on standard input.

It joins the platform as this node of this job, with the job's token, which serves once for each node; runs an agent for
as long as the managers want it; and ends with the exit code that they say. The agent and all that it starts are below a
guard, which nothing leaves: when Slurm tells the step to end (SIGTERM) or the agent is killed, the guard kills all of
it. Its directory is private, below $TMPDIR, and is removed at the end.

    job ── joins ──> guard ──> agent (`job serve DIRECTORY`) ──> guards of launchers and supervisors ──> ranks
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Final

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import FireflyerError, TransientError, UsageError
from fireflyer.cluster.agent.accounts import Accounts
from fireflyer.cluster.agent.join import join
from fireflyer.cluster.agent.records import AgentDirectory
from fireflyer.cluster.agent.service import serve_agent
from fireflyer.cluster.core.slurm.request import JobOrders
from fireflyer.runtime import run
from fireflyer.runtime.master_port import reserve_any_port
from fireflyer.runtime.processes.guard_command import GuardCommand

__all__ = ["main"]

_log = logging.getLogger("job")
_MAX_ORDERS_BYTES: Final = 64 << 10
_JOIN_S: Final = 240.0
"""As long as a manager may be away while a job begins."""
_PAUSE_S: Final = 1.0
_NODE_NAME: Final = "SLURMD_NODENAME"


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        if arguments[:1] == ["serve"]:
            return _serve(arguments[1])
        return _job(_read_orders())
    except FireflyerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _read_orders() -> JobOrders:
    """Raises `UsageError`."""
    data = sys.stdin.buffer.read(_MAX_ORDERS_BYTES + 1)
    try:
        return decode_json(data[:_MAX_ORDERS_BYTES], JobOrders)
    except DECODE_ERRORS as error:
        raise UsageError(f"the orders of the job are not understood: {error}") from None


def _job(orders: JobOrders) -> int:
    """Joins, runs the guard, tidies up."""
    node = os.environ.get(_NODE_NAME, "")
    if not node:
        raise UsageError(f"{_NODE_NAME} is not set; this program is started by srun in a job of Slurm")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the guard hears it, and this process then tidies up
    os.environ.setdefault("HOME", pwd.getpwuid(os.getuid()).pw_dir)
    directory = tempfile.mkdtemp(prefix=f"ff-{orders.job}-", dir=os.environ.get("TMPDIR") or None)
    try:
        port, reservation = reserve_any_port(random.SystemRandom(), "end programs on this node that listen")
        with reservation:
            run(_join(AgentDirectory(directory), orders, node, port))
            return _guarded(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _join(directory: AgentDirectory, orders: JobOrders, node: str, port: int) -> None:
    """Raises `FireflyerError` where the token does not serve, or no manager answers for some minutes."""
    until_s = time.monotonic() + _JOIN_S
    while True:
        for manager in orders.managers:
            try:
                await join(directory, orders.token, issuer=manager, port=port, address="", node=node)
            except TransientError as error:
                _log.warning("manager does not answer address=%s reason=%s", manager, error)
                if time.monotonic() >= until_s:
                    raise
            else:
                return
        await asyncio.sleep(_PAUSE_S)


def _guarded(directory: str) -> int:
    """The agent's exit code."""
    command = [sys.executable, "-P", "-m", "fireflyer.cluster.agent.job", "serve", directory]
    guard = GuardCommand.here(command, detached=True)
    done = subprocess.run(guard.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    codes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("exited ")]
    return int(codes[-1]) if codes else 1


def _serve(directory: str) -> int:
    """The agent, as a child of the guard."""
    accounts = Accounts(os.geteuid(), own_user=True)

    async def serve() -> int:
        opened = AgentDirectory(directory)
        code = await serve_agent(opened, on_ready=lambda address: _log.info("agent %s", address), accounts=accounts)
        return 0 if code is None else code

    return run(serve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
