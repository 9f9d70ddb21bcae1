"""The checkpoint manager of a rank: saves in the background, restores the newest valid checkpoint.

All ranks call `save`, `restore` and (with a period in time) `due` in the same order at the same steps. `save` copies
this rank's share of the state, returns, and lets a background thread write it; nothing but the copy holds training up.
What goes wrong while writing is told at once, through `on_event`, the log and the `SaveHandle`; it never raises into
training, and leaves the older checkpoints as they are.

    manager = CheckpointManager.from_environment("/shared/run/checkpoints", period_steps=100)
    restored = manager.restore()
    if restored is not None:
        values = load_into(restored.shared, restored.values, model, optimizer)
        load_rng(restored.own)                      # None when this rank is new
    for step in range(restored.step + 1 if restored else 1, last + 1):
        ...
        if manager.due(step, clock.now_ns()):
            manager.save(step, capture(model, optimizer, values={"sampler": sampler.state()}))
    manager.close()

`TrainingLoop` does this and more around a training loop.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fireflyer.base.errors import Aborted, Timeout, UsageError
from fireflyer.base.events import CheckpointReport
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.ports import Clock, Disk
from fireflyer.base.units import SECOND, format_duration
from fireflyer.checkpoint.agreement import AGREE_TIMEOUT_NS, Agreement
from fireflyer.checkpoint.copying import DeviceCopies
from fireflyer.checkpoint.core.fence import UNKNOWN_LAUNCH
from fireflyer.checkpoint.core.manager import Settings
from fireflyer.checkpoint.core.manifest import PlanRecord, continue_plans
from fireflyer.checkpoint.core.plain import check_plain
from fireflyer.checkpoint.core.schedule import Periods, Schedule
from fireflyer.checkpoint.engine.save import BackgroundSave, SaveHandle
from fireflyer.checkpoint.engine.steps import GIVEN_UP
from fireflyer.checkpoint.joining import find_peers
from fireflyer.checkpoint.opening import stored_plan
from fireflyer.checkpoint.restored import Restored, Targets
from fireflyer.checkpoint.restoring import Restoring
from fireflyer.checkpoint.saving import Saving
from fireflyer.checkpoint.snapshot import Content
from fireflyer.checkpoint.state import State
from fireflyer.checkpoint.storage import CheckpointPath, is_remote, open_storage
from fireflyer.runtime.clock import MonotonicClock
from fireflyer.runtime.environment import read_environment
from fireflyer.runtime.store import Store

__all__ = ["CheckpointManager"]

_log = logging.getLogger(__name__)
COMMIT_TIMEOUT_NS = 1800 * SECOND
"""How long one save may wait for another rank."""


class CheckpointManager:
    """See the module. Rank 0's constructor makes the directory, fences older attempts (from then on they can change
    nothing in it), removes what they left, and holds `job_plan` to the one stored at the job's first start: it raises
    `UsageError` when they differ. `plan` is what may change with the number of ranks, such as the plan of their
    collectives: checkpoints record each number of ranks and plan with the step from which it holds (`Restored.plans`,
    `stored_plans`). It raises `Fenced` where a later attempt of the same `launch` has begun. With a
    period a directory that may not be written (`PermissionDenied`) is noticed at the start and not at the first save (a
    full one is a warning); without one, a directory may be read-only.

    `directory` is the same storage for every rank: an address of 3FS (`ff://…/path`, as `open_storage` takes it), or a
    directory; a relative one is rank 0's, from the working directory that it has now. `disk`: on which it is a
    directory, where that is none of both. `keep` counts committed checkpoints; those whose step is a multiple of
    `keep_every`, and pinned ones (`ff ckpt pin`), stay beside them. With `mttf_ns`, the mean time to failure of the
    job, in place of `period_ns` the period in time is the one that loses least, by what saves have cost
    (`core.schedule`). With `world_size` 1 `store` may be None. `attempt` counts within `launch` (both as
    `read_environment()` gives them; an empty `launch` is different from every other). `on_event` gets one
    `CheckpointReport` per save and rank, in the background thread. Not to be called from two threads at once.
    """

    def __init__(
        self,
        directory: CheckpointPath,
        *,
        rank: int,
        world_size: int,
        store: Store | None,
        disk: Disk | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        period_steps: int | None = None,
        period_ns: int | None = None,
        mttf_ns: int | None = None,
        job_plan: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
        attempt: int = 0,
        launch: str = "",
        on_event: Callable[[CheckpointReport], None] | None = None,
        clock: Clock | None = None,
        name: str = "main",
        timeout_ns: int = COMMIT_TIMEOUT_NS,
    ) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(
                f"rank {rank} is out of range for world_size {world_size}; pass both as read_environment() gives them"
            )
        if keep < 1:
            raise UsageError(f"keep={keep} would keep no checkpoint; it must be at least 1")
        if keep_every is not None and keep_every < 1:
            raise UsageError(f"keep_every={keep_every} is no number of steps; give 1 or more, or None")
        if world_size > 1 and store is None:
            raise UsageError(
                f"{world_size} ranks need a rendezvous store to commit checkpoints together; pass store=open_store(env)"
            )
        storage = open_storage(directory, disk=disk)
        self.rank, self.world_size = rank, world_size
        self._disk = storage.disk
        self._clock = clock or MonotonicClock()
        self._plan_now: dict[str, Any] = check_plain(plan or {}, "plan")
        settings = Settings(
            rank=rank,
            world_size=world_size,
            attempt=attempt,
            keep=keep,
            keep_every=keep_every,
            prefix=f"checkpoint/{name}",
            timeout_ns=timeout_ns,
            job_plan=None if job_plan is None else check_plain(job_plan, "job_plan"),
            plans=(PlanRecord(1, world_size, self._plan_now),),
            writer=secrets.token_hex(4),
        )
        self._timeout_ns = timeout_ns
        self._schedule = Schedule(Periods(period_steps, period_ns, mttf_ns), start_ns=self._clock.now_ns())
        self._unmeasured: tuple[BackgroundSave, int] | None = None
        """A save that training goes on beside, and since when training waited for it."""
        self._closed = False
        self._owned_store: Store | None = None
        self._waits_at_the_end = False
        self._agreement = Agreement(store, f"{settings.prefix}/{attempt}", rank=rank, world_size=world_size)
        self.directory, self._shown = storage.root, storage.name
        if world_size > 1 and not is_remote(directory) and not os.path.isabs(directory):
            told = self._agreement.agree("directory", self.directory.encode())
            self.directory = self._shown = told.decode(errors="surrogateescape")
        devices = DeviceCopies()
        self._restoring = Restoring(self._disk, devices, self._agreement, rank)
        self._saving = Saving(
            settings,
            disk=self._disk,
            store=store,
            clock=self._clock,
            root=self.directory,
            launch=hashlib.blake2b(launch.encode(), digest_size=8).hexdigest() if launch else UNKNOWN_LAUNCH,
            agreement=self._agreement,
            devices=devices,
            on_event=on_event,
        )
        if rank == 0:
            if store is not None and attempt > 0:
                store.delete_prefix(f"{settings.prefix}/{attempt - 1}/")
            self._saving.open_directory(self._shown, will_save=self._schedule.periodic)

    @classmethod
    def from_environment(
        cls,
        directory: CheckpointPath,
        *,
        env: RankEnvironment | None = None,
        group: dist.ProcessGroup | None = None,
        disk: Disk | None = None,
        **options: Any,
    ) -> Self:
        """Manager of the ranks of `group`, else those that `ff run` started, else those of torch's default
        process group (torchrun, mpirun, spawn: call `init_process_group` first), else for this process alone.
        Collective. `options` as above but rank, world_size, store, name, attempt and launch, which are found out."""
        env = env or read_environment()
        peers = find_peers(env, group)
        manager = cls(
            directory,
            rank=peers.rank,
            world_size=peers.world_size,
            store=peers.store,
            disk=disk,
            attempt=env.attempt,
            launch=env.launch,
            name=peers.name,
            **options,
        )
        manager._owned_store = peers.store
        manager._waits_at_the_end = peers.store_ends_with_rank_0 and peers.world_size > 1
        return manager

    # Saving.

    @property
    def skipped(self) -> int:
        """Saves that were due while another was in flight."""
        return self._schedule.skipped

    @property
    def saving(self) -> bool:
        return self._saving.busy

    def due(self, step: int, now_ns: int) -> bool:
        """Whether to save now that `step` steps are done; the same answer on every rank. With a period in time rank 0
        decides and the others ask it, one round trip to the store per call."""
        due = self.due_here(step, now_ns)
        return due if not self._schedule.by_time else self.decide(b"yes" if due else b"no") == b"yes"

    def due_here(self, step: int, now_ns: int) -> bool:
        """Answer as `due` does, by this rank's clock and without asking rank 0."""
        self._measure()
        return self._schedule.due(step, now_ns)

    def decide(self, mine: bytes) -> bytes:
        """Decision of rank 0, for all ranks; all ranks call it at the same step. One round trip to the store."""
        return self._agreement.decide(mine)

    def ask_to_stop(self) -> None:
        """Ask to stop, on any rank at any time: `asked_to_stop` says so from now on."""
        self._agreement.ask_to_stop()

    def asked_to_stop(self) -> bool:
        """Whether a rank has asked to stop. Ranks hear of it at different moments: `decide` makes them agree."""
        return self._agreement.asked_to_stop()

    def reserve(self, state: State, *, blocking: bool = True) -> None:
        """Allocates and touches the memory for snapshots of states like this one, so that the first save is not slow.
        All ranks call it, before training, or without `blocking` while it goes on. Raises `UsageError`, also where
        ranks have different tensors of one name."""
        self._saving.reserve(state, blocking=blocking)

    def save(
        self,
        step: int,
        state: State,
        *,
        blocking: bool = False,
        timeout_ns: int | None = None,
        deferred: Collection[str] = (),
    ) -> SaveHandle:
        """Copies this rank's share and writes it in the background; with `blocking` returns when it is committed
        and what it replaced is removed. `timeout_ns`: a blocking save that takes longer is given up, on all ranks:
        `handle.error()` is `Aborted`, and the checkpoints that were there stay. Close the manager then.

        Tensors on CUDA devices are saved as they are after what their current streams have been given. They are copied
        beside training, and the current streams wait for that: nothing that is given to them later changes what is
        saved, and the call does not wait. Streams that are not current must be made to wait for those that are.
        `deferred` are names in `state.shared` that do not change before `handle.before_update()` is called, and the
        current streams do not wait for those before: a forward and backward pass can run beside the copies.

        While an earlier save is in flight, a new one is skipped (`handle.skipped`), or waits for it if `blocking`.
        Raises `UsageError` for a state that cannot be stored, and `Fenced`, on all ranks at the same step, when an
        earlier save has found that a newer attempt has the directory: this one is left over and must end. Other
        failures to write are in the handle.
        """
        start_ns = self._clock.now_ns()
        if self._closed:
            raise UsageError("the checkpoint manager is closed; make another")
        if not isinstance(state, State):
            raise UsageError(
                f"the state is a {type(state).__name__}; give a State, as capture(model, optimizer) makes it"
            )
        values = check_plain(state.values, "state.values")
        content = self._saving.describe(state)
        handle = SaveHandle(step)
        if blocking and timeout_ns is not None:
            return self._save_within(start_ns + timeout_ns, step, state, content, values, handle, start_ns)
        if blocking:
            self.wait()
        plan = self._saving.plan(state, content, self._timeout_ns if blocking else AGREE_TIMEOUT_NS)
        if plan is None:
            self._schedule.skip(step)
            handle.skip()
            return handle
        since_ns = self._schedule.due_since_ns(step, start_ns)
        self._schedule.began(step, start_ns)
        save = self._saving.begin(step, plan, values, handle, start_ns, deferred)
        if blocking:
            self.wait()
        else:
            self._unmeasured = save, since_ns
        return handle

    def _measure(self) -> None:
        """What the newest save has cost, once it has ended."""
        if self._unmeasured is None or not self._unmeasured[0].ended:
            return
        (save, since_ns), self._unmeasured = self._unmeasured, None
        before = self._schedule.chosen
        if before is None or not save.committed:
            return
        self._schedule.measured(stall_ns=save.held_up_until_ns() - since_ns, duration_ns=save.ended_ns - since_ns)
        now = self._schedule.chosen
        if self.rank == 0 and now is not None and now != before:
            _log.info("checkpoint period=%s reason=%s", format_duration(now.period_ns), now.reason)

    def _save_within(
        self,
        until_ns: int,
        step: int,
        state: State,
        content: Content,
        values: dict[str, Any],
        handle: SaveHandle,
        start_ns: int,
    ) -> SaveHandle:
        """Rank 0 says whether it may begin, and nobody who waits for it has more time than it."""
        if self._join_until(until_ns):
            try:
                plan = self._saving.plan(state, content, max(1, until_ns - self._clock.now_ns()))
                if plan is not None:
                    self._schedule.began(step, start_ns)
                    self._saving.begin(step, plan, values, handle, start_ns, ())
                    self._join_until(until_ns)
            except Timeout as error:
                _log.warning("checkpoint step=%d was not begun in time: %s", step, error)
        self._saving.give_up()
        handle.finish(None, Aborted(GIVEN_UP))  # nothing happens where it has ended
        return handle

    def _join_until(self, until_ns: int) -> bool:
        """Whether no save is in flight any more."""
        return self._saving.join(max(0, until_ns - self._clock.now_ns()))

    def wait(self) -> None:
        """Wait until no save is in flight, tidying up included. Raises nothing."""
        self._saving.join()

    def close(self, timeout_ns: int | None = None) -> None:
        """Waits for the save in flight, at most so long if it is given: after an error nobody should wait for ranks
        that may be dead. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if timeout_ns is None:
            self.wait()
            if self._waits_at_the_end:
                self._agreement.leave_together()
        else:
            self._saving.join(timeout_ns)
        if self._owned_store is not None and not self.saving:
            self._owned_store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Restoring.

    def stored_plan(self) -> dict[str, Any] | None:
        """The plan with which the job was first started, None before that. Raises `DataCorruption`."""
        return stored_plan(self._disk, self.directory)

    def restore(
        self,
        into: Mapping[str, torch.Tensor] | None = None,
        like: Mapping[str, DTensor] | None = None,
        *,
        wanted: Callable[[str], bool] | None = None,
    ) -> Restored | None:
        """The newest valid checkpoint, read into CPU tensors, or into those of `into`; None when the directory holds
        none at all. Rank 0 verifies every byte of it and decides; the others verify what they read.

        Shared tensors of `into` that are contiguous, on the CPU or a CUDA device, with the dtype and shape of the
        stored ones, are filled in place and are what `Restored.shared` holds; for all others new tensors are made. An
        error may leave them half filled. Those on devices are filled after what the current streams have been given,
        and all are filled when the call returns.

        Sharded tensors of `into` (`DTensor`) get this rank's part, whatever the mesh of the job that saved; `like` says
        for a prefix of names (`optimizer/3`) how to shard what is made new, as `layouts_of` gives it. Without, what was
        saved in slices is made whole.

        `wanted` says of the name of a shared tensor whether this rank needs it (default: all of them). A stage of a
        pipeline asks for its own, whichever ranks had them when they were saved.

        Raises `TransientError` when it may succeed later, `DataCorruption` when there are checkpoints but none is
        valid, or when this rank reads other bytes than rank 0 did."""
        targets = Targets(into or {}, like or {}, wanted)
        restored, refused = self._restoring.restore(self.directory, self._shown, targets, self._timeout_ns)
        self._saving.refused = tuple(entry.name for entry in refused)
        if restored is not None:
            now = PlanRecord(restored.step + 1, self.world_size, self._plan_now)
            self._saving.set_plans(continue_plans(restored.plans, now))
            self._schedule.began(restored.step, self._clock.now_ns())
        return restored
