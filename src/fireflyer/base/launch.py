"""What a launched rank is told: the torchrun environment, and ours beside it.

Pure: mappings in, structs out. `runtime.environment` gives it `os.environ`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.port_range import PortRange

__all__ = [
    "DUMPS_NAME",
    "LOGS_NAME",
    "PLANS_NAME",
    "REPORTS_NAME",
    "STDERR",
    "STDOUT",
    "TOPOLOGY_NAME",
    "TRANSPORTS",
    "RankEnvironment",
    "misspelt_settings",
]

DUMPS_NAME = "flight"
"""The directory of dumps in the directory of a run."""
LOGS_NAME = "logs"
"""The directory of what ranks and supervisors print, there."""
TOPOLOGY_NAME = "topology.json"
"""What was declared about the network, there."""
REPORTS_NAME = "reports"
"""The directory of what ranks report where no launcher collects it, there."""
PLANS_NAME = "collectives"
"""The directory of plans that groups of the job keep, there."""
STDOUT, STDERR = 1, 2
"""Streams of a rank as a mask, as torchrun numbers them."""
TRANSPORTS = ("tcp", "ucx", "auto")
"""What collectives may be asked to use between nodes, see `fireflyer.collectives.bootstrap.transports`."""
_SETTINGS = (
    "FF_ADDRESS",
    "FF_DUMP_DIR",
    "FF_HOST",
    "FF_PEER_MEMORY",
    "FF_PIN",
    "FF_PORT_RANGE",
    "FF_TRANSPORT",
    "FF_TUNE",
)
_OF_TASKS = ("FF_ARRAY_INDEX", "FF_ARRAY_SIZE", "FF_MANAGERS", "FF_RUN_NUMBER", "FF_TASK_ID", "FF_TOKEN_FILE")
"""What ranks of a task of the platform are told of it."""
_ALL_NAMES = {
    *_SETTINGS,
    *_OF_TASKS,
    "FF_CONTROL",
    "FF_JOB_TOKEN",
    "FF_MAX_NODES",
    "FF_MIN_NODES",
    "FF_NODE_RANKS",
    "FF_RUN_DIR",
    "FF_SECRET_FILE",
}
_ALL_NAMES |= {"FF_SUSPEND_GRACE_NS", "FF_SUSPENSION", "FF_WHOLE_LIFE_STATE"}


def misspelt_settings(names: Iterable[str]) -> list[tuple[str, str]]:
    """(name, what was probably meant) of environment variables that look like ours, are none, and would be ignored.

    >>> misspelt_settings(["FF_TRANSPROT", "FF_PIN", "FFMPEG", "FF_OF_SOMEBODY_ELSE"])
    [('FF_TRANSPROT', 'FF_TRANSPORT')]
    """
    strange = sorted(name for name in names if name.startswith("FF_") and name not in _ALL_NAMES)
    meant = [(name, difflib.get_close_matches(name, _SETTINGS, 1, 0.75)) for name in strange]
    return [(name, close[0]) for name, close in meant if close]


class RankEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stands. `node` is what the launcher says it is: ranks of different nodes talk over TCP only."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    min_nodes: int | None = None
    """Of a job whose size may change at a restart: how many nodes it has at least, and at most. None: all attempts
    have the same."""
    max_nodes: int | None = None
    node_ranks: str = ""
    """How many ranks each node has, where these numbers differ, as Slurm writes counts: `8(x3),4`."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    attempt: int = 0
    max_restarts: int = 0
    job: str = "local"
    role: str = "default"
    """What torchrun calls a role; one for all ranks."""
    error_file: str | None = None
    """Where torch's `@record` writes the exception that ended the rank."""
    launch: str = ""
    """Equal for the attempts of one `ff run`, and different for each `ff run`. Empty: started by something else."""
    control: str | None = None
    """`host:port` of the launcher's control service; None when not started by `ff run`."""
    secret_file: str | None = None
    run_dir: str | None = None
    suspension: str | None = None
    """File of the cells by which the rank is asked to leave, see `base.suspension`."""
    suspend_grace_ns: int | None = None
    """How long a rank has from being asked to leave until it is stopped (FF_SUSPEND_GRACE_NS). None: not known."""
    tune: bool = False
    """Measure the network before the first plan is made (FF_TUNE=1)."""
    pin: bool = True
    """Keep native threads near their memory, where there are several NUMA nodes (FF_PIN=0: do not)."""
    peer_memory: bool = True
    """Let ranks of one node read each other's memory while they have a group (FF_PEER_MEMORY=0: do not)."""
    transport: str | None = None
    """What collectives use between nodes, one of `TRANSPORTS` (FF_TRANSPORT). None: nothing is asked for."""
    address: str | None = None
    """Of this machine, at which ranks of other nodes reach it (FF_ADDRESS); several, separated by commas, of several
    networks. None: as the routes say."""
    host: str | None = None
    """Name of this machine in what is declared about the network (FF_HOST). None: what the machine calls itself."""
    ports: PortRange | None = None
    """Of all listeners of the rank (FF_PORT_RANGE). None: any that are free."""
    dumps: str | None = None
    """Where dumps of flight recorders go instead of the directory of the run (FF_DUMP_DIR)."""

    @property
    def dump_dir(self) -> str | None:
        """Where a rank leaves a dump of its flight recorder when a collective fails; None where nobody gave it one."""
        if self.dumps:
            return self.dumps
        return None if self.run_dir is None else f"{self.run_dir}/{DUMPS_NAME}"

    def to_mapping(self) -> dict[str, str]:
        """Environment variables for the rank's process."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_NAME": self.role,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            "TORCHELASTIC_RESTART_COUNT": self.attempt,
            "TORCHELASTIC_MAX_RESTARTS": self.max_restarts,
            "TORCHELASTIC_RUN_ID": self.job,
            "TORCHELASTIC_USE_AGENT_STORE": False,
            "TORCHELASTIC_ERROR_FILE": self.error_file,
            "FF_CONTROL": self.control,
            "FF_SECRET_FILE": self.secret_file,
            "FF_RUN_DIR": self.run_dir,
            "FF_SUSPENSION": self.suspension,
            "FF_SUSPEND_GRACE_NS": self.suspend_grace_ns,
            "FF_MIN_NODES": self.min_nodes,
            "FF_MAX_NODES": self.max_nodes,
            "FF_NODE_RANKS": self.node_ranks or None,
            "FF_TUNE": "1" if self.tune else None,
            "FF_PIN": None if self.pin else "0",
            "FF_PEER_MEMORY": None if self.peer_memory else "0",
            "FF_TRANSPORT": self.transport,
            "FF_ADDRESS": self.address,
            "FF_HOST": self.host,
            "FF_PORT_RANGE": self.ports,
            "FF_DUMP_DIR": self.dumps,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str]) -> RankEnvironment:
        """Reads what `ff run` or `torchrun` set; a process started by hand is rank 0 of 1. Raises `UsageError`."""

        def integer(name: str, default: int) -> int:
            text = environ.get(name)
            if text is None:
                return default
            try:
                return int(text)
            except ValueError:
                raise UsageError(f"environment variable {name}={text!r} is not an integer") from None

        def switch(name: str, default: bool) -> bool:
            text = environ.get(name, "1" if default else "0")
            if text not in ("0", "1"):
                raise UsageError(f"environment variable {name}={text!r} is neither 0 nor 1")
            return text == "1"

        transport = environ.get("FF_TRANSPORT")
        if transport is not None and transport not in TRANSPORTS:
            raise UsageError(
                f"environment variable FF_TRANSPORT={transport!r} is not known; use one of {', '.join(TRANSPORTS)}"
            )
        world_size = integer("WORLD_SIZE", 1)
        local_world_size = integer("LOCAL_WORLD_SIZE", world_size)
        env = cls(
            rank=integer("RANK", 0),
            world_size=world_size,
            local_rank=integer("LOCAL_RANK", 0),
            local_world_size=local_world_size,
            node=integer("GROUP_RANK", 0),
            nodes=integer("GROUP_WORLD_SIZE", max(1, world_size // max(1, local_world_size))),
            min_nodes=integer("FF_MIN_NODES", 0) or None,
            max_nodes=integer("FF_MAX_NODES", 0) or None,
            node_ranks=environ.get("FF_NODE_RANKS", ""),
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=integer("MASTER_PORT", 0),
            attempt=integer("TORCHELASTIC_RESTART_COUNT", 0),
            max_restarts=integer("TORCHELASTIC_MAX_RESTARTS", 0),
            job=environ.get("TORCHELASTIC_RUN_ID", "local"),
            role=environ.get("ROLE_NAME", "default"),
            error_file=environ.get("TORCHELASTIC_ERROR_FILE"),
            launch=_launch(environ),
            control=environ.get("FF_CONTROL"),
            secret_file=environ.get("FF_SECRET_FILE"),
            run_dir=environ.get("FF_RUN_DIR"),
            suspension=environ.get("FF_SUSPENSION") or None,
            suspend_grace_ns=integer("FF_SUSPEND_GRACE_NS", 0) or None,
            tune=switch("FF_TUNE", False),
            pin=switch("FF_PIN", True),
            peer_memory=switch("FF_PEER_MEMORY", True),
            transport=transport,
            address=environ.get("FF_ADDRESS") or None,
            host=environ.get("FF_HOST") or None,
            ports=_ports(environ),
            dumps=environ.get("FF_DUMP_DIR"),
        )
        if not 0 <= env.rank < env.world_size or not 0 <= env.local_rank < env.local_world_size:
            raise UsageError(
                f"rank {env.rank} of {env.world_size} (local {env.local_rank} of {env.local_world_size}) "
                "is out of range; RANK counts from 0 to WORLD_SIZE - 1, LOCAL_RANK from 0 to LOCAL_WORLD_SIZE - 1"
            )
        return env


def _ports(environ: Mapping[str, str]) -> PortRange | None:
    text = environ.get("FF_PORT_RANGE")
    if not text:
        return None
    try:
        return PortRange.parse(text)
    except UsageError as error:
        raise UsageError(f"environment variable FF_PORT_RANGE: {error}") from None


def _launch(environ: Mapping[str, str]) -> str:
    """A torchrun that `ff run` has started counts restarts of its own, which say nothing about those of `ff run`."""
    ours = "FF_CONTROL" in environ and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return environ.get("FF_JOB_TOKEN", "") if ours else ""
