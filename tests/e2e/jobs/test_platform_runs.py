"""Runs of the platform on real agents, which follow a manager that the test plays."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from tests.support.jobs.launching import wait_until
from tests.support.machines.machines import Machines, needs_machines
from tests.support.network.free_ports import free_port
from tests.support.patience import allowed_s

from fireflyer.base.errors import Busy, PermissionDenied
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.records import AgentDirectory, Membership
from fireflyer.cluster.schema.agent import ASK_AGENT, LIST_GUARDS, STOP_GUARD, GuardName
from fireflyer.cluster.schema.hosts import HostQuestion
from fireflyer.cluster.schema.job import SHIPPED_NODE_CHECK
from fireflyer.cluster.schema.sync import (
    SYNC,
    EndedRun,
    LaunchOrder,
    Orders,
    RunNode,
    RunOrder,
    RunStatus,
    Saving,
    Sync,
)
from fireflyer.cluster.schema.tasks import Cause, Program, TaskSpec
from fireflyer.cluster.schema.tickets import Claims, open_launch, seal_launch
from fireflyer.cluster.schema.wire import Done
from fireflyer.identity.handshake import DerivedCredential, UserCredential, UserKey, token_id_of, token_key
from fireflyer.runtime import run
from fireflyer.runtime.rpc import Accepts, Address, Caller, RpcClient, RpcServer

pytestmark = pytest.mark.processes
CALL_NS: Final = 60 * SECOND
RUN: Final = "0a0b0c0d0e0f"
SCRIPT: Final = """\
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "task", os.environ["FF_TASK_ID"], flush=True)
while os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
REPORTING: Final = """\
from fireflyer.base.events import CheckpointReport, ResumeReport
from fireflyer.cluster.sdk import should_suspend
from fireflyer.runtime.environment import read_environment
from fireflyer.runtime.reporter import Reporter

reporter = Reporter.from_environment(read_environment())
reporter.resume(ResumeReport(rank=0, attempt=0, step=0, checkpoint=None))
reporter.checkpoint(CheckpointReport(rank=0, attempt=0, step=1, bytes=1, stall_ns=2 * 10**9, write_ns=10**9))
reporter.checkpoint(CheckpointReport(rank=0, attempt=0, step=2, bytes=1, stall_ns=5, write_ns=5, error="disk full"))
should_suspend()
"""
"""Before `SCRIPT`."""


class FakeManager:
    """Serves SYNC: says what each node is to run, and hears what it does."""

    def __init__(self, names: tuple[str, ...], tmp_path: Path) -> None:
        self.names = names
        self.credentials = {name: f"fft1.{name}.{secrets.token_hex(8)}" for name in names}
        self.directories = {name: AgentDirectory(str(tmp_path / name)) for name in names}
        self.ports = {name: free_port() for name in names}
        self.said: dict[str, Sync] = {}
        self.orders: dict[str, Orders] = {}
        self.changed = asyncio.Condition()
        self.stop_after_ns = 60 * SECOND
        self.serves: tuple[str, ...] = ("--own-user",)
        """Options of the agents that say for whom they start ranks."""
        self.address: Address | None = None
        self._version = 1
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._server: RpcServer | None = None

    async def serve(self) -> None:
        self._server = RpcServer(Accepts(None, self._find), identity="manager")
        self._server.register(SYNC, self._sync)
        self.address = await self._server.start("127.0.0.1", 0 if self.address is None else self.address.port)

    async def vanish(self) -> None:
        assert self._server is not None
        await self._server.close()

    def start_agent(self, name: str) -> None:
        directory = self.directories[name]
        if directory.membership() is None:
            directory.join(
                Membership(
                    machine=name,
                    issuer=str(self.address),
                    credential=self.credentials[name],
                    port=self.ports[name],
                    address="127.0.0.1",
                    managers=(str(self.address),),
                )
            )
        with open(os.path.join(directory.path, "agent.log"), "ab") as log:
            self._agents[name] = subprocess.Popen(
                [sys.executable, "-m", "fireflyer", "agent", "run", "--dir", directory.path, *self.serves],
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def kill_agent(self, name: str) -> None:
        agent = self._agents.pop(name)
        agent.send_signal(signal.SIGKILL)
        agent.wait()

    def end_agents(self) -> None:
        for name in list(self._agents):
            self.kill_agent(name)

    async def order(self, name: str, *runs: RunOrder) -> None:
        self._version += 1
        self.orders[name] = Orders(term=1, version=self._version, runs=runs, stop_after_ns=self.stop_after_ns)
        async with self.changed:
            self.changed.notify_all()

    async def wait_for(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(allowed_s(30)), self.changed:
            await self.changed.wait_for(what)

    def run_on(self, name: str, token: str = RUN) -> RunStatus | None:
        sync = self.said.get(name)
        return None if sync is None else next((one for one in sync.runs if one.token == token), None)

    async def state(self, name: str, state: str, token: str = RUN) -> RunStatus:
        def reached() -> bool:
            status = self.run_on(name, token)
            return status is not None and status.state == state

        await self.wait_for(reached)
        status = self.run_on(name, token)
        assert status is not None
        return status

    def launch(self, spec: TaskSpec, *names: str, token: str = RUN, nonce: bytes = b"n" * 32) -> LaunchOrder:
        nodes = tuple(RunNode(name=name, address="127.0.0.1", port=self.ports[name]) for name in names)
        order = LaunchOrder(task=7, run=0, user="ada", spec=spec, nodes=nodes)
        claims = Claims(token, 7, "ada", len(names), int(time.time()) + 3600)
        keys = {name: token_key(self.credentials[name]) for name in names}
        return seal_launch(order, claims, keys, nonce=nonce, user_token="fft1.run.secret")

    def ticket(self, launch: LaunchOrder, name: str) -> DerivedCredential:
        opened = open_launch(launch, token_key(self.credentials[launch.nodes[0].name]))
        return opened.tickets[[node.name for node in launch.nodes].index(name)]

    async def _find(self, token_id: str) -> UserKey | None:
        for name, credential in self.credentials.items():
            if token_id_of(credential) == token_id:
                return UserKey(name, token_key(credential))
        return None

    async def _sync(self, sync: Sync, caller: Caller) -> Orders:
        name = caller.identity
        async with self.changed:
            before = self.said.get(name)
            assert before is None or (sync.incarnation, sync.sequence) > (before.incarnation, before.sequence)
            self.said[name] = sync
            self.changed.notify_all()
            try:
                async with asyncio.timeout(0.5):
                    await self.changed.wait_for(lambda: self._orders(name).version > sync.heard)
            except TimeoutError:
                pass
        return self._orders(name)

    def _orders(self, name: str) -> Orders:
        return self.orders.get(name, Orders(term=1, version=1, stop_after_ns=self.stop_after_ns))


@asynccontextmanager
async def cluster(
    tmp_path: Path, *names: str, stop_after_ns: int = 60 * SECOND, serves: tuple[str, ...] = ("--own-user",)
) -> AsyncIterator[FakeManager]:
    manager = FakeManager(names, tmp_path)
    manager.stop_after_ns, manager.serves = stop_after_ns, serves
    await manager.serve()
    try:
        for name in names:
            manager.start_agent(name)
        await manager.wait_for(lambda: set(manager.said) == set(names))
        yield manager
    finally:
        for name in names:
            await manager.order(name)
        try:
            await manager.wait_for(
                lambda: all(one.state == "gone" for name in names for one in manager.said[name].runs)
            )
        finally:
            manager.end_agents()
            await manager.vanish()


def in_cluster(
    tmp_path: Path, test: Callable[[FakeManager], Coroutine[Any, Any, None]], *names: str, **options: Any
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, *names, **options) as manager:
            await test(manager)

    run(main())


def task(tmp_path: Path, *, nodes: int = 1, before: str = "", **more: Any) -> TaskSpec:
    """Its ranks run as long as the file `held` is there."""
    (tmp_path / "held").touch()
    script = tmp_path / "job.py"
    script.write_text(before + SCRIPT)
    program = Program(script=str(script), args=(str(tmp_path / "held"),), workdir=str(tmp_path))
    return TaskSpec(name="job", program=program, least_nodes=nodes, most_nodes=nodes, **more)


def log_of(manager: FakeManager, name: str, rank: int) -> str:
    job = Path(manager.directories[name].path, "runs", RUN, "job")
    log = job / "logs" / "attempt-0" / f"rank-{rank}.log"
    return log.read_text() if log.exists() else ""


async def printed(manager: FakeManager, name: str) -> None:
    """Until rank 0 has."""
    await asyncio.to_thread(wait_until, lambda: bool(log_of(manager, name, 0)), allowed_s(30))


def saving_on(manager: FakeManager, name: str) -> Saving:
    status = manager.run_on(name)
    return (status.saving if status is not None else None) or Saving()


def ended(status: RunStatus) -> EndedRun:
    assert status.ended is not None
    return status.ended


def test_a_run_on_one_node_is_started_reported_and_forgotten(tmp_path: Path) -> None:
    async def test(manager: FakeManager) -> None:
        launch = manager.launch(task(tmp_path, before=REPORTING), "a")
        await manager.order("a", RunOrder(run_token=RUN, wanted="run", launch=launch))
        assert (await manager.state("a", "running")).lead
        await manager.wait_for(lambda: (saving := saving_on(manager, "a")).asks and saving.age_ns is not None)
        saving = saving_on(manager, "a")
        assert saving.save_ns == 3 * SECOND, "of the last one that was committed"
        assert (saving.age_ns or 0) >= 3 * SECOND, "the state is older than its checkpoint"
        assert 0 < (saving.start_ns or 0) < 60 * SECOND
        (tmp_path / "held").unlink()
        end = ended(await manager.state("a", "gone"))
        assert (end.cause, end.exit_code) == (Cause.SUCCEEDED, 0), end
        assert end.parts.total_ns > 0
        assert log_of(manager, "a", 0) == "rank 0 of 1 task 7\n"
        await manager.order("a", RunOrder(run_token=RUN, wanted="forget"))
        await manager.wait_for(lambda: manager.run_on("a") is None)
        assert "token" not in os.listdir(os.path.join(manager.directories["a"].path, "runs", RUN, "job"))

    in_cluster(tmp_path, test, "a")


def test_a_run_on_two_nodes_survives_the_death_of_its_agents_and_of_the_manager(tmp_path: Path) -> None:
    async def test(manager: FakeManager) -> None:
        launch = manager.launch(task(tmp_path, nodes=2), "a", "b")
        await manager.order("a", RunOrder(run_token=RUN, wanted="run", launch=launch))
        await asyncio.sleep(0.5)  # its launcher asks for b before b has heard of the run
        await manager.order("b", RunOrder(run_token=RUN, wanted="run"))
        await manager.state("a", "running")
        await manager.state("b", "running")
        incarnations = {name: manager.said[name].incarnation for name in "ab"}
        for name in "ab":
            manager.kill_agent(name)
        await manager.vanish()
        for name in "ab":
            manager.start_agent(name)
        await manager.serve()
        await manager.wait_for(lambda: all(manager.said[name].incarnation > incarnations[name] for name in "ab"))
        await manager.state("a", "running")
        await manager.state("b", "running")
        (tmp_path / "held").unlink()
        assert ended(await manager.state("a", "gone")).cause is Cause.SUCCEEDED
        assert [log_of(manager, "a", rank) for rank in (0, 1)] == [f"rank {n} of 2 task 7\n" for n in (0, 1)]
        await manager.order("b", RunOrder(run_token=RUN, wanted="stop"))
        assert (await manager.state("b", "gone")).ended is None

    in_cluster(tmp_path, test, "a", "b")


def test_a_run_is_suspended_and_another_one_stopped(tmp_path: Path) -> None:
    async def test(manager: FakeManager) -> None:
        other = "ffffffffffff"
        spec = task(tmp_path, grace_ns=SECOND)
        first = RunOrder(run_token=RUN, wanted="run", launch=manager.launch(spec, "a"))
        second = RunOrder(run_token=other, wanted="run", launch=manager.launch(spec, "a", token=other))
        await manager.order("a", first, second)
        await manager.state("a", "running")
        await manager.state("a", "running", other)
        await printed(manager, "a")
        await manager.order("a", RunOrder(run_token=RUN, wanted="suspend"), RunOrder(run_token=other, wanted="stop"))
        assert ended(await manager.state("a", "gone")).cause is Cause.INTERRUPTED  # it never asks whether to leave
        assert ended(await manager.state("a", "gone", other)).cause is Cause.STOPPED
        await manager.order("a", first, second)  # of a manager that does not know it: neither is started again
        assert (await manager.state("a", "gone")).ended is not None
        never = RunOrder(run_token="abababababab", wanted="suspend", launch=manager.launch(spec, "a"))
        await manager.order("a", first, second, never)
        assert ended(await manager.state("a", "gone", "abababababab")).cause is Cause.SUSPENDED

    in_cluster(tmp_path, test, "a")


@pytest.mark.slow
def test_runs_end_with_the_lease_of_their_node_also_where_its_agent_is_dead(tmp_path: Path) -> None:
    async def test(manager: FakeManager) -> None:
        launch = manager.launch(task(tmp_path, nodes=2), "a", "b")
        await manager.order("a", RunOrder(run_token=RUN, wanted="run", launch=launch))
        await manager.order("b", RunOrder(run_token=RUN, wanted="run"))
        await manager.state("a", "running")
        await manager.state("b", "running")
        await manager.vanish()
        manager.kill_agent("b")
        await asyncio.to_thread(wait_until, lambda: not living(RUN), allowed_s(60), pause_s=0.2)
        manager.start_agent("b")
        await manager.serve()
        assert ended(await manager.state("a", "gone")).cause is Cause.INTERRUPTED
        assert (await manager.state("b", "starting")).ended is None
        await manager.order("b", RunOrder(run_token=RUN, wanted="stop"))
        await manager.state("b", "gone")

    in_cluster(tmp_path, test, "a", "b", stop_after_ns=int(allowed_s(6) * SECOND))


def test_a_ticket_opens_its_run_alone_and_not_once_that_is_stopped(tmp_path: Path) -> None:
    async def test(manager: FakeManager) -> None:
        launch = manager.launch(task(tmp_path, nodes=2), "a", "b")
        address = Address("127.0.0.1", manager.ports["b"])
        question = HostQuestion(workdir="/", script="none", kind="script", run_dir="/", mark="none")
        ticket = manager.ticket(launch, "b")
        client = await RpcClient.connect(address, ticket, CALL_NS)
        try:
            with pytest.raises(Busy, match="has not told it of this run"):
                await client.call(ASK_AGENT, question, CALL_NS)
            await manager.order("b", RunOrder(run_token=RUN, wanted="run"))
            await manager.state("b", "starting")
            assert (await client.call(ASK_AGENT, question, CALL_NS)).cores > 0
            with pytest.raises(PermissionDenied, match="guards of another run"):
                await client.call(STOP_GUARD, GuardName("ffffffffffff.0.1"), CALL_NS)
            with pytest.raises(PermissionDenied, match="credential of the machine"):
                await client.call(LIST_GUARDS, Done(), CALL_NS)
            await manager.order("b", RunOrder(run_token=RUN, wanted="stop"))
            await manager.state("b", "gone")
            with pytest.raises(PermissionDenied, match="was stopped"):
                await client.call(ASK_AGENT, question, CALL_NS)
        finally:
            await client.close()
        of_a = manager.ticket(launch, "a")
        for stranger in (DerivedCredential(ticket.identity, of_a.key), UserCredential("fft1.b.other")):
            with pytest.raises(PermissionDenied):
                await RpcClient.connect(address, stranger, CALL_NS)

    in_cluster(tmp_path, test, "a", "b")


def living(token: str) -> list[int]:
    """Processes of the run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path("/proc", pid, "environ").read_bytes()
        except OSError:
            continue
        if f"FF_JOB_TOKEN={token}".encode() in environ:
            found.append(int(pid))
    return found


def others_can_run_this_python() -> bool:
    real = Path(sys.executable).resolve()
    return all(one.stat().st_mode & 0o001 for one in (real, *real.parents))


ROOT_ONLY: Final = pytest.mark.skipif(
    os.geteuid() != 0 or not others_can_run_this_python(),
    reason="only root starts ranks as other accounts, with a Python that these can run",
)
PROBE: Final = """\
import json, os, sys
def readable(path):
    try:
        return bool(os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1))
    except OSError:
        return False
told = {
    "uids": os.getresuid(), "gids": os.getresgid(), "groups": os.getgroups(), "home": os.environ["HOME"],
    "user": os.environ["USER"], "secret": "SECRET_OF_ROOT" in os.environ, "token": os.stat(os.environ["FF_TOKEN_FILE"]).st_mode & 0o777,
    "readable": [path for path in sys.argv[2:] if readable(path)],
    "open": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
}
print(json.dumps(told), flush=True)
"""  # noqa: E501


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that every account reaches."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


@ROOT_ONLY
@pytest.mark.parametrize("nodes", [1, 2])
def test_an_agent_of_root_starts_a_run_as_the_account_of_its_user_out_of_reach_of_its_credentials(
    tmp_path: Path, open_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    monkeypatch.setenv("SECRET_OF_ROOT", "x")
    nobody = pwd.getpwnam("nobody")
    (tmp_path / "accounts.toml").write_text('[accounts]\nada = "nobody"\nroot = "root"\n')
    script = open_path / "probe.py"
    script.write_text(PROBE)
    names = ("a", "b")[:nodes]

    async def test(manager: FakeManager) -> None:
        path = manager.directories["a"].path
        private = (path, f"{path}/membership.json", f"{path}/runs", f"{path}/lease", str(tmp_path))
        program = Program(script=str(script), args=("x", *private), workdir=str(open_path))
        spec = TaskSpec(name="probe", program=program, least_nodes=nodes, most_nodes=nodes)
        for name in names[1:]:
            await manager.order(name, RunOrder(run_token=RUN, wanted="run"))
        await manager.order("a", RunOrder(run_token=RUN, wanted="run", launch=manager.launch(spec, *names)))
        end = ended(await manager.state("a", "gone"))
        assert end.cause is Cause.SUCCEEDED, end
        told = json.loads((open_path / "runs" / RUN / "logs" / "attempt-0" / "rank-0.log").read_text())
        assert told["uids"] == [nobody.pw_uid] * 3
        assert told["gids"] == [nobody.pw_gid] * 3
        assert 0 not in told["groups"]
        assert (told["user"], told["home"]) == ("nobody", nobody.pw_dir)
        assert not told["secret"]
        assert told["token"] == 0o600
        assert told["readable"] == []
        assert not [name for name in told["open"] if "memfd" in name or path in name]
        assert os.stat(open_path / "runs" / RUN).st_uid == nobody.pw_uid
        other = "ffffffffffff"
        launch = msgspec.structs.replace(manager.launch(spec, "a", token=other), user="root")
        await manager.order("a", RunOrder(run_token=other, wanted="run", launch=launch))
        assert "rights of root" in ended(await manager.state("a", "gone", other)).reason

    serves = ("--accounts", str(tmp_path / "accounts.toml"), "--accounts-dir", str(open_path / "runs"))
    in_cluster(tmp_path, test, *names, serves=serves)


@needs_machines
@pytest.mark.slow
def test_accounts_of_a_machine_where_others_can_run_python() -> None:
    if others_can_run_this_python():
        pytest.skip("the tests of accounts run here")
    with Machines(["a"]) as machines:
        tests = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", "agent_of_root", __file__]
        done = machines["a"].run(tests)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 passed" in done.stdout


def failing(tmp_path: Path, node_check: tuple[str, ...], manager: FakeManager, *names: str, **more: Any) -> LaunchOrder:
    """A run whose rank 0 exits with 7, which says nothing about whose fault that is."""
    (tmp_path / "job.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(7)\ntime.sleep(600)\n"
    )
    program = Program(
        script=str(tmp_path / "job.py"), workdir=str(tmp_path), env={"PYTHONPATH": str(tmp_path / "none")}
    )
    spec = TaskSpec(name="job", program=program, least_nodes=len(names), most_nodes=len(names), **more)
    return msgspec.structs.replace(manager.launch(spec, *names), node_check=node_check)


def test_a_run_leaves_a_node_that_the_check_finds_at_fault(tmp_path: Path) -> None:
    check = tmp_path / "check.py"
    check.write_text(
        "import os\nprint(os.environ['FF_NODE_PEERS'])\nprint('suspect: link: eth1 has gone')\nos._exit(2)"
    )

    async def test(manager: FakeManager) -> None:
        launch = failing(tmp_path, (sys.executable, "-u", str(check)), manager, "a", "b")
        await manager.order("a", RunOrder(run_token=RUN, wanted="run", launch=launch))
        await manager.order("b", RunOrder(run_token=RUN, wanted="run"))
        end = ended(await manager.state("a", "gone"))
        assert (end.cause, end.exit_code, end.bad_nodes) == (Cause.INFRASTRUCTURE, 7, ("a",)), end
        assert end.reason == (
            "a: the check found the node at fault: link: eth1 has gone; rank 0 (node 0) exited with code 7; "
            "not restarted on a node that the check found at fault"
        )
        assert check_logs(manager, RUN)[0].startswith(f"127.0.0.1:{manager.ports['b']}\n")
        await manager.order("b", RunOrder(run_token=RUN, wanted="stop"))

    in_cluster(tmp_path, test, "a", "b")


def check_logs(manager: FakeManager, token: str) -> list[str]:
    logs = Path(manager.directories["a"].path, "runs", token, "job").glob("logs/attempt-?/rank-0.check.log")
    return [log.read_text() for log in sorted(logs)]


@pytest.mark.slow
def test_on_a_sound_node_and_without_a_program_it_is_the_users_error_as_before(tmp_path: Path) -> None:
    async def test(manager: FakeManager) -> None:
        logs = []
        for token, check in ((RUN, (SHIPPED_NODE_CHECK, "--memory", "32MiB")), ("1" * 12, ("/no/such/check",))):
            launch = failing(tmp_path, check, manager, "a", max_restarts=1)
            await manager.order("a", RunOrder(run_token=token, wanted="run", launch=launch))
            end = ended(await manager.state("a", "gone", token))
            assert (end.cause, end.bad_nodes) == (Cause.PROGRAM, ()), end
            logs.append(check_logs(manager, token))
        assert [text.splitlines()[-1][:6] for text in logs[0]] == ["sound:"] * 2, "the restart of before is left"

    in_cluster(tmp_path, test, "a")
