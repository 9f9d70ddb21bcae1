"""How a training script tells the launcher what it did.

Never blocks and never breaks the training: a report is put into a bounded queue and sent by a thread of its own. When
the launcher is slower than the training the oldest *step* reports are given up and counted; a resume or a checkpoint
report never is. Without `ff run` the reports go to a file of this rank in the run directory, if there is one; `ff
report` puts the files of all ranks together. `attempt` of a report is set to the process's own.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Self

import msgspec

from fireflyer.base.errors import FireflyerError, PeerFailed, TransientError
from fireflyer.base.events import (
    MAX_SUSPECTS,
    CheckpointReport,
    CorruptionReport,
    PeerFailureReport,
    Report,
    ResumeReport,
    SaturationReport,
    StepReport,
)
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import MS, SECOND
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.report_file import ReportFile, open_report_file
from fireflyer.runtime.rpc import BlockingRpcClient, Method, NodeCredential

__all__ = ["CLOSE_NS", "MAX_IMPORTANT", "MAX_STEPS_QUEUED", "REPORT", "Acknowledged", "Reporter", "Reports"]

_log = logging.getLogger(__name__)
MAX_STEPS_QUEUED = 4096
MAX_IMPORTANT = 65536
"""Resume and checkpoint reports that wait; a job that makes so many while its launcher is away is told so."""
CONNECT_NS = 10 * SECOND
CALL_NS = 10 * SECOND
RETRY_NS = 200 * MS
CLOSE_NS = 3 * SECOND

MAX_REPORTS = 256
"""In one message."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_numbers = itertools.count(1)


class Reports(msgspec.Struct, frozen=True):
    """From a rank."""

    reports: Annotated[tuple[Report, ...], msgspec.Meta(max_length=MAX_REPORTS)]
    number: _Number
    """Of this batch, from 1: one that is sent again, because its answer was lost, counts once."""
    dropped: _Number
    """Step reports that the rank gave up since it started."""


class Acknowledged(msgspec.Struct, frozen=True):
    """The launcher has them."""


REPORT = Method("cluster.report", Reports, Acknowledged)


class Reporter:
    """Made by `from_environment`. Also a context manager; may be used from several threads."""

    def __init__(
        self,
        address: str | None,
        secret_file: str | None,
        identity: str,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        file: ReportFile | None = None,
    ) -> None:
        self._file = file
        self._attempt, self._rank = attempt, rank
        self._address = address
        self._secret_file = secret_file
        self._identity = identity
        self._owner = os.getpid()
        self._queue: deque[Report] = deque()
        self._steps = 0
        self._dropped = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._deadline_ns = 0
        self._batches = 0
        self._client: BlockingRpcClient | None = None
        self._thread: threading.Thread | None = None
        if file is not None or (address is not None and secret_file is not None):
            self._thread = threading.Thread(target=self._send_all, name="step reports", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    @classmethod
    def from_environment(cls, env: RankEnvironment, *, run_dir: str | None = None) -> Self:
        """Reports to the launcher that started this rank; where `ff run` did not, to a file below `run_dir` (default:
        FF_RUN_DIR; with neither, to nobody). Never raises: what cannot be written is logged."""
        if env.control is None and (run_dir or env.run_dir):
            file = open_report_file(run_dir or env.run_dir or "", env)
            return cls(None, None, "", attempt=env.attempt, rank=env.rank, file=file)
        who = f"rank {env.rank}/attempt {env.attempt}/{os.getpid()}.{next(_numbers)}"
        return cls(env.control, env.secret_file, who, attempt=env.attempt, rank=env.rank)

    @property
    def dropped(self) -> int:
        """Step reports that were given up so far."""
        return self._dropped

    def step(self, report: StepReport) -> None:
        self._put(report)

    def resume(self, report: ResumeReport) -> None:
        self._put(report)

    def checkpoint(self, report: CheckpointReport) -> None:
        self._put(report)

    def peer_failed(self, error: PeerFailed) -> None:
        """A collective raised `error`, and this rank is about to give up: the launcher then blames `error.rank`, which
        may hang without ever failing itself, and not the rank that was the first to stop waiting for it."""
        if error.rank >= 0 and self._rank is not None:
            self._put(PeerFailureReport(self._rank, self._attempt or 0, error.rank, error.message))

    def corruption(self, *, step: int, suspects: Sequence[int], decided: bool, reason: str) -> None:
        """Report that replicas of the training state differ, before this rank gives up."""
        if self._rank is not None:
            named = tuple(suspects[:MAX_SUSPECTS])
            self._put(CorruptionReport(self._rank, self._attempt or 0, step, named, decided, reason[:4096]))

    def saturation(self, group: str, saturated: int, values: int) -> None:
        """Report that this rank rounded `saturated` of `values` results of fp8 sums in `group`, as they did not fit."""
        if self._rank is not None:
            self._put(SaturationReport(self._rank, self._attempt or 0, group, saturated, values))

    def close(self) -> None:
        """Sends what is queued, for at most `CLOSE_NS`; idempotent. Called at the interpreter's exit if not before."""
        thread = self._thread
        if thread is None or os.getpid() != self._owner:
            return
        self._thread = None
        with self._changed:
            self._deadline_ns = time.monotonic_ns() + CLOSE_NS
            self._closing.set()
            self._changed.notify()
        thread.join(CLOSE_NS / SECOND + 1)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None and kind is not None:
            self._file.failed = True
        self.close()

    def _put(self, report: Report) -> None:
        if self._thread is None or os.getpid() != self._owner:
            return
        if self._attempt is not None and report.attempt != self._attempt:
            # A process lives in one attempt. The launcher ignores reports of others, so that a script which forgot to
            # hand the number on would lose them without a word.
            report = msgspec.structs.replace(report, attempt=self._attempt)
        with self._changed:
            if isinstance(report, StepReport):
                self._steps += 1
                if self._steps > MAX_STEPS_QUEUED:
                    self._drop_oldest_step()
            elif len(self._queue) - self._steps >= MAX_IMPORTANT:
                _log.error("report dropped: the queue is full, the launcher accepts none report=%r", report)
                return
            self._queue.append(report)
            self._changed.notify()

    def _drop_oldest_step(self) -> None:
        for index, report in enumerate(self._queue):
            if isinstance(report, StepReport):
                del self._queue[index]
                self._steps -= 1
                self._dropped += 1
                return

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        try:
            while (batch := self._take()) is not None:
                if not self._send(batch):
                    break
        finally:
            self._thread = None
            self._lose_connection()
            if self._file is not None:
                self._file.close()

    def _take(self) -> list[Report] | None:
        """Waits for reports; None when closing and nothing is left."""
        with self._changed:
            while not self._queue and not self._closing.is_set():
                self._changed.wait()
            if not self._queue:
                return None
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_REPORTS))]
            self._steps -= sum(isinstance(report, StepReport) for report in batch)
            return batch

    def _send(self, batch: list[Report]) -> bool:
        """Tries until it is done. False when there is no point in trying (any more)."""
        if self._file is not None:
            return self._file.append(batch)
        self._batches += 1
        request = Reports(tuple(batch), self._batches, self._dropped)
        while True:
            try:
                self._connected().call(REPORT, request, CALL_NS)
                return True
            except TransientError as error:
                self._lose_connection()
                if self._wait_to_retry():
                    continue
                _log.warning("reports not delivered before the process ended count=%d reason=%s", len(batch), error)
                return False
            except FireflyerError as error:
                _log.warning("reporting to the launcher stopped, the script goes on reason=%s", error)
                self._lose_connection()
                return False
            except Exception:
                _log.exception("reporting to the launcher stopped on an unexpected error, the script goes on")
                return False

    def _connected(self) -> BlockingRpcClient:
        if self._client is None:
            credential = NodeCredential(load_secret(self._secret_file or ""), self._identity)
            self._client = BlockingRpcClient.connect(self._address or "", credential, CONNECT_NS)
        return self._client

    def _lose_connection(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _wait_to_retry(self) -> bool:
        """False when the time for closing is over."""
        if self._closing.wait(RETRY_NS / SECOND):
            time.sleep(RETRY_NS / SECOND)
            return time.monotonic_ns() < self._deadline_ns
        return True
