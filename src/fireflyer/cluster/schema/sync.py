"""What an agent and the managers of the platform tell each other: state, not commands.

The agent says again and again what is on its node; the answer is all that should be there. What one end says is
complete each time, so a message that is lost, late or doubled does no harm: a report older than one that was heard
(`sequence`) is dropped, and orders are compared with what runs. A call is held until there is something new for the
node, and is answered after `HOLD_NS` at the latest: it is the heartbeat as well.

    agent ──Sync(sequence, runs that are here)──> manager
          <──Orders(version, runs that should be)── held until `version` > what the agent has heard

Who may start ranks of a run on a node is shown by a *ticket*: the run's launcher has one for each node of the run.

Both say their `revision`, so agents and managers that are too far apart refuse each other (`cluster.core.revisions`)
rather than misunderstand. A release that adds fields or messages here, or in tickets, logs and execs, raises `REVISION`
by one, once, whatever it adds; one that gives a field another meaning raises it by two.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.job import MAX_NODES
from fireflyer.cluster.schema.tasks import Cause, RunParts, TaskId, TaskSpec, WholeLife
from fireflyer.runtime.rpc import Method

__all__ = [
    "FETCH_BLOB",
    "HOLD_NS",
    "MAX_MANAGER_URLS",
    "MAX_REPORTS",
    "MAX_RUNS",
    "REVISION",
    "SHIPPED_HEALTH",
    "SYNC",
    "VALIDATION",
    "BlobPiece",
    "EndedRun",
    "FetchBlob",
    "Gpu",
    "HealthHeard",
    "HealthOrder",
    "HealthReport",
    "Inventory",
    "LaunchOrder",
    "Orders",
    "RunNode",
    "RunOrder",
    "RunStatus",
    "Saving",
    "Sync",
]

HOLD_NS: Final = 5 * SECOND
MAX_MANAGER_URLS: Final = 32
REVISION: Final = 1
"""Of what this release says here; 0: of releases that did not say it."""
MAX_RUNS: Final = 64
"""On one node, those included of which it has not heard that the manager knows their end."""

MAX_REPORTS: Final = 4
"""Of the checks of a node, that the manager has not taken yet; the agent drops the oldest periodic ones."""
SHIPPED_HEALTH: Final = "fireflyer:health"
"""In the place of a program: the checks that come with the agent's own release."""
SHIPPED_VALIDATE: Final = "fireflyer:validate"
"""In the place of a validation: the validators that come with the agent's own release."""
VALIDATION: Final = "validation"
"""Name of the check that stands for the validation program."""

_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
_RunToken = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8,64}$")]
"""Of one run of one task, never used again. Tokens of the guards of its nodes begin with it (`agent.GuardOrder`)."""
_Hash = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?$")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Ns = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Gpu(msgspec.Struct, frozen=True):
    name: _Text
    memory_bytes: _Number


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is and where its agent is reached."""

    address: _Text
    port: _Port
    version: _Text
    """Release of Fire-Flyer of the agent."""
    boot_id: _Text
    hostname: _Text
    cores: _Number
    memory_bytes: _Number
    gpus: Annotated[tuple[Gpu, ...], msgspec.Meta(max_length=64)] = ()
    interfaces: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=64)] = ()


class EndedRun(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, from the node of its launcher."""

    cause: Cause
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    reason: _Text = ""
    parts: RunParts = RunParts()
    whole_life: WholeLife | None = None
    """None: the run has not set it."""
    bad_nodes: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """Nodes that the launcher holds responsible for an infrastructure cause."""
    corrupt: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    """Nodes whose ranks differed from the majority of the replicas of their state; the run's program says so."""


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says of its checkpoints, as far as it is known: what its interruption would lose."""

    asks: bool = False
    """Ranks of it have asked whether they are to leave (`should_suspend`): it saves when it is told to."""
    age_ns: _Ns | None = None
    """Since the state was taken that the last committed checkpoint holds."""
    save_ns: _Ns | None = None
    """What that took until it was committed."""
    start_ns: _Ns | None = None
    """From the start of the ranks until the last one had restored its state."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One run on this node. `state` `gone`: no process of the run is left here and none will be started."""

    token: _RunToken
    state: Literal["starting", "running", "gone"]
    lead: bool = False
    """The run's launcher is, or was, on this node."""
    step: _Number | None = None
    """Last reported, for people; of the lead."""
    ended: EndedRun | None = None
    """Of the lead once it is gone; None there too where nobody saw how it ended."""
    doing: _Text = ""
    """What its start waits for on this node, for people; empty: nothing that takes long."""
    saving: Saving | None = None
    """Of the lead, once its ranks run."""


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of the checks of a node printed, in the order of the agent's numbers."""

    number: _Number
    """Grows with each report of the incarnation."""
    probe: _Number = 0
    """That it answers; 0: none, the checks are run periodically, and before and after runs."""
    lines: Annotated[tuple[Annotated[bytes, msgspec.Meta(max_length=4096)], ...], msgspec.Meta(max_length=256)] = ()
    """Each is a `HealthEvent` as JSON, not decoded: one that a manager does not know must not cut the node off."""
    failure: _Text = ""
    """Why the program came to no result: it hung, printed too much, or could not be started."""
    asked: _Number = 0
    """The newest probe that the agent had been asked for before the newest event (`once`) of `lines` happened, both by
    the clock of the node; 0: none, or not known."""


class HealthHeard(msgspec.Struct, frozen=True):
    """Reports up to this one are taken."""

    incarnation: _Number
    number: _Number


class HealthOrder(msgspec.Struct, frozen=True, kw_only=True):
    """How a node is checked."""

    program: Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1, max_length=64)]
    """Prints health events, each a line of JSON; with an argument, the name of a check, that one alone."""
    validation: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=64)] = ()
    """Of a node that is tested; exit code 0: it passed, 2: the node is at fault."""
    follow: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=64)] = ()
    """Prints health events as they happen, and does not end; empty: none. `SHIPPED_HEALTH` stands for that which
    follows the kernel's log."""
    period_ns: _Ns = 300 * SECOND
    limit_ns: _Ns = 60 * SECOND
    validation_limit_ns: _Ns = 600 * SECOND
    policy: _Number = 0
    """Version of the policy of the managers."""
    probe: _Number = 0
    """To be carried out now; 0: none."""
    check: _Text = ""
    """That the probe repeats; empty: all checks, and the validation."""
    heard: HealthHeard | None = None


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """From an agent. The manager knows which node it is by the credential of the connection."""

    incarnation: _Number
    """Of the agent's process: grows with each of its starts."""
    sequence: _Number
    """Grows with each message of the incarnation."""
    heard: _Number
    """Version of the last orders; 0: none from this leader."""
    term: _Number = 0
    """Of the leader from whom they were."""
    inventory: Inventory
    runs: Annotated[tuple[RunStatus, ...], msgspec.Meta(max_length=MAX_RUNS)] = ()
    revision: _Number = 0
    health: Annotated[tuple[HealthReport, ...], msgspec.Meta(max_length=MAX_REPORTS)] = ()


class RunNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a run, as its launcher reaches it."""

    name: _Name
    address: _Text
    port: _Port
    zone: _Text = ""
    leaf: _Text = ""
    ticket: bytes = b""
    """See `cluster.schema.tickets`; sealed for the node of the launcher."""


class LaunchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """All that the launcher of a run needs."""

    task: TaskId
    run: _Number
    user: _Name
    account: _Text = ""
    """Local account as which its ranks run; empty: that of the agent."""
    spec: TaskSpec
    nodes: Annotated[tuple[RunNode, ...], msgspec.Meta(min_length=1, max_length=MAX_NODES)]
    """In the order of ranks. The launcher is on the first one."""
    whole_life: WholeLife = 0
    array_index: _Number | None = None
    tickets_nonce: bytes = b""
    token: bytes = b""
    """Token of the submitting user for this run, sealed as tickets are."""
    manager_urls: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_MANAGER_URLS)] = ()
    """Where the token counts, for programs of the task: `URL` or `URL#FINGERPRINT` of each manager's HTTP API."""
    node_check: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=64)] = ()
    """Of the site: `JobSpec.on_failure`; empty: none."""
    node_check_limit_ns: _Ns = 60 * SECOND


class RunOrder(msgspec.Struct, frozen=True, kw_only=True):
    """`wanted` `forget`: the manager knows the end; nothing of the run is needed any more."""

    run_token: _RunToken
    wanted: Literal["run", "suspend", "stop", "forget"]
    launch: LaunchOrder | None = None
    """On the node of the launcher, as long as it is not known to have started."""
    snapshot: _Hash = ""
    """Of the directory that each node of the run gets a copy of; empty: none."""
    user: _Text = ""
    """Whose account owns the copy."""
    environment: _Hash = ""
    """Of the lock file, a file of the snapshot, from which each node of the run builds the Python environment of its
    ranks; empty: none."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """All runs that the manager has for the node. One that the node has and that is not here is to be stopped."""

    term: _Number
    """Of the leader; orders of an older leader are not followed."""
    version: _Number
    runs: Annotated[tuple[RunOrder, ...], msgspec.Meta(max_length=MAX_RUNS)] = ()
    stop_after_ns: _Ns = 300 * SECOND
    """A node that has heard of no manager for so long stops all runs."""
    managers: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=16)] = ()
    """`host:port` of all managers, to ask when this one does not answer."""
    leave: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    """Of an agent in a job of a batch system: it is to end when all logs are sent, with this exit code."""
    revision: _Number = 0
    release: _Text = ""
    """Of Fire-Flyer, of the manager; empty: one that did not say it."""
    health: HealthOrder | None = None
    """None: the site checks no nodes."""


SYNC = Method("platform.sync", Sync, Orders)


class FetchBlob(msgspec.Struct, frozen=True, kw_only=True):
    """From an agent, on a connection of its own; the pieces of a blob are asked for one after another."""

    snapshot: _Hash
    """Of a run that the orders of the node name."""
    blob: _Hash
    """Of a file of it, or the snapshot's own: then it is the manifest."""
    offset: _Number


class BlobPiece(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: _Number
    """Of the whole blob."""
    data: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    """From the offset that was asked for; empty at the end of the blob."""


FETCH_BLOB = Method("platform.fetch_blob", FetchBlob, BlobPiece)
