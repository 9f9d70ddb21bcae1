"""What is asked of the launcher, what it hands back, and a line that a rank printed."""

from __future__ import annotations

import re
import sys
from typing import Final, Literal

import msgspec

from fireflyer.base.decoding import convert
from fireflyer.base.errors import UsageError
from fireflyer.base.port_range import PortRange
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.schema.addresses import AddressChoice

__all__ = [
    "MAX_NODES",
    "MAX_RANKS",
    "SHIPPED_NODE_CHECK",
    "Culprit",
    "Fault",
    "JobResult",
    "JobSpec",
    "RankLine",
    "Remote",
    "Rendezvous",
    "Timeouts",
    "node_range",
    "parse_fault",
    "safe_name",
]

MAX_NODES = 1024
MAX_RANKS = 16384
SHIPPED_NODE_CHECK: Final = "fireflyer:node-check"
"""In place of a program for `JobSpec.on_failure`: the one that comes with the supervisor's release. No program has such
a name, so that a supervisor that knows nothing of it cannot start it, and nobody is blamed."""

_FAULT = re.compile(r"(kill-node|kill-rank)=([0-9]{1,6})@([0-9]{1,12})(s?)")


class Fault(msgspec.Struct, frozen=True):
    """Something that the launcher is to break in the first attempt: when any rank reports `step` or a later one, or
    `after_s` seconds after the ranks were started, for scripts that report nothing.

    `kill-node`: the node's supervisor and all its ranks are killed with SIGKILL. `kill-rank`: one rank is.
    """

    kind: Literal["kill-node", "kill-rank"]
    target: int
    step: int | None
    after_s: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}={self.target}@{self.step if self.after_s is None else f'{self.after_s}s'}"


def parse_fault(text: str) -> Fault:
    """`kill-node=1@60` or `kill-rank=3@20s`: what, which one, at which step or time. Raises `UsageError`."""
    match = _FAULT.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--inject {text!r} is not understood; write it like kill-node=1@60 (when step 60 is reported) or "
            "kill-rank=3@20s (20 seconds after the start)"
        )
    when, kind = int(match[3]), {"kind": match[1], "target": int(match[2])}
    return convert({**kind, "step": None, "after_s": when} if match[4] else {**kind, "step": when}, Fault)


def node_range(nodes: int, min_nodes: int) -> str:
    """As `--nodes` writes it: `4`, or `2:4`."""
    return f"{min_nodes}:{nodes}" if min_nodes else str(nodes)


def safe_name(name: str) -> str:
    """The name of a job as part of a path."""
    return (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "job")[:60]


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """All in nanoseconds."""

    heartbeat_ns: int = 300 * MS
    """A supervisor shows that it is alive this often."""
    node_lost_ns: int = 1500 * MS
    """A node whose supervisor was silent for so long is lost."""
    supervisor_start_ns: int = 60 * SECOND
    last_call_ns: int = 30 * SECOND
    """Once a job has as many nodes as it needs, it waits so long for each of the others that it may have (torchrun's
    `last_call_timeout`)."""
    settle_ns: int = 500 * MS
    """Time after a failure in which the other ranks may end by themselves, with a word on why and a dump of their
    collectives, which notice a death within 100 ms. Those that still run then are asked to end."""
    stop_grace_ns: int = 10 * SECOND
    """Time between the polite signal and SIGKILL."""
    suspend_settle_ns: int = 5 * SECOND
    """Time for the last ranks to leave, once all ranks that ever asked whether to leave have left."""
    kill_ns: int = 10 * SECOND
    """A node whose processes outlive SIGKILL for so long ends the job: nothing may be started beside them."""
    lease_ns: int = 10 * SECOND
    """Lease of ranks on other machines: they are killed there when their guard has heard nothing of the launcher for so
    long, and not before is anything started in their place without proof that they are gone."""
    blame_ns: int = 300 * MS
    """Time after the first failure to wait for the failure that may have caused it, before the culprit is named."""
    backoff_ns: int = 200 * MS
    """Pause before a restart; doubles with every attempt that made no progress, up to `backoff_max_ns`."""
    backoff_max_ns: int = 10 * SECOND


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """How the launcher reaches the job's hosts, and what it may assume there."""

    via: Literal["ssh", "agent"] = "ssh"
    """What starts guards there: ssh, or the agents of machines that have joined."""
    machines_dir: str = ""
    """Directory that says which machines have joined (`MachineStore`), for agents."""
    shell: tuple[str, ...] = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
                              "-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3")  # fmt: skip
    """A command that takes the name of a host and a command for its shell."""
    python: str = sys.executable
    """Path of the Python there, in which this release of Fire-Flyer is installed."""
    share_machine: bool = False
    """Several hosts may be one machine, as those of a platform that is tried out on one."""
    name_hosts: bool = False
    """Ranks know their machines by the names in `hosts` and not by what they call themselves (FF_HOST)."""
    workdir: str = ""
    """Working directory of ranks there; empty: that of the launcher."""
    port: int = 0
    """Port of the launcher's control service; 0: any free one."""
    address: str = ""
    """Address of the launcher's machine, as hosts reach it; empty: that from which ssh reached them."""


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The job's other machines join it by themselves, at an address of the launcher's machine."""

    host: str
    port: int
    secret_file: str
    """Path of a file of 32 bytes, the same on all machines."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One job: `ranks_per_node` processes of the same command on each of `nodes`, or as many as `host_ranks` says;
    fewer where `min_nodes` allows it."""

    script: str
    """A Python file, the name of a module, or the path of a program, as `kind` says."""
    args: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"
    run_dir: str
    """Directory of this run: event log, rank logs, node secret (mode 0700). Made if absent; must not hold a run."""
    nodes: int = 1
    min_nodes: int = 0
    """Fewest nodes of an attempt, with `hosts`. 0: all attempts have `nodes`."""
    ranks_per_node: int = 1
    """Number of ranks of each node; of the largest one where `host_ranks` gives several numbers."""
    hosts: tuple[str, ...] = ()
    """Names of machines, the first for node 0; those beyond `nodes` are spares. Empty: all nodes are on this one."""
    host_ranks: tuple[int, ...] = ()
    """Number of ranks of each of the `hosts`, where these numbers differ. Empty: `ranks_per_node`."""
    remote: Remote = Remote()
    rendezvous: Rendezvous | None = None
    """Rendezvous at which the other machines join, with `hosts`, whose first is the launcher's machine. None: they do
    not."""
    max_restarts: int = 0
    name: str = "job"
    """The ranks see it as TORCHELASTIC_RUN_ID."""
    role: str = "default"
    """Role of the ranks, which they see as ROLE_NAME."""
    env: dict[str, str] = {}
    """Variables that are added to the environment of every rank."""
    python: str = ""
    """Path of the Python that ranks run with, on every host; empty: that of the launcher."""
    wrap: tuple[str, ...] = ()
    """A command that is put before that of each rank, such as one that enters a container."""
    master_port: int = 0
    """0: a free port for each attempt."""
    ports: PortRange | None = None
    """Ports of all listeners of the job, on every machine. None: any that are free."""
    addresses: AddressChoice = AddressChoice()
    """Choice of the addresses at which ranks of other machines reach those of a machine; empty: as the routes say."""
    omp_num_threads: int | None = None
    """None: leave OMP_NUM_THREADS alone where the user set it, else 1 where a node has more than one rank."""
    devices: Literal["auto", "cpu", "gpu"] = "auto"
    """Devices that ranks occupy, one each. auto: a GPU where the machine has one, else a core."""
    stream_dir: str = ""
    """Directory for files with one stream of one rank each, laid out as torchrun does; empty: none."""
    stream_files: tuple[int, ...] = ()
    """Mask of the streams that have such a file, for each local rank."""
    topology: bytes = b""
    """Declared topology of the network, as JSON, for the ranks' collectives; empty: none."""
    tune: bool = False
    """The ranks measure the network before they plan their collectives."""
    transport: Literal["tcp", "ucx", "auto"] | None = None
    """Transport of the ranks' collectives between nodes. None: what the environment says, else TCP."""
    inject: tuple[Fault, ...] = ()
    on_failure: tuple[str, ...] = ()
    """Command that looks at the node of a rank that failed, and by its exit code decides whose fault it was; see
    `cluster.core.node_check`. Empty: none."""
    on_failure_limit_ns: int = 60 * SECOND
    """Time that it is given."""
    on_failure_accuses: bool = False
    """Whether the command is run only where the cause of a failure is not clear, and its word counts against the node
    alone. Where the job needs the node that is at fault it ends, and who started it starts it elsewhere."""
    listeners: dict[str, str] = {}
    """HOST:PORT of something that listens on each of the `hosts`, for that command."""
    suspend_grace_ns: int = 60 * SECOND
    """Ranks that are asked to save and to leave (SIGUSR1 to the launcher) have so long; then they are stopped."""
    suspend_after_ns: int = 0
    """Time after the start of an attempt's ranks at which they are asked to save and leave. 0: never."""
    whole_life_state: int = 0
    """An integer of the user that survives restarts and suspensions: what the job begins with."""
    watchdog_ns: int = 0
    """Time without output or reports of any rank after which the job counts as hung. 0: never."""
    logs_bytes: int = 0
    """Most bytes of what ranks print that are kept in the run directory. 0: all."""
    timeouts: Timeouts = Timeouts()

    @property
    def world_size(self) -> int:
        """Number of ranks at most."""
        return sum(self.node_ranks)

    def ranks_on(self, host: int) -> int:
        """Number of ranks of the host of this number; without `hosts`, of the node."""
        return self.host_ranks[host] if self.host_ranks else self.ranks_per_node

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """Number of ranks of each node in the largest attempt, in the order of the hosts."""
        if not self.host_ranks:
            return (self.ranks_per_node,) * self.nodes
        largest = sorted(range(len(self.hosts)), key=lambda host: (-self.host_ranks[host], host))[: self.nodes]
        return tuple(self.host_ranks[host] for host in sorted(largest))

    @property
    def least_nodes(self) -> int:
        return self.min_nodes or self.nodes

    @property
    def elastic(self) -> bool:
        """Attempts may differ in the number of nodes."""
        return self.least_nodes < self.nodes


class Culprit(msgspec.Struct, frozen=True):
    """Culprit of the last failed attempt. `rank` is None where a whole node was lost."""

    attempt: int
    node: int
    rank: int | None
    exit_code: int
    reason: str


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a job."""

    exit_code: int
    """0: every rank ended with 0. `SUSPENDED_EXIT_CODE` (85): see `suspended`. Else that of the culprit, or 128 + n
    when signal n stopped the job."""
    reason: str
    """One line."""
    attempts: int
    """Number of attempts that were started."""
    culprit: Culprit | None
    run_dir: str
    events_path: str
    logs_dir: str
    """`attempt-0/rank-3.log` and so on beneath it: stdout and stderr together, complete."""
    reports_dropped: int = 0
    """Step reports that ranks could not deliver in time."""
    signal: int | None = None
    """Number of the signal that stopped the job; None: no signal did."""
    faults_left: tuple[Fault, ...] = ()
    """Faults that were to be injected and were not: the first attempt ended before."""
    suspended: bool = False
    """Whether the job left its nodes as it was asked to, to go on from its last checkpoint when it is started again."""
    whole_life_state: int = 0
    """Value of `JobSpec.whole_life_state` at the end of the job."""


class RankLine(msgspec.Struct, frozen=True):
    """One line that a rank printed, for display. The complete bytes are in the rank's log file."""

    rank: int
    node: int
    attempt: int
    stream: Literal["stdout", "stderr"]
    text: str
    """Text without its end of line; bytes that are not UTF-8 are replaced; may hold terminal control sequences."""
    cut: bool = False
    """The line was longer than the bound and this is only its beginning."""
    local_rank: int = 0
