"""The platform on machines: managers over one PostgreSQL, TLS off loopback, agents without a shared directory, links
that are cut."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.machines.machines import USER, WORK, Machines, needs_machines
from tests.support.machines.plan import USER_ID
from tests.support.machines.postgres import start_postgres
from tests.support.patience import allowed_s
from tests.support.platform.certificates import Authority
from tests.support.platform.machines_desk import AGENTS_PORT, MANAGER_HOME, PORT, Agent, Caller, Desk, Manager
from tests.support.platform.running import wait_for

from fireflyer.base.errors import TransientError
from fireflyer.cluster.client import Client, Connection, ManagerAddress
from fireflyer.cluster.core.platform.views import TaskAnswer
from fireflyer.cluster.schema.api import API
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Outcome

pytestmark = [needs_machines, pytest.mark.slow, pytest.mark.processes]

NODES: Final = ("a", "b", "c", "d")
"""Managers on a and b, users on c, PostgreSQL on d."""
STOP_AFTER_S: Final = 20
"""A question that is held for 5 s, one that finds in 8 s that the manager is silent, and the time in which runs are
stopped politely, a fifth of this."""
STOP_SLACK_S: Final = 3
KILL_S: Final = 10
JOB: Final = f"{WORK}/job"
SCRIPT: Final = """\
import os, pathlib, stat, subprocess, sys, time
import numpy as np
from fireflyer.collectives import Communicator
from fireflyer.runtime import read_environment

name, here, env = sys.argv[1], pathlib.Path(sys.argv[2]), read_environment()

def ff(*words):
    done = subprocess.run([sys.executable, "-P", "-m", "fireflyer", *words], capture_output=True, text=True)
    print("ff", *words, done.returncode, *(done.stdout + done.stderr).split(), flush=True)

with Communicator.from_environment(env) as comm:
    ranks = np.ones(1)
    comm.allreduce(ranks)
    print(int(ranks[0]), "ranks, one as", os.getuid(), "on", os.uname().nodename, flush=True)
token = os.environ["FF_TOKEN_FILE"]
print("token", oct(stat.S_IMODE(os.stat(token).st_mode)), os.stat(token).st_uid, flush=True)
with open(here / f"{name}.started", "a") as file:
    print("rank", env.rank, "run", os.environ["FF_RUN_NUMBER"], file=file, flush=True)
while not (here / f"{name}.go").exists():
    time.sleep(0.05)
if env.rank == 0:
    ff("ps")
print("done on", os.uname().nodename, flush=True)
"""


class Platform:
    """Managers on a and b over a PostgreSQL on d, agents on all, users on c."""

    def __init__(self, machines: Machines, shared: Path) -> None:
        self.machines = machines
        self.here = Caller(machines["c"])
        self.operator, self.user = Desk(machines["c"], "root"), Desk(machines["c"])
        self.managers = self._managers(shared)
        for manager in self.managers.values():  # the first one leads
            manager.start()
        self.admin_token = self.managers["a"].new_administrator("ops")
        self.operator.ff("login", *self.login, given=self.admin_token + "\n")
        self.user_token = self.operator.ff("user", "add", USER, "--token").strip()
        self.user.ff("login", *self.login, given=self.user_token + "\n")
        self.client = Client(self.connection)
        self.agents = {name: Agent(machines[name]) for name in NODES}
        with ThreadPoolExecutor(len(NODES)) as beside:
            list(beside.map(self._begin_agent, NODES))
        wait_for(lambda: self.states() == dict.fromkeys(NODES, "idle"), "all nodes are there")
        job = machines["c"].path(JOB)
        job.mkdir()
        (job / "job.py").write_text(SCRIPT)

    def _begin_agent(self, name: str) -> None:
        self.agents[name].join(self.operator.ff("node", "token", name).strip(), self.managers["a"].agents)
        self.agents[name].start()

    def close(self) -> None:
        self.here.call(self.client.close)
        self.here.close()

    def _managers(self, shared: Path) -> dict[str, Manager]:
        _, store = start_postgres(self.machines["d"], "10.88.0.0/16")
        secret = secrets.token_bytes(32)
        settings: dict[str, Any] = {
            "cluster": secrets.token_hex(16),
            "store": store,
            "managers": tuple(f"{self.machines[name].address}:{AGENTS_PORT}" for name in "ab"),
            "objects": str(shared / "objects"),
            "lease_ms": 2000,
            "lost_ms": 7000,
            "stop_after_ms": 1000 * STOP_AFTER_S,
            "stop_slack_ms": 1000 * STOP_SLACK_S,
        }
        named = {"listen": f"0.0.0.0:{PORT}", "listen_agents": f"0.0.0.0:{AGENTS_PORT}",
                 "advertise": f"https://b:{PORT}", "advertise_agents": f"b:{AGENTS_PORT}"}  # fmt: skip
        return {
            "a": Manager(self.machines["a"], secret, **settings),
            "b": Manager(self.machines["b"], secret, **settings, **named),
        }

    @property
    def login(self) -> list[str]:
        """Words of `ff login`."""
        return [word for one in self.managers.values() for word in (one.url, "--fingerprint", one.fingerprint)]

    @property
    def connection(self) -> Connection:
        """With addresses instead of names: a process of the test knows no names of machines."""
        first, second = (
            ManagerAddress(url=f"https://{one.machine.address}:{PORT}", fingerprint=one.fingerprint)
            for one in self.managers.values()
        )
        token = self.admin_token
        return Connection(url=first.url, fingerprint=first.fingerprint, token=token, others=(second,))

    def leader(self) -> str:
        """The machine of the manager that leads."""
        address = self.here.call(lambda: (self.client.nodes(), self.client.manager.url)[1])
        return next(name for name, one in self.managers.items() if one.machine.address in address)

    def leads(self, name: str) -> bool:
        """Asks that manager alone."""
        one = self.managers[name]
        url = f"https://{one.machine.address}:{PORT}"

        def ask() -> bool:
            with Client(Connection(url=url, token=self.admin_token, fingerprint=one.fingerprint)) as client:
                try:
                    return bool(client.cluster())
                except TransientError:
                    return False

        return self.here.call(ask)

    def states(self) -> dict[str, str]:
        return {node.name: node.state for node in self.here.call(self.client.nodes)}

    def task(self, task: int) -> TaskAnswer:
        return self.here.call(lambda: self.client.task(task))

    def until(self, task: int, true: Callable[[TaskAnswer], bool], what: str, *, limit_s: float = 30.0) -> TaskAnswer:
        found: list[TaskAnswer] = []

        def look() -> bool:
            with contextlib.suppress(TransientError):
                found[:] = [self.task(task)]
                assert true(found[0]) or found[0].task.state is not FINISHED, (what, found[0], self.log())
                return true(found[0])
            return False

        try:
            wait_for(look, what, limit_s=limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}: {found}\n{self.log()}") from None
        return found[0]

    def finished(self, task: int, *, limit_s: float = 30.0) -> TaskAnswer:
        return self.until(task, lambda answer: answer.task.state is FINISHED, "the end", limit_s=limit_s)

    def submit(self, name: str, *options: str) -> int:
        return self.user.submit("--name", name, *options, "job.py", "--", name, WORK, directory=JOB)

    def started(self, name: str) -> dict[str, list[str]]:
        """What ranks wrote on each machine when they began."""
        files = {node: self.machines[node].path(f"{WORK}/{name}.started") for node in NODES}
        return {node: file.read_text().splitlines() for node, file in files.items() if file.exists()}

    def run_with_ranks(self, name: str, count: int, *options: str) -> int:
        task = self.submit(name, *options)
        self.until(task, lambda _: sum(map(len, self.started(name).values())) == count, f"{name} runs")
        return task

    def let_go(self, name: str) -> None:
        for node in NODES:
            self.machines[node].path(f"{WORK}/{name}.go").touch()

    def log(self) -> str:
        managers = [f"--- manager {name}\n{one.log()}" for name, one in self.managers.items()]
        return "\n".join([*managers, *(f"--- agent {name}\n{one.log()}" for name, one in self.agents.items())])


@pytest.fixture(scope="module")
def platform(module_path: Path) -> Iterator[Platform]:
    with Machines(NODES, shared=[module_path]) as machines:
        platform = Platform(machines, module_path)
        yield platform
        platform.close()


def test_who_logs_in_names_the_fingerprint_and_nothing_is_sent_in_clear(platform: Platform) -> None:
    manager, desk = platform.managers["a"], platform.user
    given, config = f"{platform.user_token}\n", {"XDG_CONFIG_HOME": "/tmp/another"}
    refusals = {
        (manager.url, "--fingerprint", "0" * 64): "has another certificate",
        (manager.url,): "is not trusted: self-signed certificate; log in with the fingerprint that the manager prints",
        (manager.url, "--fingerprint", manager.fingerprint[:40]): "is no fingerprint",
        (manager.url.replace("https", "http"),): "would send the token in clear; use https",
    }
    for words, why in refusals.items():
        assert why in desk.refused("login", *words, given=given, **config), words
    assert not desk.machine.path("/tmp/another").exists()
    said = desk.ff("login", manager.url, "--fingerprint", manager.fingerprint.upper(), given=given, **config)
    assert said.startswith(f"logged in as {USER}")
    assert "TASK" in desk.ff("ps", **config)


def test_the_cookie_of_the_page_is_not_sent_in_clear_nor_shown_to_scripts_nor_sent_from_other_sites(
    platform: Platform,
) -> None:
    def log_in() -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with contextlib.closing(
            http.client.HTTPSConnection(platform.machines["a"].address, PORT, context=context)
        ) as page:
            body = json.dumps({"token": platform.user_token})
            page.request("POST", f"{API}/session", body, {"Content-Type": "application/json"})
            answer = page.getresponse()
            assert answer.status == http.client.CREATED, answer.read()
            return str(answer.headers["Set-Cookie"])

    name, *rest = platform.here.call(log_in).split("; ")
    assert name.startswith("ff_session=")
    assert {"Secure", "HttpOnly", "SameSite=strict"} <= set(rest)


def test_a_certificate_of_the_site_needs_no_fingerprint_but_who_signed_it_and_the_right_name(
    platform: Platform, tmp_path: Path
) -> None:
    machine, authority = platform.machines["c"], Authority()
    files = {"tls_certificate": f"{MANAGER_HOME}/c.crt", "tls_key": f"{MANAGER_HOME}/c.key"}
    cluster, store = secrets.token_hex(16), f"embedded:{MANAGER_HOME}/store"
    site = Manager(machine, secrets.token_bytes(32), cluster=cluster, store=store, listen=f"0.0.0.0:{PORT}", **files)
    for path in authority.issue(tmp_path, "c"):
        site.write(path.name, path.read_bytes())
    authority.save(machine.path("/tmp/authority.pem"))
    token = site.new_administrator("eve") + "\n"
    site.start()
    assert site.url == f"https://c:{PORT}", "it listens everywhere, and is reached by the name of its machine"
    config = {"XDG_CONFIG_HOME": "/tmp/site"}
    knows = {**config, "SSL_CERT_FILE": "/tmp/authority.pem"}
    desk = platform.user
    assert "unable to get local issuer certificate" in desk.refused("login", site.url, given=token, **config)
    said = desk.refused("login", f"https://{machine.address}:{PORT}", given=token, **knows)
    assert "is not valid for '10.88.0.3'; use a name that the certificate has" in said
    wait_for(lambda: desk.try_ff("login", site.url, given=token, **knows).returncode == 0, "it lets in")
    # What a user uses is known to a manager that leads, and this one may not yet.
    wait_for(lambda: desk.try_ff("whoami", **knows).returncode == 0, "it leads")
    assert desk.ff("whoami", **knows).startswith("eve")
    site.kill()


def test_a_task_of_two_machines_runs_and_asks_the_managers_and_its_logs_arrive(platform: Platform) -> None:
    task = platform.run_with_ranks("two", 2, "--nodes", "2")
    nodes = platform.task(task).task.nodes
    assert platform.user.ff("exec", str(task), "--rank", "1", "--", "hostname") == f"{nodes[1]}\n"
    platform.let_go("two")
    answer = platform.finished(task)
    assert answer.task.outcome is Outcome.SUCCEEDED, (answer, platform.log())
    first, second = answer.runs[0].nodes
    assert platform.started("two") == {first: ["rank 0 run 0"], second: ["rank 1 run 0"]}
    lines = platform.user.ff("logs", str(task)).splitlines()
    for rank, node in enumerate((first, second)):
        assert f"[{rank}] 2 ranks, one as {USER_ID} on {node}" in lines, lines
        assert f"[{rank}] token 0o600 {USER_ID}" in lines, lines
        assert f"[{rank}] done on {node}" in lines, lines
    (asked,) = (line for line in lines if "ff ps" in line)
    assert asked.startswith("[0] ff ps 0 TASK"), asked
    assert f"{task} two {USER} running" in asked, asked


def test_another_manager_leads_when_the_machine_of_the_leader_is_cut_off_and_its_tasks_are_run_elsewhere(
    platform: Platform,
) -> None:
    first = platform.leader()
    second = "b" if first == "a" else "a"
    cut, others = platform.machines[first], {"a", "b", "c"} - {first}
    before = {pid for pid, _ in cut.processes()}
    stays = platform.run_with_ranks("stays", 2, "--nodes", "2", "--nodelist", ",".join(sorted(others)))
    moves = platform.run_with_ranks("moves", 2, "--nodes", "2", "--max-restarts", "0")
    assert set(platform.started("moves")) == {first, "d"}
    assert {pid for pid, _ in cut.processes()} - before

    follows = platform.machines["c"].start(
        ["ff", "logs", "-f", str(stays)], user=USER, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert follows.stdout is not None
    assert "2 ranks" in follows.stdout.readline()

    platform.machines.cut(first)
    cut_s = time.monotonic()
    wait_for(lambda: platform.leads(second), "the other leads")
    took_s = time.monotonic() - cut_s
    assert took_s < allowed_s(10), took_s
    began_s = time.monotonic()
    assert f"stays  {USER}  running" in platform.user.ff("ps")
    assert time.monotonic() - began_s < allowed_s(10)

    platform.let_go("stays")
    answer = platform.finished(stays)
    assert (answer.task.outcome, len(answer.runs)) == (Outcome.SUCCEEDED, 1), (answer, platform.log())
    assert sorted(line for lines in platform.started("stays").values() for line in lines) == [
        "rank 0 run 0",
        "rank 1 run 0",
    ]
    rest, _ = follows.communicate(timeout=allowed_s(30))
    assert follows.returncode == 0
    assert sorted(line for line in rest.splitlines() if "done" in line) == [
        f"[{rank}] done on {node}" for rank, node in enumerate(answer.runs[0].nodes)
    ]
    (asked,) = (line for line in rest.splitlines() if "ff ps" in line)
    assert asked.startswith("[0] ff ps 0 TASK"), asked

    def left() -> list[list[str]]:
        return [argv for pid, argv in cut.processes() if pid not in before]

    wait_for(lambda: not left(), "nothing of the run lives", limit_s=STOP_AFTER_S + KILL_S)
    assert platform.task(moves).task.runs == 1, "it is not run again before"
    platform.until(
        moves, lambda _: sum(map(len, platform.started("moves").values())) == 4, "it is run again", limit_s=90
    )
    assert first not in platform.task(moves).task.nodes
    platform.machines.heal(first)
    platform.let_go("moves")
    answer = platform.finished(moves)
    assert answer.task.outcome is Outcome.SUCCEEDED, (answer, platform.log())
    assert (len(answer.runs), answer.runs[0].cause) == (2, Cause.INFRASTRUCTURE)
    wait_for(lambda: platform.states() == dict.fromkeys(NODES, "idle"), "the node is back")
    assert [line.partition(" run ")[2] for line in platform.started("moves")[first]] == ["0"], "none began there later"
    assert not platform.leads(first)
