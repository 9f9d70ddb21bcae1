"""The platform's HTTP API as calls, for programs of users.

    with Client.connect("https://10.0.0.1:9440", token, fingerprint="3f…") as client:
        (task,) = client.submit(TaskSpec(name="train", program=Program(script="train.py")), key="train-1")
        print(client.task(task).why.text)
        client.stop(task)

Methods have the names of the commands of `ff`, where these are no other word: `submit`, `stop`, `suspend`, `logs`.

One connection, used again; not for several threads at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final
from urllib.parse import quote

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, decode_json
from fireflyer.base.errors import DataCorruption, NotFound, TransientError
from fireflyer.base.health_event import HealthEvent
from fireflyer.cluster.core.health.findings import finding_of
from fireflyer.cluster.core.objects.log_follow import Heard
from fireflyer.cluster.core.platform.commands import (
    AddReservation,
    Command,
    DrainNode,
    RemoveLimit,
    RemoveReservation,
    ReportFault,
    ResumeNode,
    ResumeTask,
    SetLimit,
    SetPriority,
    SetShare,
    StopTask,
    SuspendTask,
)
from fireflyer.cluster.core.platform.history_pages import NodePage, RunPage
from fireflyer.cluster.core.platform.views import (
    AuditPage,
    ClusterView,
    LimitUse,
    NodeView,
    PastTaskAnswer,
    PastTaskPage,
    QuotaView,
    TaskAnswer,
    TaskPage,
    TaskReasons,
    UsageReport,
    UserView,
    Why,
)
from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Reservation
from fireflyer.cluster.manager_requests import MAX_MANAGERS, Connection, ManagerAddress, RequestBody, Requests
from fireflyer.cluster.schema.api import (
    KEY_HEADER,
    MAX_REASONS,
    Change,
    Commanded,
    Identity,
    JoinTokenAnswer,
    JoinTokenRequest,
    KnownUser,
    MissingBlobs,
    NewToken,
    NewUser,
    ShownToken,
    Submission,
    Submitted,
    UtilisationReport,
)
from fireflyer.cluster.schema.execs import ExecAccepted, ExecRequest
from fireflyer.cluster.schema.logs import (
    MAX_CHUNK_BYTES,
    FoundLine,
    FoundLines,
    LogEvent,
    LogPiece,
    LogsEnded,
    TaskLogs,
)
from fireflyer.cluster.schema.tasks import Program, TaskSpec
from fireflyer.cluster.schema.webhooks import TASK_EVENTS, NewWebhook, ShownWebhook, WebhookEvent, WebhookView
from fireflyer.identity import TokenInfo
from fireflyer.identity.private_files import read_private_file

__all__ = [
    "MAX_MANAGERS",
    "Client",
    "Connection",
    "Limit",
    "LimitKind",
    "LogsEnded",
    "ManagerAddress",
    "Program",
    "TaskSpec",
    "read_connection",
]

LOGS_PATIENCE_S: Final = 120.0
LOGS_PAUSE_S: Final = 0.5
_MAX_CONNECTION_BYTES: Final = 1 << 20


def read_connection(path: str) -> Connection:
    """Read the file that `ff up` or `ff login` wrote. Raises `NotFound`, `PermissionDenied` where others may read the
    file, `DataCorruption`."""
    data = read_private_file(path, _MAX_CONNECTION_BYTES)
    try:
        return decode_json(data, Connection)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{path} is not what `ff login` writes: {error}; log in again") from None


class Client(Requests):
    """Raises the errors of `base.errors`: what the manager answered, or `Unreachable`. Where the connection names
    several managers, the next one is asked when one cannot be reached or does not lead, for `FAILOVER_S` at most."""

    @classmethod
    def connect(cls, url: str, token: str, *, fingerprint: str = "") -> Client:
        return cls(Connection(url=url, token=token, fingerprint=fingerprint))

    # --- tasks ---

    def submit(self, *specs: TaskSpec, key: str) -> tuple[int, ...]:
        """Numbers of the tasks. `key`: random, or a name; the same key twice makes no second task."""
        return self.ask("POST", "/tasks", Submitted, Submission(specs), headers={KEY_HEADER: key}).tasks

    def task(self, task: int) -> TaskAnswer:
        return self.ask("GET", f"/tasks/{task}", TaskAnswer)

    def tasks(
        self, *, user: str = "", state: str = "", name: str = "", before: int | None = None, limit: int = 100
    ) -> TaskPage:
        """Newest first. `state`: one of `TaskState`, or `unfinished`."""
        return self.ask(
            "GET",
            "/tasks",
            TaskPage,
            query={"user": user, "state": state, "name": name, "before": before, "limit": limit},
        )

    def reasons(self, tasks: Iterable[int]) -> dict[int, Why]:
        """Reasons of tasks to be in their state, by their numbers; tasks that the platform does not know are left out.
        Raises `NotFound` where the manager is of an older release, which says it of one task at a time (`task`)."""
        found: dict[int, Why] = {}
        wanted = list(tasks)
        for first in range(0, len(wanted), MAX_REASONS):
            some = wanted[first : first + MAX_REASONS]
            try:
                answer = self.ask("GET", "/tasks/why", TaskReasons, query={"task": some})
            except NotFound:
                raise NotFound(
                    "the manager is of an older release, which says why of one task at a time: ff show TASK"
                ) from None
            found |= {one.task: one.why for one in answer.reasons if one.why is not None}
        return found

    def would_start(self, spec: TaskSpec) -> Why:
        """Time at which the task would start if it was submitted now."""
        return self.ask("POST", "/tasks/test", Why, spec)

    def task_logs(self, task: int) -> TaskLogs:
        """Names of the logs that there are."""
        return self.ask("GET", f"/tasks/{task}/logs", TaskLogs)

    def log_piece(self, task: int, run: int, stream: str, *, offset: int = 0, limit: int = MAX_CHUNK_BYTES) -> LogPiece:
        """A piece of one log, as `task_logs` names it; go on at its `next_offset`."""
        path = f"/tasks/{task}/logs/{run}/{quote(stream, safe='')}"
        return self.ask("GET", path, LogPiece, query={"offset": offset, "limit": limit})

    def search_logs(
        self, task: int, text: str, *, run: int | None = None, rank: int | None = None
    ) -> Iterator[FoundLine]:
        """Lines of ranks that contain `text`, upper and lower case alike."""
        after = ""
        while True:
            query = {"text": text, "run": run, "rank": rank, "after": after}
            page = self.ask("GET", f"/tasks/{task}/logs/search", FoundLines, query=query)
            yield from page.lines
            after = page.next
            if not after:
                return

    def logs(
        self, task: int, *, run: int | None = None, rank: int | None = None, follow: bool = False
    ) -> Iterator[LogEvent]:
        """Lines of the ranks, run after run; the last event is `LogsEnded`. `follow`: until the task has finished.
        A connection that ends is made again, and nothing is lost or told twice; raises `Unreachable` when no manager
        answered for `LOGS_PATIENCE_S`."""
        heard = Heard()
        answered_s = time.monotonic()
        while True:
            try:
                for event in self._log_events(task, run, rank, follow, heard):
                    answered_s = time.monotonic()
                    if event is not None:
                        yield event
                    if isinstance(event, LogsEnded):
                        return
            except TransientError:
                if time.monotonic() - answered_s > LOGS_PATIENCE_S:
                    raise
            time.sleep(LOGS_PAUSE_S)

    def _log_events(
        self, task: int, run: int | None, rank: int | None, follow: bool, heard: Heard
    ) -> Iterator[LogEvent | None]:
        query = {"run": run, "rank": rank, "wait": None if follow else "false"}
        for number, event in self.stream_events(f"/tasks/{task}/logs/events", LogEvent, heard.text, query):
            if number:
                heard.add(number)
            yield event

    def ask_exec(self, task: int, asked: ExecRequest) -> ExecAccepted:
        """A session in the task, to which to connect at `manager` within seconds: see `cluster.exec_stream`."""
        return self.ask("POST", f"/tasks/{task}/exec", ExecAccepted, asked)

    @property
    def manager(self) -> ManagerAddress:
        """Manager that answered last."""
        return self._manager

    @property
    def connection(self) -> Connection:
        return self._connection

    def command(self, command: Command) -> str:
        """One line that says what was changed."""
        body = msgspec.json.encode(command)
        return self.ask("POST", "/commands", Commanded, msgspec.Raw(body)).text

    def stop(self, task: int, reason: str = "") -> str:
        """Stop for good. What is said of this and of the following is `command`'s line."""
        return self.command(StopTask(task, reason))

    def suspend(self, task: int) -> str:
        return self.command(SuspendTask(task))

    def resume(self, task: int) -> str:
        return self.command(ResumeTask(task))

    def set_priority(self, task: int, priority: int) -> str:
        return self.command(SetPriority(task, priority))

    # --- snapshots; `cluster.sending` sends a directory ---

    def begin_snapshot(self, snapshot: str, manifest: bytes) -> tuple[str, ...]:
        """Blobs of the snapshot that have to be sent."""
        return self.ask("POST", f"/snapshots/{snapshot}", MissingBlobs, manifest).blobs

    def send_blobs(self, snapshot: str, size_bytes: int, frames: Callable[[], Iterable[bytes]]) -> None:
        """Blobs in frames, `size_bytes` of both together; called again where the connection had been closed."""
        self.ask("PUT", f"/snapshots/{snapshot}/blobs", Commanded, RequestBody(size_bytes, frames))

    def seal_snapshot(self, snapshot: str) -> None:
        """All is sent: a task may name it. Raises `NotFound` where something is missing."""
        self.ask("POST", f"/snapshots/{snapshot}/seal", Commanded)

    # --- nodes and the cluster ---

    def nodes(self, *, after: str = "", limit: int = 1000) -> tuple[NodeView, ...]:
        return self.ask("GET", "/nodes", tuple[NodeView, ...], query={"after": after, "limit": limit})

    def node(self, name: str) -> NodeView:
        return self.ask("GET", f"/nodes/{quote(name, safe='')}", NodeView)

    def join_token(self, name: str, *, lifetime_s: int = 600) -> str:
        """Token with which the machine `name` joins, once. For operators."""
        asked = JoinTokenRequest(lifetime_s)
        return self.ask("POST", f"/machines/{quote(name, safe='')}/token", JoinTokenAnswer, asked).token

    def revoke_machine(self, name: str) -> str:
        """Revoke a machine: its agent is let in no more. For operators."""
        return self.ask("DELETE", f"/machines/{quote(name, safe='')}", Commanded).text

    def all_nodes(self) -> Iterator[NodeView]:
        """All nodes, by name."""
        after = ""
        while page := self.nodes(after=after):
            yield from page
            after = page[-1].name

    def drain_node(self, name: str, reason: str) -> str:
        """Drain a node. For operators, as `resume_node`."""
        return self.command(DrainNode(name, reason))

    def report_fault(self, name: str, fault: HealthEvent) -> str:
        """Have a node taken out for a fault that was measured on it, with a ticket where its health is checked. For
        operators."""
        return self.command(ReportFault(name, finding_of(fault)))

    def resume_node(self, name: str) -> str:
        return self.command(ResumeNode(name))

    def add_reservation(self, reservation: Reservation) -> str:
        """Add a reservation, in the place of one of the same name. For operators."""
        return self.command(AddReservation(reservation))

    def remove_reservation(self, name: str) -> str:
        return self.command(RemoveReservation(name))

    def reservations(self) -> tuple[Reservation, ...]:
        """Reservations; those that are over, too, until another one is made."""
        return self.cluster().config.reservations

    # --- limits ---

    def quota(self) -> QuotaView:
        """Limits of the user who asks, and what of them is used."""
        return self.ask("GET", "/quota", QuotaView)

    def limits(self) -> tuple[LimitUse, ...]:
        """All limits, and what is used of each."""
        return self.ask("GET", "/limits", tuple[LimitUse, ...])

    def set_limit(self, limit: Limit) -> str:
        """Set a limit, in the place of one for the same users, nodes and priority. For operators, as `remove_limit`."""
        return self.command(SetLimit(limit))

    def remove_limit(self, limit: Limit) -> str:
        kind, name, node_group, priority = limit.subject
        return self.command(RemoveLimit(kind, name, node_group, priority))

    def set_share(self, user: str, nodes: float | None) -> str:
        """Set the share of a user. For administrators."""
        return self.command(SetShare(user, nodes))

    def users(self) -> tuple[UserView, ...]:
        return self.ask("GET", "/users", tuple[UserView, ...])

    # --- users ---

    def known_users(self, *, after: str = "", limit: int = 1000) -> tuple[KnownUser, ...]:
        """Users by name. For operators, as all changes of others."""
        return self.ask("GET", "/identity/users", tuple[KnownUser, ...], query={"after": after, "limit": limit})

    def create_user(self, name: str, *, roles: tuple[str, ...] = (), uid: int | None = None) -> KnownUser:
        return self.ask("POST", "/identity/users", KnownUser, NewUser(name=name, roles=roles, uid=uid))

    def remove_user(self, name: str) -> str:
        return self.ask("DELETE", _user(name), Commanded).text

    def grant_role(self, name: str, role: str) -> str:
        return self.ask("PUT", f"{_user(name)}/roles/{quote(role, safe='')}", Commanded).text

    def revoke_role(self, name: str, role: str) -> str:
        return self.ask("DELETE", f"{_user(name)}/roles/{quote(role, safe='')}", Commanded).text

    def tokens(self, name: str) -> tuple[TokenInfo, ...]:
        """Tokens of a user, without what makes them valid."""
        return self.ask("GET", f"{_user(name)}/tokens", tuple[TokenInfo, ...])

    def issue_token(self, name: str, *, lifetime_s: int | None = None, label: str = "") -> ShownToken:
        """Shown this once. None: it does not expire."""
        return self.ask("POST", f"{_user(name)}/tokens", ShownToken, NewToken(lifetime_s, label))

    def revoke_token(self, name: str, token_id: str) -> str:
        return self.ask("DELETE", f"{_user(name)}/tokens/{quote(token_id, safe='')}", Commanded).text

    def webhooks(self, *, everybody: bool = False) -> list[WebhookView]:
        """Yours; `everybody`: of all users, for operators."""
        return self.ask("GET", "/webhooks", list[WebhookView], query={"all": "true" if everybody else None})

    def add_webhook(
        self, url: str, *, events: tuple[WebhookEvent, ...] = TASK_EVENTS, named: bool = False
    ) -> ShownWebhook:
        """The secret that signs what is sent is shown this once. `named`: only of tasks that name the URL."""
        new = NewWebhook(url=url, events=events, named=named)
        return self.ask("POST", "/webhooks", ShownWebhook, new)

    def remove_webhook(self, number: int) -> str:
        return self.ask("DELETE", f"/webhooks/{number}", Commanded).text

    def test_webhook(self, number: int) -> str:
        return self.ask("POST", f"/webhooks/{number}/test", Commanded).text

    def whoami(self) -> Identity:
        return self.ask("GET", "/session", Identity)

    def cluster(self) -> ClusterView:
        return self.ask("GET", "/cluster", ClusterView)

    # --- the history ---

    def utilisation(
        self, *, start_ns: int | None = None, end_ns: int | None = None, steps: int = 96
    ) -> UtilisationReport:
        """Node-seconds that were healthy, allocated and productive; by default of the last day."""
        query = {"start_ns": start_ns, "end_ns": end_ns, "steps": steps}
        return self.ask("GET", "/utilisation", UtilisationReport, query=query)

    def usage(self, *, start_ns: int | None = None, end_ns: int | None = None, by: str = "user") -> UsageReport:
        """Usage: what users, or groups (`by` group), had of the cluster; by default in the last day."""
        return self.ask("GET", "/usage", UsageReport, query={"start_ns": start_ns, "end_ns": end_ns, "by": by})

    def past_tasks(
        self,
        *,
        user: str = "",
        outcome: str = "",
        name: str = "",
        since_ns: int | None = None,
        until_ns: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> PastTaskPage:
        """Tasks that ended in [`since_ns`, `until_ns`), the last one first; `after`: `next` of the page before."""
        query = {"user": user, "outcome": outcome, "name": name, "since_ns": since_ns, "until_ns": until_ns}
        return self.ask("GET", "/history/tasks", PastTaskPage, query={**query, "after": after, "limit": limit})

    def past_task(self, task: int) -> PastTaskAnswer:
        """Task of the history, also one that the manager has forgotten."""
        return self.ask("GET", f"/history/tasks/{task}", PastTaskAnswer)

    def run_page(self, *, cluster: str = "", since: int = 0, limit: int = 1000) -> RunPage:
        """Runs of all users whose last change has the number `since` or a later one. For operators, as `node_page`."""
        return self.ask("GET", "/history/runs", RunPage, query={"cluster": cluster, "since": since, "limit": limit})

    def node_page(self, *, cluster: str = "", since: int = 0, limit: int = 1000) -> NodePage:
        """Changes of nodes from the number `since` on: faults, drains, repairs, returns."""
        return self.ask("GET", "/history/nodes", NodePage, query={"cluster": cluster, "since": since, "limit": limit})

    def audit(
        self,
        *,
        user: str = "",
        command: str = "",
        target: str = "",
        since_ns: int | None = None,
        until_ns: int | None = None,
        after: str = "",
        limit: int = 100,
    ) -> AuditPage:
        """Audit log: who changed what, the newest first. For administrators."""
        query = {"user": user, "command": command, "target": target, "since_ns": since_ns, "until_ns": until_ns}
        return self.ask("GET", "/history/audit", AuditPage, query={**query, "after": after, "limit": limit})

    def changes(self, heard: int | None = None) -> Iterator[Change | None]:
        """Changes from now on, or after the one with this number; None every few seconds in which nothing changed.
        Raises `Unreachable` when the connection ends: go on with the last number."""
        for _, change in self.stream_events("/events", Change, "" if heard is None else str(heard), {}):
            yield change


def _user(name: str) -> str:
    return f"/identity/users/{quote(name, safe='')}"
