"""Tokens of runs: the processes of a run ask the API as its user, with bounded rights, as long as the run goes on."""

from __future__ import annotations

import asyncio
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from tests.support.loops import on_loop
from tests.support.patience import allowed_s
from tests.support.platform.manager import ManagerProcess, ScriptedAgent
from tests.support.platform.running import RunningPlatform, task_of, wait_for

from fireflyer.accounts.remembered import RememberedUsers
from fireflyer.accounts.remote import RemoteAccounts
from fireflyer.base.errors import PermissionDenied
from fireflyer.cluster.client import Client, Connection, read_connection
from fireflyer.cluster.core.platform.commands import StopTask
from fireflyer.cluster.schema.logs import LogText
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, Program, TaskSpec
from fireflyer.identity import NodeCredential, UserKey, new_secret, save_secret
from fireflyer.identity.handshake import token_id_of, token_key

pytestmark = pytest.mark.processes

API: Final = "/api/v1"
INSIDE: Final = """\
import os, pathlib, stat, subprocess, sys, time
here = pathlib.Path(sys.argv[1])
path = os.environ["FF_TOKEN_FILE"]
assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
token = open(path).read()
assert not any(token in value for value in os.environ.values())
ff = [sys.executable, "-P", "-m", "fireflyer"]
print(subprocess.run([*ff, "whoami"], check=True, capture_output=True, text=True).stdout, flush=True)
(here / f"token-{os.environ['RANK']}.part").write_text(token)
if os.environ["RANK"] == "0":
    subprocess.run([*ff, "submit", "--no-snapshot", "--name", "child", str(here / "child.py")], check=True, cwd=here)
os.rename(here / f"token-{os.environ['RANK']}.part", here / f"token-{os.environ['RANK']}")
while not (here / "go").exists():
    time.sleep(0.02)
"""


def leads(manager: ManagerProcess) -> bool:
    return manager.ask("GET", f"{API}/health").status == 200


@pytest.fixture(scope="module")
def manager(module_path: Path) -> Iterator[ManagerProcess]:
    with ManagerProcess(module_path / "manager") as running:
        wait_for(lambda: leads(running), "it leads")
        yield running


def submitted(manager: ManagerProcess, agent: ScriptedAgent, name: str, user: str = "ada") -> tuple[int, str]:
    """A task that is to start on the node of the agent, and the token of its run."""
    with manager.client(user) as client:
        (task,) = client.submit(TaskSpec(name=name, program=Program(script="train.py")), key=name)
    wait_for(lambda: any(run.launch for run in agent.sync().runs), "it is to start")
    return task, agent.run_token(task)


def test_a_token_counts_for_its_run_alone_whichever_leader_sends_it(tmp_path: Path) -> None:
    with ManagerProcess(tmp_path / "manager") as manager, ExitStack() as stack:
        wait_for(lambda: leads(manager), "it leads")
        agent = stack.enter_context(ScriptedAgent(manager, "gpu-1"))
        task, token = submitted(manager, agent, "train")

        def status(method: str, path: str, body: object = None) -> int:
            return manager.ask(method, f"{API}{path}", token=token, body=body).status

        who = manager.ask("GET", f"{API}/session", token=token)
        assert who.body | {"csrf": "", "expires_s": 0} == {
            "user": "ada", "roles": [], "csrf": "", "expires_s": 0, "task": task, "run": 0,
        }  # fmt: skip
        assert status("GET", f"/tasks/{task}") == 200
        for method, path, body in (
            ("GET", "/identity/users", None),
            ("GET", "/identity/users/ada/tokens", None),
            ("POST", "/identity/users/ada/tokens", {}),
            ("DELETE", "/identity/users/bob", None),
            ("POST", "/machines/gpu-2/token", {}),
        ):
            assert status(method, path, body) == 403, path
        assert manager.ask("POST", f"{API}/session", body={"token": token}).status == 401
        number, _, secret = token.rpartition(".")
        for other in (f"{number}.{secret[:-2]}AA", f"fft1.run-{task}-1.{secret}", f"fft1.run-99-0.{secret}"):
            assert manager.ask("GET", f"{API}/session", token=other).status == 401
        data = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
        assert secret.encode() not in data

        manager.end(signal.SIGKILL)
        manager.start()
        wait_for(lambda: leads(manager), "it leads again")
        agent.move_to(manager)
        wait_for(lambda: any(run.launch for run in agent.sync().runs), "the order comes again")
        assert agent.run_token(task) == token
        agent.follow()
        agent.sync()
        wait_for(lambda: status("GET", "/session") == 200, "the run goes on")
        agent.follow()
        agent.sync()
        wait_for(lambda: status("GET", "/session") == 401, "the run has ended")


def test_a_token_is_refused_once_its_run_is_to_stop_or_its_user_is_gone(manager: ManagerProcess) -> None:
    with ScriptedAgent(manager, "gpu-1") as agent:
        task, token = submitted(manager, agent, "stopped")
        agent.follow_starts()
        agent.sync()
        with manager.client("ada") as client:
            client.command(StopTask(task=task))
        assert manager.ask("GET", f"{API}/session", token=token).status == 401
        agent.follow()
        agent.sync()
        agent.follow()

        task, token = submitted(manager, agent, "removed", "bob")
        assert manager.ask("GET", f"{API}/session", token=token).status == 200
        with manager.client("admin") as client:
            client.remove_user("bob")
            assert manager.ask("GET", f"{API}/session", token=token).status == 401
            client.create_user("bob")
        assert manager.ask("GET", f"{API}/session", token=token).status == 401


@on_loop
async def test_services_of_a_file_system_are_told_whose_token_it_is_as_long_as_it_counts(tmp_path: Path) -> None:
    secret = new_secret()
    save_secret(secret, str(tmp_path / "node-secret"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"127.0.0.1:{free.getsockname()[1]}"
    settings = {"listen_accounts": at, "accounts_secret_file": str(tmp_path / "node-secret")}
    with ManagerProcess(tmp_path / "manager", **settings) as manager:
        await asyncio.to_thread(wait_for, lambda: manager.ask("GET", f"{API}/health").status == 200, "it leads")
        with ScriptedAgent(manager, "gpu-1") as agent:
            task, token = await asyncio.to_thread(submitted, manager, agent, "train")
            ada = manager.users.account("ada")
            async with RemoteAccounts([at], NodeCredential(secret, "fs manager")) as accounts:
                accounts._remembered = RememberedUsers(lifetime_ns=0)
                own = await accounts.find(token_id_of(manager.tokens["ada"]))
                assert own == UserKey("ada", token_key(manager.tokens["ada"]), ada)
                of_run = await accounts.find(f"run-{task}-0")
                assert of_run == UserKey("ada", token_key(token), ada, scope="run")
                for other in (f"run-{task}-1", "run-99-0", "run-x", "run-", "0" * 16, "é"):
                    assert await accounts.find(other) is None
                agent.follow_starts()
                await asyncio.to_thread(agent.sync)
                with manager.client("ada") as client:
                    await asyncio.to_thread(client.command, StopTask(task=task))
                assert await accounts.find(f"run-{task}-0") is None


def test_a_stream_of_logs_ends_with_the_token_that_asked(manager: ManagerProcess) -> None:
    with manager.client("ada") as client:
        (task,) = client.submit(TaskSpec(name="waits", program=Program(script="train.py")), key="waits")
        own = client.issue_token("ada").token
        request = urllib.request.Request(f"{manager.url}{API}/tasks/{task}/logs/events")
        request.add_header("Authorization", f"Bearer {own}")
        with urllib.request.urlopen(request, timeout=allowed_s(30)) as stream:
            assert stream.readline()
            client.revoke_token("ada", own.split(".")[1])
            said = stream.read()  # until it ends
        assert b"LogsEnded" not in said
        client.command(StopTask(task=task))


@pytest.mark.slow
def test_a_task_asks_and_submits_as_its_user_with_the_token_of_its_run(tmp_path: Path) -> None:
    script, child = tmp_path / "job.py", tmp_path / "child.py"
    script.write_text(INSIDE)
    child.write_text("print('child')")
    with RunningPlatform(tmp_path / "platform", nodes=2, users=("ada",)) as platform:
        ada = platform.client("ada")
        (task,) = ada.submit(task_of(script, "job", str(tmp_path), nodes=2), key="job")
        files = [tmp_path / "token-0", tmp_path / "token-1"]
        platform.until(ada, task, lambda _: all(file.exists() for file in files), "both ranks have asked")
        (token,) = {file.read_text() for file in files}
        connection = Connection(url=read_connection(platform.layout.connection_file).url, token=token)
        with Client(connection) as inside:
            assert (inside.whoami().user, inside.whoami().task) == ("ada", task)
            (tmp_path / "go").touch()
            assert platform.finished(ada, task).task.outcome is Outcome.SUCCEEDED
            with pytest.raises(PermissionDenied):
                inside.whoami()
        (found,) = ada.tasks(user="ada", name="child").tasks
        assert platform.finished(ada, found.id).task.state is FINISHED
        texts = [event.text for event in ada.logs(task) if isinstance(event, LogText)]
        assert any(f"ada, as run 0 of task {task}" in text for text in texts), texts
