"""What a training script calls so that its job can be suspended and go on later, on other nodes.

    for step in range(start, last + 1):
        train(step)
        if should_suspend():           # on all ranks, equally often
            save(step)
            go_suspend()               # never returns

`should_suspend()` answers `True` on all ranks at the same call, the *horizon* (`base.suspension` says how, and why no
rank then waits in a collective for one that has left). It costs less than a microsecond while nobody asks. Where
`ff run` has not started the process it is always `False`. `TrainingLoop` does all of this by itself.

The *whole-life state* is one integer of 64 bits that the launcher keeps: it survives restarts, suspensions, and the
loss of any node but the launcher's.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Final, NoReturn, TypeVar

import msgspec

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.suspension import MAX_POINT, SUSPENDED_EXIT_CODE, Answer, RankCells
from fireflyer.base.units import SECOND
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.environment import read_environment
from fireflyer.runtime.rpc import BlockingRpcClient, Method, NodeCredential
from fireflyer.runtime.suspension_memory import SharedCells

__all__ = [
    "SET_WATCHDOG",
    "WHOLE_LIFE_STATE",
    "Watchdog",
    "WatchdogIsSet",
    "WholeLifeRequest",
    "WholeLifeState",
    "get_whole_life_state",
    "go_suspend",
    "set_watchdog_time",
    "set_whole_life_state",
    "should_suspend",
    "suspend_deadline_ns",
    "whole_life_state_of",
]

_log = logging.getLogger(__name__)
_CALL_NS: Final = 30 * SECOND
_EXIT_S: Final = 5.0
"""What was registered for the interpreter's exit has so long."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01
_MAX_WATCHDOG_S: Final = 7 * 24 * 3600

_Req = TypeVar("_Req")
_Resp = TypeVar("_Resp")
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class WholeLifeRequest(msgspec.Struct, frozen=True):
    """From a rank: `value` becomes the state. None: what is it?"""

    value: _Int64 | None = None


class WholeLifeState(msgspec.Struct, frozen=True):
    value: _Int64


class Watchdog(msgspec.Struct, frozen=True):
    """From a rank: the time of the job's watchdog; 0: none."""

    limit_ns: Annotated[int, msgspec.Meta(ge=0, le=_MAX_WATCHDOG_S * SECOND)]


class WatchdogIsSet(msgspec.Struct, frozen=True):
    """The launcher has heard it."""


WHOLE_LIFE_STATE = Method("cluster.whole_life_state", WholeLifeRequest, WholeLifeState)
SET_WATCHDOG = Method("cluster.set_watchdog", Watchdog, WatchdogIsSet)


class _Rank:
    """This process, if it stands for a rank of `ff run`."""

    def __init__(self, env: RankEnvironment) -> None:
        self.env = env
        self.cells: RankCells | None = None
        self._memory: SharedCells | None = None
        self._local_state: int | None = None
        if env.suspension is not None:
            self._open(env.suspension)

    def _open(self, path: str) -> None:
        try:
            self._memory = SharedCells.open(path)
        except FireflyerError as error:
            _log.warning("this rank cannot be asked to suspend: %s", error)
            return
        cells = RankCells(self._memory.cells)
        if cells.claim(os.getpid()):
            self.cells = cells
        else:
            _log.warning("another process of rank %d asks should_suspend(); this one is never told to", self.env.rank)

    def whole_life_state(self, value: int | None) -> int:
        """Of the launcher; without one, this process's own."""
        if self.env.control is not None and self.env.secret_file is not None:
            return self.call(WHOLE_LIFE_STATE, WholeLifeRequest(value)).value
        if value is not None or self._local_state is None:
            self._local_state = value if value is not None else whole_life_state_of(os.environ)
        return self._local_state

    def call(self, method: Method[_Req, _Resp], request: _Req) -> _Resp:
        env = self.env
        credential = NodeCredential(load_secret(env.secret_file or ""), f"rank {env.rank}/{os.getpid()}")
        with BlockingRpcClient.connect(env.control or "", credential, _CALL_NS) as client:
            return client.call(method, request, _CALL_NS)


_rank: _Rank | None = None
_enter: Callable[[int | None], Answer] | None = None


def _this_rank() -> _Rank:
    global _rank
    if _rank is None:
        _rank = _Rank(read_environment())
    return _rank


def _forget_in_child() -> None:
    """A process that a rank forks is not the rank."""
    global _rank, _enter
    env = read_environment() if _rank is None else _rank.env
    _rank = _Rank(msgspec.structs.replace(env, suspension=None))
    _enter = None


os.register_at_fork(after_in_child=_forget_in_child)


def should_suspend(step: int | None = None) -> bool:
    """Whether this rank is to save its state now and to call `go_suspend()`: `True` on all ranks at the same call.

    All ranks call it equally often between their collectives, once in a step is usual; where they do not, each gives
    the number of its step, which rises and means the same on all of them. `TrainingLoop` calls it; a script with one
    does not. Somebody having asked, a call may wait some milliseconds for the answer. Raises `UsageError` for a
    `step` that is out of range."""
    global _enter
    if _enter is None:
        cells = _this_rank().cells
        _enter = _go_on if cells is None else cells.enter
    if step is not None and not 0 <= step < MAX_POINT:
        raise UsageError(f"step {step} is out of range; it must be at least 0 and less than {MAX_POINT}")
    answer = _enter(step)
    return answer is not Answer.GO_ON and (answer is Answer.LEAVE or _wait())


def _go_on(_step: int | None) -> Answer:
    return Answer.GO_ON


def _wait() -> bool:
    """Until the horizon is known: two messages between the launcher and the supervisors. Where one of these is lost,
    the rank is ended."""
    cells = _this_rank().cells
    pause_s = _FIRST_PAUSE_S
    while cells is not None:
        time.sleep(pause_s)
        answer = cells.look()
        if answer is not Answer.WAIT:
            return answer is Answer.LEAVE
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return False


def go_suspend() -> NoReturn:
    """Ends this process with the exit code 85, which means: its state is saved, and the job goes on later. Runs
    what was registered with `atexit` (reports are sent, output is flushed) for at most 5 s; `finally` blocks do not
    run.

    A rank that calls it without having been asked suspends the job."""
    cells = _this_rank().cells
    if cells is not None:
        cells.leave()
    last = threading.Timer(_EXIT_S, os._exit, (SUSPENDED_EXIT_CODE,))
    last.daemon = True
    last.start()
    try:
        atexit._run_exitfuncs()  # noqa: SLF001 - the interpreter's own way to end takes long after torch
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(SUSPENDED_EXIT_CODE)


def suspend_deadline_ns() -> int | None:
    """`time.monotonic_ns()` at which this rank is stopped if it has not left: `--suspend-grace` after it was asked.
    None where nobody has asked, or nobody has said how long it has. A save that takes longer is better given up: the
    last checkpoint is there, and `go_suspend()` tells the launcher that all is well."""
    rank = _this_rank()
    asked_ns = 0 if rank.cells is None else rank.cells.asked_ns
    if not asked_ns or rank.env.suspend_grace_ns is None:
        return None
    return asked_ns + rank.env.suspend_grace_ns


def get_whole_life_state() -> int:
    """The integer that `set_whole_life_state` was last called with, by any rank in any run of the job; at first 0. Asks
    the launcher: some milliseconds. Without `ff run` it is this process's own, and begins with FF_WHOLE_LIFE_STATE.
    Raises `TransientError` when the launcher does not answer."""
    return _this_rank().whole_life_state(None)


def set_whole_life_state(value: int) -> None:
    """Store `value`: the launcher has it on its disk then. Raises `UsageError` for one that 64 bits do not hold, and
    `FireflyerError` when the launcher does not answer or cannot write."""
    _check_state(value)
    _this_rank().whole_life_state(value)


def set_watchdog_time(seconds: float) -> None:
    """Set the time of silence: the job counts as hung when no rank has printed or reported for so long (`ff run
    --watchdog`); 0: never. Nothing happens without `ff run`. Raises `UsageError` for a time that is negative or
    above a week."""
    if not 0 <= seconds <= _MAX_WATCHDOG_S:
        raise UsageError(f"watchdog time {seconds} s is out of range; give 0 for none, or at most {_MAX_WATCHDOG_S} s")
    rank = _this_rank()
    if rank.env.control is not None and rank.env.secret_file is not None:
        rank.call(SET_WATCHDOG, Watchdog(round(seconds * SECOND)))


def whole_life_state_of(environ: Mapping[str, str]) -> int:
    """FF_WHOLE_LIFE_STATE, 0 where it is not set. Raises `UsageError`."""
    text = environ.get("FF_WHOLE_LIFE_STATE") or "0"
    try:
        value = int(text)
        _check_state(value)
    except (ValueError, UsageError):
        raise UsageError(f"environment variable FF_WHOLE_LIFE_STATE={text!r} is not an integer of 64 bits") from None
    return value


def _check_state(value: int) -> None:
    if not -(1 << 63) <= value < 1 << 63:
        raise UsageError(f"whole-life state {value} does not fit into 64 bits")
