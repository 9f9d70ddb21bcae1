"""Processes that are started without standard input, output or error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

from fireflyer.base.events import JobFinished, decode_log

_RUN = """
import asyncio, socket
from fireflyer.runtime import run

async def main():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    await reader.read()
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()

run(main())
"""
_BLOCKING = """
from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import SECOND
from fireflyer.identity.secrets import new_secret
from fireflyer.runtime.rpc import BlockingRpcClient, NodeCredential
try:
    BlockingRpcClient.connect("127.0.0.1:1", NodeCredential(new_secret(), "x"), SECOND)
except FireflyerError:
    pass
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("program", [_RUN, _BLOCKING], ids=["run", "blocking"])
def test_a_loop_survives_without_standard_streams(program: str, closed: str) -> None:
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", program], timeout=allowed_s(60)
    )
    assert ended.returncode == 0


@pytest.mark.processes
@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_job_runs_without_standard_streams(tmp_path: Path, closed: str) -> None:
    script = tmp_path / "job.py"
    script.write_text("print('hello')\n")
    command = [sys.executable, "-m", "fireflyer", "run", "--run-dir", str(tmp_path / "run"), str(script)]
    ended = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *command], timeout=allowed_s(60))
    assert ended.returncode == 0
    with open(tmp_path / "run" / "events.jsonl", "rb") as file:
        assert isinstance(decode_log(file)[-1].event, JobFinished)
    assert (tmp_path / "run" / "logs" / "attempt-0" / "rank-0.log").read_text() == "hello\n"
