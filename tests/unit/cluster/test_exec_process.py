"""The processes of one exec session, as another account than the agent's."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.patience import allowed_s

from fireflyer.cluster.agent import exec_program
from fireflyer.cluster.agent.accounts import Account
from fireflyer.cluster.agent.exec_process import ExecProcess
from fireflyer.cluster.schema.execs import ExecOrder, ExecProgram

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another account"),
    pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="no Python that other accounts may execute"),
]

RUN = "5eed5eed5eed5eed"
SCRIPT = """\
echo "$(id -u) $(id -G) RANK=$RANK SECRET=$SECRET"
pwd
for fd in /proc/self/fd/*; do readlink $fd; done | grep -c secret
echo "$FF_JOB_TOKEN"
"""


def nobody() -> Account:
    entry = pwd.getpwnam("nobody")
    return Account(uid=entry.pw_uid, gid=entry.pw_gid, groups=(entry.pw_gid,), name="nobody", home="/", shell="/bin/sh")


async def outcome(order: ExecOrder, account: Account, lease: Path) -> tuple[int, str]:
    process = ExecProcess(order, account, str(lease))
    said = b""
    try:
        async with asyncio.timeout(allowed_s(30)):
            process.end_input()
            while process.outputs:
                await process.readable.wait()
                found = process.read(1 << 16)
                said += found[1] if found is not None else b""
            return await process.exit_code(), said.decode()
    finally:
        await process.end()


@pytest.fixture
def executable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpreter and program lie where other accounts get, as on a node; here they may be in a private home."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        copy = shutil.copy(exec_program.__file__, directory)
        os.chmod(copy, 0o644)
        monkeypatch.setattr(exec_program, "__file__", copy)
        monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
        yield


@pytest.mark.usefixtures("executable")
def test_a_command_has_the_rights_of_the_account_and_nothing_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank of another account with the same mark is not taken: whoever could make one would be obeyed."""
    monkeypatch.setenv("SECRET", "of the agent")
    (tmp_path / "secret").write_text("of the agent")
    lease = tmp_path / "lease"
    ends_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 600 * 10**9
    lease.write_text(f"{ends_ns} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}\n")
    account = nobody()
    environment = {"FF_JOB_TOKEN": f"{RUN}.0.0", "PATH": "/usr/bin:/bin"}
    order = ExecOrder(id="0" * 32, run_token=RUN, user="ada", program=ExecProgram(argv=("sh", "-c", SCRIPT)))
    sleep = ["/bin/sleep", "600"]
    with (
        open(tmp_path / "secret"),
        subprocess.Popen(sleep, env={**environment, "RANK": "0"}, cwd="/usr", start_new_session=True) as of_root,
        subprocess.Popen(
            sleep, env={**environment, "RANK": "1"}, cwd="/var", start_new_session=True,
            user=account.uid, group=account.gid, extra_groups=[],
        ) as rank,
    ):  # fmt: skip
        try:
            code, said = asyncio.run(outcome(order, account, lease))
        finally:
            of_root.kill()
            rank.kill()
    lines = said.splitlines()
    assert lines == [f"{account.uid} {account.gid} RANK=1 SECRET=", "/var", "0", f"{RUN}.exec.{'0' * 32}"], said
    assert code == 0
