"""Who takes turns: each saves a state durably, says how long it held the caller up, and loads it again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import Final, Protocol

import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bench.checkpoint.program import PIECE_BYTES, State, aligned, program_load, program_save
from fireflyer.base.ports import Disk
from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint import State as SavedState
from fireflyer.runtime.disk import RealDisk

__all__ = ["CONTENDERS", "PROGRAM", "Contender", "Ours", "Program", "empty_like", "forget_pages"]

PROGRAM: Final = "O_DIRECT program"


class Contender(Protocol):
    """Made for one directory and one state, whose tensors keep their names and shapes."""

    stalls: bool
    """Whether training goes on while it writes."""

    def save(self, state: State) -> float:
        """Returns when the state is durable. For how many seconds the caller was held up."""

    def load(self, into: State | None) -> State:
        """What was saved last, from the disk and not from memory: into these tensors, or into new ones."""

    def tidy(self) -> None:
        """Not measured: removes what the last save has replaced."""


def empty_like(state: State) -> State:
    """Also of tensors that are only described (`meta`)."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}


def _copied(loaded: State, into: State | None) -> State:
    if into is None:
        return {name: tensor.clone() for name, tensor in loaded.items()}
    for name, tensor in loaded.items():
        into[name].copy_(tensor)
    return into


def forget_pages(directory: str) -> None:
    """Drops the files below from the page cache."""
    for where, _, names in os.walk(directory):
        for name in names:
            fd = os.open(os.path.join(where, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _sync(path: str) -> None:
    for each in (path, os.path.dirname(path)):
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class Ours(Contender):
    stalls = True

    def __init__(self, directory: str, state: State | None, disk: Disk | None = None) -> None:
        """Without a state it only loads."""
        disk = disk or RealDisk()
        self._manager = CheckpointManager(directory, rank=0, world_size=1, store=None, disk=disk, keep=1)
        if state is not None:
            self._manager.reserve(SavedState(state))
        self._step = 0
        self._directory = directory

    def image(self, size_bytes: int) -> torch.Tensor:
        """The memory of its snapshot, for another program that has none of its own. Every save writes all of it."""
        return self._manager._saving._buffer._image[:size_bytes]  # noqa: SLF001 - there is no room for a second one

    def save(self, state: State) -> float:
        self._step += 1
        begin = time.perf_counter()
        handle = self._manager.save(self._step, SavedState(state))
        stall_s = time.perf_counter() - begin
        handle.result()
        return stall_s

    def load(self, into: State | None) -> State:
        restored = self._manager.restore(into)
        assert restored is not None
        return restored.shared

    def tidy(self) -> None:
        self._manager.wait()
        forget_pages(self._directory)

    def close(self) -> None:
        self._manager.close()


class _Files(Contender):
    """A new file or directory for each save; the older one is removed when it is not needed any more."""

    stalls = False

    def __init__(self, directory: str, _state: State) -> None:
        self._directory = directory
        self._number = 0
        self._like: State = {}

    @property
    def path(self) -> str:
        return os.path.join(self._directory, f"{self._number}")

    def save(self, state: State) -> float:
        self._number += 1
        self._like = {name: tensor.to("meta") for name, tensor in state.items()}
        return self._save(state)

    def _save(self, state: State) -> float:
        raise NotImplementedError

    def tidy(self) -> None:
        for name in os.listdir(self._directory):
            old = os.path.join(self._directory, name)
            if old != self.path:
                shutil.rmtree(old) if os.path.isdir(old) else os.remove(old)
        forget_pages(self._directory)


class Program(_Files):
    def __init__(self, directory: str, state: State, image: torch.Tensor | None = None) -> None:
        super().__init__(directory, state)
        self.image = aligned(sum(tensor.nbytes for tensor in state.values())) if image is None else image
        self._piece = aligned(PIECE_BYTES)

    def _save(self, state: State) -> float:
        program_save(self.path, state, self.image)
        return 0.0

    def load(self, into: State | None) -> State:
        target = empty_like(self._like) if into is None else into
        program_load(self.path, target, self._piece)
        return target


class TorchSave(_Files):
    def _save(self, state: State) -> float:
        torch.save(state, self.path)
        _sync(self.path)
        return 0.0

    def load(self, into: State | None) -> State:
        loaded = torch.load(self.path)
        return loaded if into is None else _copied(loaded, into)


class Safetensors(_Files):
    def _save(self, state: State) -> float:
        safetensors.torch.save_file(state, self.path)
        _sync(self.path)
        return 0.0

    def load(self, into: State | None) -> State:
        return _copied(safetensors.torch.load_file(self.path), into)  # else pages are read when they are used


class Dcp(_Files):
    def _writer(self) -> FileSystemWriter:
        return FileSystemWriter(self.path, sync_files=True, thread_count=2)

    def _save(self, state: State) -> float:
        dcp_save(state, storage_writer=self._writer(), no_dist=True)
        return 0.0

    def load(self, into: State | None) -> State:
        target = empty_like(self._like) if into is None else into
        dcp_load(target, storage_reader=FileSystemReader(self.path), no_dist=True)
        return target


class DcpAsync(Dcp):
    stalls = True

    def __init__(self, directory: str, state: State) -> None:
        super().__init__(directory, state)
        self._stager = DefaultStager(StagingOptions(False, True, False, False))  # reused: memory is touched once

    def _save(self, state: State) -> float:
        begin = time.perf_counter()
        future = async_save(state, storage_writer=self._writer(), async_stager=self._stager, no_dist=True)
        stall_s = time.perf_counter() - begin
        (future.upload_completion if isinstance(future, AsyncSaveResponse) else future).result()
        return stall_s


CONTENDERS: dict[str, Callable[[str, State], Contender]] = {
    "ours": Ours,
    PROGRAM: Program,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "DCP": Dcp,
    "DCP async": DcpAsync,
}
