"""Rounds of health checks on this node: one, or one after the other with what the kernel logs between them."""

from __future__ import annotations

import collections
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from fireflyer.base.errors import FireflyerError, TransientError
from fireflyer.base.health_event import HealthEvent
from fireflyer.base.os_errors import translate_os_error
from fireflyer.validators.checks.capture import capture
from fireflyer.validators.checks.journal import Journal, follow_journal
from fireflyer.validators.checks.kernel_log import KMSG, follow_kmsg, open_kmsg
from fireflyer.validators.checks.state_file import StateFile
from fireflyer.validators.core.checks.catalogue import CheckSpec, chosen_checks, sources_of
from fireflyer.validators.core.checks.evidence import Counters, Evidence, KernelRecord
from fireflyer.validators.core.checks.gpu import LOOKED_AGAIN
from fireflyer.validators.core.checks.health_round import judge_round
from fireflyer.validators.core.checks.kernel_log import last_record, with_newest_record
from fireflyer.validators.core.checks.part_serials import PART_SERIALS
from fireflyer.validators.core.checks.policy import HealthPolicy
from fireflyer.validators.core.checks.sources import KernelLog

__all__ = ["HealthRounds", "Watch"]

_MAX_FAULTS: Final = 20_000
_GATHER_S: Final = 0.05
"""Faults come in groups; those of so long are judged together."""
_NOTE_S: Final = 60.0
"""After so long it is noted up to where the log was read."""
_FOLLOWER_NICE: Final = -5
_LOG: Final = "kernel_log"
_GPU_PROCESSES: Final = "gpu_processes"
_NVIDIA_SMI: Final = "nvidia_smi"
_RETRIES_S: Final = 10.0
"""So long it is looked again at the processes of GPUs, with the time that nvidia-smi takes."""


class HealthRounds:
    """Knows the counters of the rounds before."""

    def __init__(
        self, state: StateFile | None, *, root: str = "/", tool_path: str | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        """Without `state` counters are known within this process only. `pause`: for so many seconds."""
        self._pause = pause
        self.note = ""
        """Why the state file was not used; empty: it was, or there was none."""
        self.unsaved = ""
        """Why the counters of a round were not kept for another process; empty: they were."""
        self.evidence: Evidence | None = None
        """What the last round has seen."""
        self._state = state
        self._root = root
        self._tool_path = tool_path
        self._counters: Counters | None = None
        if state is not None:
            self._counters, self.note = state.load()

    def run(
        self, policy: HealthPolicy, names: Iterable[str] = (), *, kernel_log: bool = True, save: bool = True,
        ends_s: float = math.inf, idle: bool = False,
    ) -> list[HealthEvent]:  # fmt: skip
        """One round. Raises `UsageError` for a check that there is not. `kernel_log`: False where somebody follows
        it. `save`: False where the caller does so itself, after it has acted: what is not saved is found again by the
        next process. `ends_s`: of the monotonic clock, when tools are ended.
        `idle`: no task runs here, and none begins meanwhile."""
        checks = chosen_checks(policy, names)
        sources = [one for one in sources_of(checks, policy) if kernel_log or not isinstance(one, KernelLog)]
        self.evidence = evidence = capture(
            [*sources, PART_SERIALS], time.time_ns(), root=self._root, tool_path=self._tool_path, ends_s=ends_s
        )
        if idle:
            self.evidence = evidence = self._idle(checks, msgspec.structs.replace(evidence, idle=True), policy, ends_s)
        return self._judged(checks, evidence, policy, save=save)

    def _idle(self, checks: list[CheckSpec], evidence: Evidence, policy: HealthPolicy, ends_s: float) -> Evidence:
        """With a later look at the processes of the GPUs, after those that were still to end have had the time for it.
        A look that fails, or comes to no result, does not count."""
        own = [check for check in checks if check.name == _GPU_PROCESSES]
        settings = policy.gpu_processes
        ends_s = min(ends_s, time.monotonic() + _RETRIES_S)
        found = judge_round(own, evidence, policy).events
        for _ in range(settings.retries):
            if all(event.severity == "ok" for event in found) or time.monotonic() + settings.retry_s >= ends_s:
                break
            self._pause(settings.retry_s)
            seen = capture(
                sources_of(own, policy), time.time_ns(), root=self._root, tool_path=self._tool_path, ends_s=ends_s
            ).outputs.get(_NVIDIA_SMI)
            if seen is None or seen.problem:
                continue
            again = msgspec.structs.replace(evidence, outputs={**evidence.outputs, LOOKED_AGAIN: seen})
            before, events = found, judge_round(own, again, policy).events
            if any(event.could_not_run for event in events):
                continue
            evidence, found = again, events
            if found == before:
                break
        return evidence

    def save(self) -> None:
        """Keeps the counters for other processes; where that is not possible, `unsaved` says why."""
        if self._state is None or self._counters is None:
            return
        try:
            self._state.save(self._counters)
        except FireflyerError as error:
            self.unsaved = str(error)

    def judge_log(
        self, policy: HealthPolicy, faults: Sequence[KernelRecord], *, read: int = 0, journal_us: int = 0,
        lost: int = 0, problem: str = "",
    ) -> list[HealthEvent]:  # fmt: skip
        """Of records that were followed; only what is wrong. `read`, `journal_us`: of the last record that was looked
        at, in /dev/kmsg and in the journal."""
        checks = [check for check in chosen_checks(policy) if _LOG in check.sources]
        evidence = Evidence(
            now_ns=time.time_ns(), boot=_boot(), kernel=tuple(faults), kernel_problem=problem, kernel_lost=lost,
            kernel_sequence=max([read, *(one.sequence for one in faults)]), kernel_journal_us=journal_us,
        )  # fmt: skip
        return [event for event in self._judged(checks, evidence, policy) if event.severity != "ok"]

    def last_record(self) -> int:
        """Sequence number of the last record of the kernel's log that was looked at since the node was started; 0: not
        known."""
        return last_record(with_newest_record(self._counters, self._other(), _boot()))

    def _other(self) -> Counters | None:
        return self._state.load_other() if self._state is not None else None

    def _judged(
        self, checks: list[CheckSpec], evidence: Evidence, policy: HealthPolicy, *, save: bool = True
    ) -> list[HealthEvent]:
        other = self._other()
        known = with_newest_record(self._counters, other, evidence.boot)
        serials = other.serials if other is not None and other.boot == evidence.boot else {}
        found = judge_round(checks, evidence, policy, known, serials)
        self._counters = found.counters
        if save:
            self.save()
        return list(found.events)


class Watch:
    """Rounds at a fixed period; what the kernel logs is judged as it comes, also without rounds."""

    def __init__(self, rounds: HealthRounds, emit: Callable[[HealthEvent], None], *, journal: bool = False) -> None:
        """`journal`: it is followed also where /dev/kmsg could be."""
        self._journal = journal
        self._by_journal = False
        self._rounds = rounds
        self._emit = emit
        self._faults: collections.deque[KernelRecord] = collections.deque(maxlen=_MAX_FAULTS)
        self._lost = 0
        self._read = 0
        self._noted = 0
        self._news = threading.Event()
        self._ended = ""

    def run(self, policy: Callable[[], tuple[HealthPolicy, str]], every_s: float, stop: threading.Event) -> None:
        """Until `stop` is set and `wake` is called. `policy` is called before each round: the policy,
        and why its file was not used in its newest form."""
        wake_r, wake_w = os.pipe()
        thread = self._follow_if_allowed(wake_r)
        try:
            while not stop.is_set():
                ends_s = time.monotonic() + every_s
                rules, problem = policy()
                if problem:
                    self._emit(
                        HealthEvent(check="health_policy", severity="warn", words=problem[:400], seen_ns=time.time_ns())
                    )
                self._note(rules)
                for event in self._rounds.run(rules, kernel_log=thread is None or bool(self._ended)):
                    self._emit(event)
                while not stop.is_set() and (left_s := ends_s - time.monotonic()) > 0:
                    if self._news.wait(left_s) and not stop.is_set():
                        self._judge_news(rules)
        finally:
            self._end(thread, wake_r, wake_w)

    def run_log(self, policy: Callable[[], tuple[HealthPolicy, str]], stop: threading.Event) -> None:
        """Without rounds, until `stop` is set and `wake` is called. Raises `FireflyerError` where the log cannot be
        read, or its end is reached."""
        wake_r, wake_w = os.pipe()
        thread = None
        try:
            thread = self._follow(wake_r)
            while not stop.is_set():
                told = self._news.wait(0 if self._ended else _NOTE_S)
                ended = self._ended
                if told and not stop.is_set():
                    self._judge_news(policy()[0])
                elif not told:
                    self._note(policy()[0])
                if ended:
                    raise TransientError(ended)
        finally:
            self._end(thread, wake_r, wake_w)

    def _end(self, thread: threading.Thread | None, wake_r: int, wake_w: int) -> None:
        os.close(wake_w)
        if thread is not None:
            thread.join()
        os.close(wake_r)

    def wake(self) -> None:
        """Ends a pause; safe in a signal handler."""
        self._news.set()

    def _judge_news(self, rules: HealthPolicy) -> None:
        time.sleep(_GATHER_S)
        self._news.clear()
        self._noted = self._read  # first: what is wrong up to there is in `faults`
        faults = [self._faults.popleft() for _ in range(len(self._faults))]
        lost, self._lost = self._lost, 0
        read, journal_us = (0, self._noted) if self._by_journal else (self._noted, 0)
        found = self._rounds.judge_log(rules, faults, read=read, journal_us=journal_us, lost=lost, problem=self._ended)
        for event in found:
            self._emit(event)

    def _note(self, rules: HealthPolicy) -> None:
        """Up to where the log is read, for who reads it after this process."""
        if self._read != self._noted:
            self._judge_news(rules)

    def _follow_if_allowed(self, wake_fd: int) -> threading.Thread | None:
        """None where neither the log nor the journal can be followed: then each round asks the journal."""
        try:
            return self._follow(wake_fd)
        except FireflyerError:
            return None

    def _follow(self, wake_fd: int) -> threading.Thread:
        """The journal where the log may not be read. Raises `FireflyerError` where that cannot be followed either."""
        refused: FireflyerError | None = None
        if not self._journal:
            try:
                return self._follow_kmsg(wake_fd, open_kmsg())
            except OSError as error:
                refused = translate_os_error(error, f"follow {KMSG}")
        try:
            return self._follow_journal(wake_fd, Journal())
        except FireflyerError as error:
            if refused is None:
                raise
            raise TransientError(f"{refused.message}; {error.message}") from error

    def _on_fault(self, record: KernelRecord) -> None:
        self._faults.append(record)
        self._news.set()

    def _on_read(self, number: int) -> None:
        self._read = number

    def _follow_journal(self, wake_fd: int, journal: Journal) -> threading.Thread:
        self._by_journal = True

        def follow() -> None:
            try:
                self._ended = follow_journal(journal.fd, wake_fd, self._on_fault, on_read=self._on_read)
            except OSError as error:
                self._ended = f"the journal: {(error.strerror or '').lower()}"
            finally:
                journal.end()
                self._news.set()

        return _started(follow)

    def _follow_kmsg(self, wake_fd: int, fd: int) -> threading.Thread:
        after = self._rounds.last_record()
        started_ns = time.time_ns() - time.monotonic_ns()

        def on_lost(count: int) -> None:
            self._lost += count
            self._news.set()

        def follow() -> None:
            try:
                # The kernel does not wait for who reads its log; a storm of lines takes a third of a processor.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _FOLLOWER_NICE)
            except OSError:
                pass  # only root may
            try:
                follow_kmsg(fd, started_ns, wake_fd, self._on_fault, on_lost, on_read=self._on_read, after=after)
                self._ended = f"{KMSG} has ended"
            except OSError as error:
                self._ended = f"{KMSG}: {(error.strerror or '').lower()}"
            finally:
                os.close(fd)
                self._news.set()

        return _started(follow)


def _started(follow: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=follow, name="follow-kernel-log", daemon=True)
    thread.start()
    return thread


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return ""
