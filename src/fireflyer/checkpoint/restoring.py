"""How the ranks of a job restore the same checkpoint: rank 0 chooses, and verifies every byte; the others follow."""

from __future__ import annotations

import logging

import msgspec

from fireflyer.base.decoding import decode_json
from fireflyer.base.errors import DataCorruption, error_from_wire, error_to_wire
from fireflyer.base.events import SkippedCheckpoint
from fireflyer.base.ports import Disk
from fireflyer.checkpoint.agreement import Agreement
from fireflyer.checkpoint.copying import DeviceCopies
from fireflyer.checkpoint.core.manifest import Manifest
from fireflyer.checkpoint.core.names import Candidate
from fireflyer.checkpoint.engine.directory import read_manifest
from fireflyer.checkpoint.engine.loading import Sink, load
from fireflyer.checkpoint.reader import choose
from fireflyer.checkpoint.restored import Collector, Restored, Targets

__all__ = ["Restoring"]

_log = logging.getLogger(__name__)
Found = tuple[Restored | None, tuple[SkippedCheckpoint, ...]]
"""The checkpoint, and what is newer and was passed over."""


class _Choice(msgspec.Struct, frozen=True):
    """What rank 0 found, for the others."""

    error: tuple[str, str] | None = None
    candidate: Candidate | None = None
    passed_over: tuple[SkippedCheckpoint, ...] = ()


class Restoring:
    def __init__(self, disk: Disk, devices: DeviceCopies, agreement: Agreement, rank: int) -> None:
        self._disk, self._devices, self._agreement, self._rank = disk, devices, agreement, rank
        self._times = 0

    def restore(self, root: str, shown: str, targets: Targets, timeout_ns: int) -> Found:
        """All ranks call it. `shown` is `root` for people; `timeout_ns` is how long rank 0 may take. Raises as
        `CheckpointManager.restore`."""
        self._times += 1
        found = self._first(root, shown, targets) if self._rank == 0 else self._same(root, targets, timeout_ns)
        for entry in found[1]:
            _log.warning("checkpoint skipped name=%s reason=%s", entry.name, entry.reason)
        return found

    def _first(self, root: str, shown: str, targets: Targets) -> Found:
        collectors: list[Collector] = []

        def make_sink(manifest: Manifest) -> Sink:
            collectors[:] = [Collector(self._rank, manifest, targets, self._devices)]
            return collectors[0].sink

        try:
            chosen, passed_over = choose(self._disk, root, make_sink)
            if chosen is None and passed_over:
                raise DataCorruption(
                    f"none of the {len(passed_over)} checkpoints in {shown} is valid (the newest: "
                    f"{passed_over[0].reason}); repair one, or move them away to start over"
                )
        except Exception as error:  # whatever it is: the others wait to hear of it
            self._tell(_Choice(error=error_to_wire(error)))
            raise
        self._tell(_Choice(candidate=chosen[0] if chosen else None, passed_over=passed_over))
        return (collectors[0].restored(chosen[0].name, passed_over) if chosen else None), passed_over

    def _tell(self, choice: _Choice) -> None:
        self._agreement.agree(f"restore/{self._times}", msgspec.json.encode(choice))

    def _same(self, root: str, targets: Targets, timeout_ns: int) -> Found:
        told = self._agreement.agree(f"restore/{self._times}", b"", timeout_ns)
        choice = decode_json(told, _Choice)
        if choice.error is not None:
            raise error_from_wire(choice.error[0], f"rank 0 could not restore: {choice.error[1]}")
        if choice.candidate is None:
            return None, choice.passed_over
        manifest = read_manifest(self._disk, root, choice.candidate)
        collector = Collector(self._rank, manifest, targets, self._devices)
        load(self._disk, root, choice.candidate.name, manifest, collector.sink, only_wanted=True)
        return collector.restored(choice.candidate.name, choice.passed_over), choice.passed_over
