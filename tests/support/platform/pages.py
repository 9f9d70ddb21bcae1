"""The web page in a browser against scripted answers of the API's types, and what is asked of every page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec
from playwright.sync_api import Route

from fireflyer.cluster.core.platform.store.rows import Account, ConfigRow
from fireflyer.cluster.core.platform.views import (
    Accused,
    ClusterView,
    NodeView,
    RunView,
    TaskAnswer,
    TaskPage,
    TaskView,
    Why,
)
from fireflyer.cluster.manager.web import app
from fireflyer.cluster.schema.api import API, MAX_PAGE, ErrorView, Identity
from fireflyer.cluster.schema.logs import FoundLine, FoundLines, LogEvent, LogPiece, RunLogs, StreamView, TaskLogs
from fireflyer.cluster.schema.tasks import Cause, TaskState

__all__ = [
    "CONTRAST",
    "HOST",
    "HOSTILE",
    "LEAVES",
    "NODES",
    "RUNS",
    "TASK",
    "UNNAMED",
    "ScriptedPlatform",
    "event",
    "node",
    "stream",
]

HOST: Final = "http://127.0.0.1:9"
"""Nothing listens there: the test answers all that the browser asks."""
FILES: Final = Path(app.__file__).parent / "page"
TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
BEGAN_NS: Final = 1_790_000_000 * 10**9
NODES: Final = 2100
LEAVES: Final = 42
CHANGE: Final = 'retry: 20\ndata: {"number": 1, "what": "node"}\n\n'
"""The stream ends after a change and the browser asks for it again: the page is drawn all the time."""
HOSTILE: Final = (
    '<img src=x onerror="document.title=\'taken\'"><script>document.title="taken"</script> \u202e \x1b[31mred'
)
CONTRAST: Final = """
() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (value) => (value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = rgb(getComputedStyle(node).backgroundColor);
      if (a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest(".skip, option, noscript")) continue;
    const [one, two] = [light(rgb(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (ratio < 4.5) poor.push(`${node.outerHTML.slice(0, 80)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}
"""
UNNAMED: Final = """
() => [...document.querySelectorAll("input, select, textarea, button, a")].filter((node) => node.checkVisibility()
  && !(node.getAttribute("aria-label") || node.labels?.length || node.textContent.trim())).map((node) => node.outerHTML)
"""


ACCUSED: Final = Accused(runs=2, tasks=1, users=1, since_ns=BEGAN_NS, last_ns=BEGAN_NS)


def node(number: int) -> NodeView:
    states = ("busy", "busy", "idle", "leaving", "drained", "draining", "lost")
    return NodeView(
        name=f"node-{number:04}",
        zone=f"z{number * 2 // NODES}",
        leaf=f"leaf-{number * LEAVES // NODES}",
        group="default",
        labels=(),
        state=states[number % len(states)],
        drain_reason="",
        task=None,
        run=None,
        silent_ns=10**9,
        inventory=None,
        accused=ACCUSED if number == NODES - 1 else None,
    )


TASK: Final = TaskView(
    id=7,
    name="waits",
    user="ada",
    group="",
    state=TaskState.QUEUED,
    priority=10,
    node_group="default",
    least_nodes=1,
    most_nodes=1,
    array_index=None,
    array_of=None,
    submitted_ns=BEGAN_NS,
    since_ns=BEGAN_NS,
    ended_ns=None,
    runs=0,
    requeues=0,
    held=False,
    nodes=(),
    whole_life=0,
    outcome=None,
    cause=None,
    exit_code=None,
    reason="",
    account=Account(),
    ettr=None,
)


RUN_S: Final = 10**9
RUNS: Final = tuple(
    RunView(
        task=7,
        number=number,
        token="",
        state=state,
        nodes=("node-0001", "node-0002"),
        scheduled_ns=TASK.submitted_ns + (100 + 900 * number) * RUN_S,
        started_ns=TASK.submitted_ns + (110 + 900 * number) * RUN_S,
        ended_ns=None if cause is None else TASK.submitted_ns + (700 + 900 * number) * RUN_S,
        over_ns=None if cause is None else TASK.submitted_ns + (702 + 900 * number) * RUN_S,
        leaving=False,
        leave_reason="",
        reason="nodes are free",
        cause=cause,
        exit_code=None,
        end_reason="" if cause is None else "a task of priority 30 needed the nodes",
        step=None,
    )
    for number, (state, cause) in enumerate(
        (("ended", Cause.SUSPENDED), ("ended", Cause.INFRASTRUCTURE), ("running", None))
    )
)


def stream(rank: int, end: int, *, attempt: int = 0) -> StreamView:
    name = f"attempt-{attempt}-rank-{rank}"
    return StreamView(name=name, attempt=attempt, rank=rank, end=end, gaps=(), cut=False, closed=False)


def event(one: LogEvent, position: str = "") -> str:
    return (f"id: {position}\n" if position else "") + f"data: {msgspec.json.encode(one).decode()}\n\n"


class ScriptedPlatform:
    """The files of the page, and answers of the API's types."""

    def __init__(self) -> None:
        self.nodes = [node(number) for number in range(NODES)]
        self.reachable = True
        self.user = "ada"
        self.logged_in = True
        self.change = CHANGE
        self.task = TASK
        self.runs: tuple[RunView, ...] = ()
        self.logs: dict[str, bytes] = {}
        """Of rank 0 of run 0, by stream."""
        self.known_logs: tuple[RunLogs, ...] = ()
        self.found: list[FoundLine] = []
        self.streams: list[str] = []
        """What the next requests for the stream of logs are answered; the last one again and again."""
        self.heard: list[str] = []
        """Positions that came with them."""
        self.utilisation: tuple[int, Any] = (404, ErrorView("not_found", "no such route"))
        self.submitted: list[bytes] = []
        self.commanded: list[bytes] = []
        """Commands, as they were sent."""

    def answer(self, route: Route) -> None:
        asked = urlsplit(route.request.url)
        if not asked.path.startswith(API):
            file = FILES / (asked.path.lstrip("/") or "index.html")
            route.fulfill(body=file.read_bytes(), content_type=TYPES[file.suffix])
        elif not self.reachable:
            route.abort()
        else:
            self._answer_api(route, asked.path.removeprefix(API), parse_qs(asked.query))

    def _answer_api(self, route: Route, path: str, query: dict[str, list[str]]) -> None:
        if path == "/session" and route.request.method == "POST":
            self.logged_in = True
            route.fulfill(status=201, body=self._encoded(self._identity()), content_type="application/json")
        elif not self.logged_in:
            error = ErrorView("unauthenticated", "the session has ended; log in again")
            route.fulfill(status=401, body=self._encoded(error), content_type="application/json")
        elif path == "/events":
            route.fulfill(body=self.change, content_type="text/event-stream")
        elif path.endswith("/logs/events"):
            self.heard.append(route.request.headers.get("last-event-id", ""))
            body = self.streams.pop(0) if len(self.streams) > 1 else self.streams[0]
            route.fulfill(body=body, content_type="text/event-stream")
        elif path == "/tasks" and route.request.method == "POST":
            self.submitted.append(route.request.post_data_buffer or b"")
            route.fulfill(status=201, body=b'{"tasks": [7]}', content_type="application/json")
        elif path == "/commands":
            self.commanded.append(route.request.post_data_buffer or b"")
            route.fulfill(body=b'{"text": "done"}', content_type="application/json")
        elif path == "/utilisation":
            status, found = self.utilisation
            route.fulfill(status=status, body=self._encoded(found), content_type="application/json")
        else:
            route.fulfill(body=self._encoded(self._find(path, query)), content_type="application/json")

    def _encoded(self, found: Any) -> bytes:
        return msgspec.json.encode(found)

    def _identity(self) -> Identity:
        return Identity(self.user, ("platform:operator",), "csrf", 1)

    def _find(self, path: str, query: dict[str, list[str]]) -> Any:
        if path == "/session":
            return self._identity()
        if path == "/tasks":
            return TaskPage((self.task,), None)
        if path == "/tasks/7":
            return TaskAnswer(self.task, self.runs, Why("no node is free"))
        if path == "/cluster":
            return CLUSTER
        if path.startswith("/nodes/"):
            return next(one for one in self.nodes if one.name == path.removeprefix("/nodes/"))
        if path == "/users":
            return []
        if path == "/tasks/7/logs":
            return TaskLogs(7, self.known_logs)
        if path == "/tasks/7/logs/search":
            return FoundLines(tuple(self.found), "")
        if path.startswith("/tasks/7/logs/"):
            data = self.logs[path.split("/")[-1]]
            (offset,), (limit,) = (map(int, query[name]) for name in ("offset", "limit"))
            piece = data[offset : offset + limit]
            return LogPiece(offset=offset, data=piece, next_offset=offset + len(piece), cut=False, closed=False)
        (most,) = query.get("limit", [str(MAX_PAGE)])
        (after,) = query.get("after", [""])
        return [one for one in self.nodes if one.name > after][: int(most)]


CLUSTER: Final = ClusterView(
    cluster="0123456789abcdef",
    term=1,
    time_ns=1,
    nodes=NODES,
    healthy=NODES - 7,
    busy=NODES - 50,
    tasks={"queued": 3, "running": 12},
    utilisation=0.991,
    goodput=0.934,
    changes=1,
    outbox_first=0,
    outbox_next=0,
    config=ConfigRow(),
)
