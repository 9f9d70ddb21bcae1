"""What the HTTP API of the platform takes and answers beside the views of `core.platform`: the same structs in the
server, in the SDK and in its OpenAPI."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from fireflyer.cluster.schema.tasks import MAX_ARRAY, TaskId, TaskSpec

__all__ = [
    "API",
    "CSRF_HEADER",
    "KEY_HEADER",
    "LEADER_HEADER",
    "MAX_PAGE",
    "MAX_REASONS",
    "MAX_SENT_BYTES",
    "Change",
    "Commanded",
    "ErrorView",
    "Identity",
    "JoinTokenAnswer",
    "JoinTokenRequest",
    "KnownUser",
    "Login",
    "MissingBlobs",
    "NewToken",
    "NewUser",
    "ShownToken",
    "Submission",
    "Submitted",
    "UtilisationReport",
    "UtilisationStep",
]

API: Final = "/api/v1"
CSRF_HEADER: Final = "x-ff-csrf"
"""Carries the `csrf` of a browser's session in all requests that change something."""
KEY_HEADER: Final = "Idempotency-Key"
"""Names a submission: sent again it makes no second task."""
LEADER_HEADER: Final = "x-ff-leader"
"""Of an answer 503: this manager does not lead, and nothing was done. The URL of the one that does, or empty."""
MAX_PAGE: Final = 1000
"""Rows of one answer."""
MAX_REASONS: Final = 100
"""Tasks of which one request may ask why they wait."""
MAX_SENT_BYTES: Final = 17 << 30
"""Of blobs in one request: a file is at most 16 GiB."""


class ErrorView(msgspec.Struct, frozen=True):
    """Of every answer that is not 2xx. `code`: one word for programs, such as `not_found`; `message`: one line."""

    code: str
    message: str


class Submission(msgspec.Struct, frozen=True):
    """The header `Idempotency-Key` names it: sent again with the same key it makes no second task."""

    specs: Annotated[tuple[TaskSpec, ...], msgspec.Meta(min_length=1, max_length=MAX_ARRAY)]


class Submitted(msgspec.Struct, frozen=True):
    """In the order of the specs; of an array, all of its tasks. `repeated`: they were submitted before, with this
    key."""

    tasks: tuple[TaskId, ...]
    repeated: bool = False


class MissingBlobs(msgspec.Struct, frozen=True):
    """Blobs of a snapshot, by their hashes, that the client must send before it seals the snapshot."""

    blobs: tuple[str, ...]


class Commanded(msgspec.Struct, frozen=True):
    """One line that says what was changed; it is durable."""

    text: str


class JoinTokenRequest(msgspec.Struct, frozen=True):
    lifetime_s: Annotated[int, msgspec.Meta(ge=1, le=86_400)] = 600


class JoinTokenAnswer(msgspec.Struct, frozen=True):
    """Shown this once. The machine uses it up with `ff agent join`, at one of `managers` (`host:port`)."""

    token: str
    expires_s: int
    managers: tuple[str, ...]


class Login(msgspec.Struct, frozen=True):
    token: Annotated[str, msgspec.Meta(max_length=200)]


_UserName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
_Role = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9-]{0,31}:[a-z][a-z0-9-]{0,31}$")]


class NewUser(msgspec.Struct, frozen=True, kw_only=True):
    """`uid`: of files of the file system that shares its users; None: one that nobody has had."""

    name: _UserName
    roles: Annotated[tuple[_Role, ...], msgspec.Meta(max_length=32)] = ()
    uid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 2)] | None = None


class KnownUser(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    uid: int
    roles: tuple[str, ...]
    created_s: int
    """Unix time."""


class NewToken(msgspec.Struct, frozen=True):
    """`lifetime_s` None: it does not expire."""

    lifetime_s: Annotated[int, msgspec.Meta(ge=1, le=100 * 365 * 86_400)] | None = None
    label: Annotated[str, msgspec.Meta(max_length=80)] = ""


class ShownToken(msgspec.Struct, frozen=True):
    """Shown this once. `expires_s`: Unix time."""

    token: str
    expires_s: int | None = None

    def __repr__(self) -> str:
        return "ShownToken()"


class Identity(msgspec.Struct, frozen=True):
    """Who asks. `csrf` and `expires_s` (Unix time) are those of a browser's session; empty and 0 for a token."""

    user: str
    roles: tuple[str, ...]
    csrf: str = ""
    expires_s: int = 0
    task: int | None = None
    """With the token of a run: its task, and its number."""
    run: int | None = None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One server-sent event; its number is the event's id. `gap`: changes were missed, ask for everything again."""

    number: int
    what: Literal["task", "node", "settings", "gap"]
    name: str = ""
    """Of the node, or the task's number."""
    state: str = ""


class UtilisationStep(msgspec.Struct, frozen=True, kw_only=True):
    """Node-seconds. `healthy`: nodes that were heard; `allocated`: of these, nodes that a run had; `productive`:
    productive time of runs that have ended, spread evenly over each run."""

    start_ns: int
    allocated: float
    healthy: float
    productive: float


class UtilisationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of equal length from `start_ns` until `end_ns`; times are cluster time, nanoseconds."""

    start_ns: int
    end_ns: int
    steps: tuple[UtilisationStep, ...]
