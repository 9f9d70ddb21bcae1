"""The group of a job: its plan is made once, kept in the directory of the run, and used again after a restart.

    RUN_DIR/topology.json             what the operator has declared (`ff run --topology`), see `declaration`
    RUN_DIR/collectives/NAME.json     the plan of group NAME, and the speeds that were measured for it (`ff run --tune`)
    RUN_DIR/collectives/NAME~6-3.json the same, of a job whose size may change, while it has 6 ranks on 3 nodes; then
                                      -HASH where the nodes have different numbers of ranks

Only rank 0 reads and writes them; the others hear from it, so the directory need not be shared between nodes. A plan
that was measured is refused where the group has changed, because its user has asked for it; one that was computed is
computed again, with a warning that sums may round otherwise.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec
import numpy as np

from fireflyer.base.decoding import DECODE_ERRORS, decode_json, decode_published
from fireflyer.base.errors import DataCorruption, FireflyerError, PeerFailed, UsageError
from fireflyer.base.launch import PLANS_NAME, TOPOLOGY_NAME, RankEnvironment
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import MIB
from fireflyer.collectives.group import Group
from fireflyer.collectives.planning.cost import Speeds
from fireflyer.collectives.planning.declaration import Declaration
from fireflyer.collectives.planning.plan import Plan
from fireflyer.collectives.planning.routing import default_plan
from fireflyer.collectives.tuning import measure
from fireflyer.runtime.reporter import Reporter

__all__ = ["JobPlans", "KeptPlan", "tell_launcher", "tell_launcher_of_saturation", "tuned"]

MAX_FILE_BYTES: Final = 64 * MIB
LARGE: Final = 186 * MIB
"""The size of array for which the log line says what is done."""

_T = TypeVar("_T")
_G = TypeVar("_G", bound=Group)

logger = logging.getLogger(__name__)


class KeptPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a job."""

    plan: Plan
    measured: Speeds | None = None
    """None: made from declared speeds."""


class JobPlans:
    """The plans of one run; `run_dir` None keeps nothing."""

    def __init__(self, run_dir: str | None, name: str, *, size: tuple[int, int, str] | None = None) -> None:
        """`size`: ranks and nodes of the job, and which nodes have how many where that differs, where they may be
        others after a restart; each size has its own plan, which is used again when the job is back at it."""
        self._run_dir = run_dir
        self._name = name
        self._size = size

    @classmethod
    def of_job(cls, env: RankEnvironment, name: str) -> JobPlans:
        size = None if env.min_nodes is None else (env.world_size, env.nodes, env.node_ranks)
        return cls(env.run_dir, name, size=size)

    @property
    def path(self) -> str | None:
        """Where the plan is kept."""
        if self._run_dir is None:
            return None
        size = "" if self._size is None else f"~{self._size[0]}-{self._size[1]}"
        if self._size is not None and self._size[2]:
            size += "-" + hashlib.sha256(self._size[2].encode()).hexdigest()[:16]
        return f"{self._run_dir}/{PLANS_NAME}/{quote(self._name, safe='')}{size}.json"

    def declaration(self) -> Declaration | None:
        """None: nothing was declared. Raises `DataCorruption`."""
        path = None if self._run_dir is None else f"{self._run_dir}/{TOPOLOGY_NAME}"
        data = None if path is None else _read(path)
        return None if data is None else _decoded(data, Declaration, str(path))

    def kept(self) -> KeptPlan | None:
        """Raises `DataCorruption`."""
        data = None if self.path is None else _read(self.path)
        return None if data is None else _decoded(data, KeptPlan, str(self.path))

    def plan(self, node_of_rank: tuple[int, ...], host_of_node: tuple[str, ...]) -> Plan:
        """At rank 0: the plan that was kept, or a new one, kept from now on where that is possible. Raises
        `UsageError`, `DataCorruption`."""
        kept = self.kept()
        if kept is not None and kept.plan.node_of_rank == node_of_rank:
            return kept.plan
        if kept is not None:
            self._refuse_or_warn(kept, node_of_rank)
        declaration = self.declaration()
        if declaration is None:
            plan = default_plan(node_of_rank)
        else:
            plan = declaration.plan(node_of_rank, zones=declaration.zones_of(host_of_node))
        try:
            self.keep(KeptPlan(plan=plan))
        except FireflyerError as error:
            logger.warning("%s; a restart makes the plan again, from the topology file that is given then", error)
        return plan

    def keep(self, kept: KeptPlan) -> None:
        """Raises `PermissionDenied`, `NoSpace` and what else a disk says."""
        route = kept.plan.route("allreduce", LARGE)
        logger.info(
            "group %s: %d ranks on %d nodes, window %d; a large allreduce: chunks of %d bytes, %s",
            *(self._name, kept.plan.world_size, kept.plan.nodes, kept.plan.window, route.chunk_bytes, route.reason),
        )
        if self.path is None:
            return
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            part = f"{self.path}.part"
            with open(part, "wb") as file:
                file.write(msgspec.json.encode(kept))
            os.replace(part, self.path)
        except OSError as error:
            raise translate_os_error(error, f"keep the plan in {self.path}") from error

    def _refuse_or_warn(self, kept: KeptPlan, node_of_rank: tuple[int, ...]) -> None:
        text = (
            f"{self.path} holds a plan for {kept.plan.world_size} ranks on {kept.plan.nodes} nodes, and the group has "
            f"{len(node_of_rank)} on {len(set(node_of_rank))}"
        )
        if kept.plan.world_size == len(node_of_rank) and kept.plan.nodes == len(set(node_of_rank)):
            text += ", on other nodes"
        if kept.measured is not None:
            raise UsageError(f"{text}; it was measured for that group: start the same group, or remove the file")
        logger.warning("%s; a new plan is made: sums may differ in the last bits from those before", text)


def tuned(join: Callable[[Plan | None], _G], plans: JobPlans) -> _G:
    """The group with a plan from measured speeds: those of an earlier attempt, or measured now, by all ranks at once.

    `join(plan)` makes the communicator; None: as `plans` say. Called by all ranks. Raises what both raise.
    """
    comm = join(None)
    try:
        wish = b""
        if comm.rank == 0:
            kept = plans.kept()
            if kept is None or kept.measured is None:
                wish = msgspec.json.encode(plans.declaration() or Declaration())
        told = _told(comm, wish)
        if not told:
            return comm
        declaration = decode_published(told, Declaration, "rank 0")
        zones = declaration.zones_of(_hosts(comm))
        speeds = measure(comm, zones=zones, declared=declaration.speeds)
    except BaseException:
        comm.close()
        raise
    comm.close()
    if comm.rank != 0:
        return join(None)
    plan = declaration.plan(comm.plan.node_of_rank, zones=zones, speeds=speeds)
    plans.keep(KeptPlan(plan=plan, measured=speeds))
    return join(plan)


def _told(comm: Group, data: bytes) -> bytes:
    """What rank 0 gave."""
    size = np.array([len(data)])
    comm.broadcast(size, root=0)
    if not 0 <= size[0] <= MAX_FILE_BYTES:
        raise UsageError(f"rank 0 announced a declaration of {size[0]} bytes; do all ranks run the same version?")
    array = np.frombuffer(data, np.uint8).copy() if comm.rank == 0 else np.zeros(int(size[0]), np.uint8)
    comm.broadcast(array, root=0)
    return array.tobytes()


def _hosts(comm: Group) -> Sequence[str]:
    return [comm.hosts[comm.plan.leader_of(node)] for node in range(comm.nodes)]


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise translate_os_error(error, f"read {path}") from error
    if len(data) > MAX_FILE_BYTES:
        raise DataCorruption(f"{path} is larger than {MAX_FILE_BYTES} bytes; remove it, and a new one is made")
    return data


def _decoded(data: bytes, kind: type[_T], path: str) -> _T:
    try:
        return decode_json(data, kind)
    except (*DECODE_ERRORS, UsageError) as error:
        raise DataCorruption(f"{path} is damaged: {error}; remove it, and a new one is made") from error


def tell_launcher(env: RankEnvironment, error: PeerFailed) -> None:
    """A rank that gives up because of another is often the first to end: so the launcher knows whom to blame. Sent
    before this process ends, without waiting for it here."""
    Reporter.from_environment(env).peer_failed(error)


def tell_launcher_of_saturation(env: RankEnvironment, group: str, saturated: int, values: int) -> None:
    """Fp8 sums of the group of that name did not fit. Sent before this process ends, without waiting for it here."""
    Reporter.from_environment(env).saturation(group, saturated, values)
