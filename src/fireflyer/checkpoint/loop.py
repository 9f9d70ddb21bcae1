"""A training loop that goes on where it stopped: restore, steps, checkpoints, the last one, reports.

    with TrainingLoop("checkpoints", model, optimizer, period_steps=100, reporter=reporter) as loop:
        for step in loop.steps(10_000):             # from the step after the newest checkpoint
            loss = train_step(model, optimizer, batch_of(step))
            loop.record(loss=loss, samples=32)

It runs under `ff run`, under torchrun (after `init_process_group`) and alone. Killed at any moment and started again,
it continues after the newest checkpoint with the same weights, moments and random numbers.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from fireflyer.base.errors import Aborted, FireflyerError, UsageError
from fireflyer.base.events import ResumeReport, StepReport
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.ports import Clock
from fireflyer.base.units import SECOND
from fireflyer.checkpoint.core.schedule import periods_of
from fireflyer.checkpoint.engine.save import SaveHandle
from fireflyer.checkpoint.manager import CheckpointManager
from fireflyer.checkpoint.restored import Restored
from fireflyer.checkpoint.state import (
    State,
    capture,
    changed_by,
    layouts_of,
    load_into,
    load_rng,
    needed_by,
    tensors_of,
)
from fireflyer.checkpoint.storage import CheckpointPath
from fireflyer.runtime.clock import MonotonicClock
from fireflyer.runtime.environment import read_environment
from fireflyer.runtime.reporter import Reporter
from fireflyer.runtime.suspension import go_suspend, should_suspend, suspend_deadline_ns

__all__ = ["Stateful", "TrainingLoop"]

_log = logging.getLogger(__name__)
ERROR_WAIT_NS = 5 * SECOND
"""After an exception a save that is in flight gets so long: all ranks may be well, and then it still commits."""
_LEAVING_NS = 6 * SECOND
"""Of the grace period, for what follows the save: reports are sent, and the process ends."""
_ASK_NS = SECOND
"""How often rank 0 looks whether another rank has been told to stop."""


class Stateful(Protocol):
    """Interface of torch's schedulers, gradient scalers and stateful samplers. The state holds no tensors; tuples in it
    come back as lists."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class TrainingLoop:
    """See the module. A context manager; all ranks enter it, take the same steps, and leave it.

    `directory` as of `CheckpointManager`. A checkpoint is written in the background every `period_steps` steps and
    whenever `period` ("10m", "30s") has passed since the last one; every 5 minutes where neither is given. With
    `period="auto"` the time is the one that loses least: by what saves have cost, and by `mttf` ("8h"), the mean time
    until one of the job's nodes fails. `keep` checkpoints are kept, and those whose step is a multiple of `keep_every`.
    The one of the last step is waited for, and raises if it fails; others that fail are logged and reported, and
    training goes on. `stateful` are
    other objects to save and restore, by name; `values` holds plain values (None, bool, text, numbers, lists, dicts)
    that are saved with each checkpoint and are there again after a restore. With `reporter` every step, resume and
    checkpoint is reported; give `record` what only the script knows. `before_save` is called with the step whenever a
    checkpoint is to be saved, on all ranks alike, as a guard's `before_save`: where it raises nothing is saved, and the
    loop ends.

    One of `stop_signals`, on any rank, ends the loop on all ranks after the step in progress, with a checkpoint of
    it; `__exit__` then ends the process with the exit code 128 + signal. The second one ends it at once. Handlers are
    set in the main thread only. An exception in the body ends the loop without another checkpoint.

    When the job is to be suspended (`fireflyer.cluster.sdk.should_suspend`, asked after each step), all ranks save the
    same step and the process ends in `steps` with the exit code 85; what follows the loop is not executed. A save that
    would take longer than the grace period is given up, and the job goes on from the checkpoint before.

    Where the model is on CUDA devices, its checkpoint is copied beside the forward and backward pass of the next step:
    `optimizer.step` waits for the copies, on the devices. From the end of a step to the next `optimizer.step` nobody
    else may change the parameters or state of `optimizer`; where somebody does, `copies_beside_steps=False` makes all
    that is computed on the devices after a checkpoint wait for its copies. So it is after a step without a call of
    `optimizer.step` as well: where a CUDA graph replays it, no call says when to wait.

    `by_name` (default: off) is for ranks that have different parts of the model, such as the stages of a pipeline, and
    for what such a job is to continue: see `capture`. Each rank saves and restores what is in its `model`, whose names
    must be those in the whole model; the number of stages may change between two starts.

    Raises what `CheckpointManager` raises (`UsageError`, `PermissionDenied`, `DataCorruption`, `Fenced`), and
    `UsageError` where the model or the optimizer is not the one that was saved; then the model may be half loaded.
    """

    def __init__(
        self,
        directory: CheckpointPath,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        period_steps: int | None = None,
        period: str | None = None,
        mttf: str | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        values: Mapping[str, Any] | None = None,
        job_plan: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
        reporter: Reporter | None = None,
        before_save: Callable[[int], object] | None = None,
        stop_signals: Sequence[int] = (signal.SIGTERM,),
        copies_beside_steps: bool = True,
        by_name: bool = False,
        env: RankEnvironment | None = None,
        group: dist.ProcessGroup | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.values: dict[str, Any] = dict(values or {})
        self.restored: Restored | None = None
        self.step = 0
        """Steps that are done."""
        self._stateful = dict(stateful or {})
        self._reporter = reporter
        self._before_save = before_save
        self._env = env or read_environment()
        self._clock = clock or MonotonicClock()
        self._signals = tuple(stop_signals)
        self._before: dict[int, Any] = {}
        self._signal: int | None = None
        self._stopping = False
        self._ended = False
        self._reserved = False
        self._copies_beside_steps = copies_beside_steps
        self._by_name = by_name
        self._updated = False
        """The step in progress has called `optimizer.step`."""
        self._went_back = False
        """The step in progress has called `rewind`."""
        self._copying: SaveHandle | None = None
        """A save with deferred tensors, until the next update waits for its copies."""
        self._captured = False
        """A CUDA graph has captured `optimizer.step`, and may replay it at any time."""
        self._hook: RemovableHandle | None = None
        self._next_ask_ns = 0
        self._recorded: dict[str, Any] = {}
        periods = periods_of(period_steps, period, mttf)
        self._options: dict[str, Any] = {
            "period_steps": periods.steps,
            "period_ns": periods.time_ns,
            "mttf_ns": periods.mttf_ns,
            "keep": keep,
            "keep_every": keep_every,
            "job_plan": job_plan,
            "plan": plan,
            "env": self._env,
            "group": group,
            "clock": self._clock,
            "on_event": None if reporter is None else reporter.checkpoint,
        }
        self._directory = directory
        self._asks = periods.by_time or bool(self._signals)
        self._manager: CheckpointManager | None = None
        self._saves: list[SaveHandle] = []
        self._save_error: FireflyerError | None = None

    @property
    def save_error(self) -> FireflyerError | None:
        """Error of the newest checkpoint that was to be saved; None where it did not fail, or is being written. Log and
        report have said so when it happened. A script that must not go on without checkpoints may look at each step."""
        self._notice_saves()
        return self._save_error

    def _notice_saves(self) -> None:
        for handle in [one for one in self._saves if one.done()]:
            self._saves.remove(handle)
            self._save_error = handle.error()

    @property
    def manager(self) -> CheckpointManager:
        """Raises `UsageError` outside of the `with` block."""
        if self._manager is None:
            raise UsageError("the training loop is not open; use it in a `with` block")
        return self._manager

    @property
    def stopped(self) -> bool:
        """The loop ends, or has ended, before its last step, because it was asked to."""
        return self._stopping

    def __enter__(self) -> Self:
        if self._manager is not None or self._ended:
            raise UsageError("a training loop can be entered once; make another")
        self._take_signals()
        try:
            self._manager = CheckpointManager.from_environment(self._directory, **self._options)
            self._restore(self._manager)
            if self.optimizer is not None and self._copies_beside_steps:
                with contextlib.suppress(
                    AttributeError
                ):  # a wrapper that is half an Optimizer: its hooks are not called
                    self._hook = self.optimizer.register_step_pre_hook(self._before_update)
        except BaseException:
            self._give_signals_back()
            if self._manager is not None:
                self._manager.close(ERROR_WAIT_NS)
            raise
        return self

    def _restore(self, manager: CheckpointManager) -> Restored | None:
        start_ns = self._clock.now_ns()
        layouts = layouts_of(self.optimizer, by_name_in=self.model if self._by_name else None)
        wanted = needed_by(self.model, self.optimizer) if self._by_name else None
        restored = self.restored = manager.restore(tensors_of(self.model), layouts, wanted=wanted)
        if restored is not None:
            saved_by_name = "optimizer" not in restored.values or restored.values["optimizer"].get("by_name", False)
            if self._by_name and self.optimizer is not None and not saved_by_name:
                raise UsageError(
                    f"{restored.name} has the optimizer's state by number; resume without by_name, on ranks that all "
                    "have the whole model"
                )
            user = load_into(restored.shared, restored.values, self.model, self.optimizer)
            self.values = dict(user.get("values", {}))
            for name, one in self._stateful.items():
                if name not in user.get("stateful", {}):
                    raise UsageError(f"{restored.name} has no state of {name!r}; resume with what was saved")
                one.load_state_dict(user["stateful"][name])
            if restored.own is not None:
                load_rng(restored.own)
            restored.shared, restored.own = {}, None  # as large as the model, and not needed any more
            self.step = restored.step
        if self._reporter is not None:
            self._reporter.resume(
                ResumeReport(
                    rank=manager.rank,
                    attempt=self._env.attempt,
                    step=self.step,
                    checkpoint=restored.name if restored else None,
                    passed_over=restored.passed_over if restored else (),
                    load_ns=self._clock.now_ns() - start_ns,
                )
            )
        return restored

    def steps(self, last: int) -> Iterator[int]:
        """The numbers of the steps that are left, up to and including `last`. When the loop body has ended, the step
        counts as done: it is reported and saved if that is due. Leave the loop with `stop()`, or by an exception: a
        `break` leaves the step in progress without a checkpoint."""
        manager = self.manager
        while self.step < last and not self._stopping:
            start_ns = self._clock.now_ns()
            self._recorded = {}
            self._updated = False
            yield self.step + 1
            if self._went_back:
                self._went_back = False
                continue
            self.step += 1
            leaves = self.step < last and should_suspend(self.step)
            done_ns = self._clock.now_ns()
            if not self._reserved and self.step < last:
                self._reserved = True
                manager.reserve(self._state(), blocking=False)  # now the optimizer has its state
            self._save_if_due(manager, last, done_ns, leaves=leaves)
            self._report(manager, productive_ns=done_ns - start_ns, checkpoint_ns=self._clock.now_ns() - done_ns)
            if leaves:
                manager.close(ERROR_WAIT_NS if manager.saving else None)
                go_suspend()

    def record(self, *, loss: float | None = None, samples: int = 0, tokens: int = 0) -> None:
        """Record what the step in progress did: its loss (the mean over all ranks, None where it is not known), samples
        and tokens of this rank."""
        self._recorded = {"loss": loss, "samples": samples, "tokens": tokens}

    def rewind(self) -> None:
        """Goes back to the newest valid checkpoint, from which `steps` then goes on: the step in progress is not
        counted, reported or saved. All ranks call it at the same step. Raises `UsageError` where there is no checkpoint
        yet, and what `CheckpointManager.restore` raises."""
        manager = self.manager
        manager.wait()
        if self._copying is not None:
            self._copying.before_update()
            self._copying = None
        if self._restore(manager) is None:
            raise UsageError(f"there is no checkpoint to go back to from step {self.step + 1}; save more often")
        self._went_back = True

    def stop(self) -> None:
        """The step in progress is the last, with a checkpoint. Called on all ranks at the same step, or on any rank
        where `stop_signals` or a period in time are given: the others then follow within a few steps."""
        if not self._asks:
            self._stopping = True
        self._next_ask_ns = 0  # where all ranks are told at the same step, it is the last one
        self.manager.ask_to_stop()

    def _save_if_due(self, manager: CheckpointManager, last: int, now_ns: int, *, leaves: bool) -> None:
        due = self._agree(manager, now_ns) if self._asks else manager.due_here(self.step, now_ns)
        final = self._stopping or leaves or self.step >= last
        if (due or final) and self._before_save is not None:
            self._before_save(self.step)
        if leaves:
            self._save_before_leaving(manager)
        elif due or final:
            state = self._state()
            deferred = () if final else self._deferred(state)
            handle = manager.save(self.step, state, blocking=final, deferred=deferred)
            self._notice_saves()
            if not handle.skipped:
                self._saves.append(handle)
            if final:
                handle.result()
            elif deferred and not handle.skipped:
                self._copying = handle

    def _deferred(self, state: State) -> Collection[str]:
        """What waits for the next update only. After a step that has not called `optimizer.step`, the next one may not
        call it either, and change the parameters all the same."""
        calls_it = self._updated and not self._captured
        return changed_by(self.optimizer, state) if self.optimizer is not None and calls_it else ()

    def _before_update(self, *_: object) -> None:
        initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch lacks annotations
        if initialized and torch.cuda.is_current_stream_capturing():
            self._captured = True
            if self._copying is not None:
                raise UsageError(
                    "a CUDA graph captures optimizer.step while a checkpoint is being copied, and would not wait for "
                    "it when it is replayed; capture it before the first checkpoint, or give copies_beside_steps=False"
                )
            return
        self._updated = True
        handle, self._copying = self._copying, None
        if handle is not None:
            handle.before_update()

    def _save_before_leaving(self, manager: CheckpointManager) -> None:
        """In the time that is left until this rank is stopped. Raises where the save failed for another reason."""
        deadline_ns = suspend_deadline_ns()
        left_ns = None if deadline_ns is None else max(0, deadline_ns - time.monotonic_ns())
        limit_ns = None if left_ns is None else left_ns - min(_LEAVING_NS, left_ns // 4)
        handle = manager.save(self.step, self._state(), blocking=True, timeout_ns=limit_ns)
        if isinstance(handle.error(), Aborted):
            _log.warning(
                "checkpoint of step %d took longer than the grace period and was given up; the job goes on from the "
                "one before: give it more time, or save more often", self.step,
            )  # fmt: skip
        else:
            handle.result()

    def _agree(self, manager: CheckpointManager, now_ns: int) -> bool:
        if self._signal is not None and not manager.asked_to_stop():
            manager.ask_to_stop()
        word = b"save" if manager.due_here(self.step, now_ns) else b"go"
        if manager.rank == 0 and self._stop_is_wanted(manager, now_ns):
            word = b"stop"
        answer = manager.decide(word)
        self._stopping = self._stopping or answer == b"stop"
        return answer != b"go"

    def _stop_is_wanted(self, manager: CheckpointManager, now_ns: int) -> bool:
        if self._signal is not None:
            return True
        if now_ns < self._next_ask_ns:
            return False
        if manager.world_size > 1:
            self._next_ask_ns = now_ns + _ASK_NS
        return manager.asked_to_stop()

    def _state(self) -> State:
        values = {
            "values": self.values,
            "stateful": {name: one.state_dict() for name, one in self._stateful.items()},
        }
        return capture(self.model, self.optimizer, values=values, by_name=self._by_name)

    def _report(self, manager: CheckpointManager, *, productive_ns: int, checkpoint_ns: int) -> None:
        if self._reporter is not None:
            self._reporter.step(
                StepReport(
                    rank=manager.rank,
                    attempt=self._env.attempt,
                    step=self.step,
                    samples=self._recorded.get("samples", 0),
                    tokens=self._recorded.get("tokens", 0),
                    loss=self._recorded.get("loss"),
                    productive_ns=productive_ns,
                    checkpoint_ns=checkpoint_ns,
                )
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        manager, self._manager, self._ended = self.manager, None, True
        if self._hook is not None:
            self._hook.remove()
        try:
            manager.close(None if error is None else ERROR_WAIT_NS)
        finally:
            self._give_signals_back()
        if error is None and self._signal is not None and self._stopping:
            raise SystemExit(128 + self._signal)

    # Signals.

    def _take_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signal is not None:
            self._give_signals_back()
            signal.raise_signal(number)
        self._signal = number

    def _give_signals_back(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
