"""One rank of a checkpoint that costs neither bytes nor disk: what is left is what ranks tell each other.

Ours is `CheckpointManager` on a disk that keeps names alone; DCP is its `save` with a writer that writes nothing. gloo
gathers as many bytes as our ranks tell each other: a digest, the record of a shard, the outcome.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from bench.collectives.ranks.orders import obey
from fireflyer.base.errors import Exists, NotFound
from fireflyer.base.ports import Data, Disk, DiskFile, Transfer
from fireflyer.checkpoint import CheckpointManager, State
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.store import StoreClient

_DIGEST_BYTES = 16
_RECORD_BYTES = 150
"""Of each tensor in the record of a shard, about."""


class _Moved(Transfer):
    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes

    def wait(self) -> int:
        return self._size_bytes


class _NoFile(DiskFile):
    def pwrite(self, data: Data, offset: int) -> None:
        pass

    def pread(self, length: int, offset: int) -> bytes:  # noqa: ARG002
        return b""

    def start_pwrite(self, data: memoryview, offset: int) -> Transfer:  # noqa: ARG002
        return _Moved(len(data))

    def start_pread(self, target: memoryview, offset: int) -> Transfer:  # noqa: ARG002
        return _Moved(0)

    def allocate(self, size_bytes: int) -> None:
        pass

    def size(self) -> int:
        return 0

    def fsync(self) -> None:
        pass

    def close(self) -> None:
        pass


class _NamesAlone(Disk):
    """Keeps the names of directories; files are accepted anywhere, and forgotten."""

    durable_names = True

    def __init__(self) -> None:
        self._directories: dict[str, None] = {}

    def create(self, path: str, *, direct: bool = False) -> DiskFile:  # noqa: ARG002
        return _NoFile()

    def open(self, path: str, *, direct: bool = False) -> DiskFile:  # noqa: ARG002
        raise NotFound(path)

    def mkdir(self, path: str) -> None:
        if path in self._directories:
            raise Exists(path)
        self._directories[path] = None

    def rename(self, source: str, target: str) -> None:
        if source in self._directories:
            self.rmdir(source)
            self.mkdir(target)

    def remove(self, path: str) -> None:
        raise NotFound(path)

    def rmdir(self, path: str) -> None:
        if path not in self._directories:
            raise NotFound(path)
        del self._directories[path]

    def list(self, path: str) -> list[str]:
        if path not in self._directories:
            raise NotFound(path)
        return sorted(name for above, _, name in (one.rpartition("/") for one in self._directories) if above == path)

    def exists(self, path: str) -> bool:
        return path in self._directories

    def is_dir(self, path: str) -> bool:
        return path in self._directories

    def sync_dir(self, path: str) -> None:
        pass

    def free_bytes(self, path: str) -> int:  # noqa: ARG002
        return 1 << 62


class _NoWriter(StorageWriter):
    """Answers as DCP's writers do, of everything in the plan."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:  # noqa: ARG002
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(_index_of(item), 4, (0, 4)) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for some in results for result in some}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return True


def _index_of(item: Any) -> MetadataIndex:
    index: MetadataIndex = item.index
    return index


class Rank:
    orders: tuple[str, ...] = ("prepare", "ours", "gloo", "dcp", "dcp_cached")

    def __init__(self, arguments: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.rank: int = arguments["rank"]
        self.world_size: int = arguments["world_size"]
        self._store = StoreClient(arguments["store"], load_secret(arguments["secret_file"]))
        dist.init_process_group(
            "gloo", init_method=f"file://{arguments['rendezvous']}", rank=self.rank, world_size=self.world_size
        )
        self._manager: CheckpointManager | None = None
        self._made = self._step = 0

    def prepare(self, tensors: str) -> dict[str, Any]:
        """The same tensors on every rank, of one element each."""
        if self._manager is not None:
            self._manager.close()
        self._made += 1
        self._shared = {f"layer.{number}.weight": torch.zeros(1) for number in range(int(tensors))}
        self._manager = CheckpointManager(
            "/agreement", rank=self.rank, world_size=self.world_size, store=self._store, disk=_NamesAlone(), keep=1,
            name=f"agreement-{self._made}",
        )  # fmt: skip
        self._planner = DefaultSavePlanner(enable_plan_caching=True)
        return {}

    def ours(self) -> dict[str, Any]:
        """Until every rank has heard that it is committed."""
        manager = self._manager
        assert manager is not None
        self._step += 1
        took = self._timed(lambda: manager.save(self._step, State(self._shared)).result())
        manager.wait()  # what the save before has left in the store goes meanwhile
        return took

    def gloo(self) -> dict[str, Any]:
        record = bytes(_RECORD_BYTES * len(self._shared) // self.world_size)
        gathered: list[Any] = [None] * self.world_size

        def gather() -> None:
            for said in (bytes(_DIGEST_BYTES), record, True):
                dist.all_gather_object(gathered, said)

        return self._timed(gather)

    def dcp(self) -> dict[str, Any]:
        return self._timed(lambda: dcp_save(self._shared, storage_writer=_NoWriter(), planner=DefaultSavePlanner()))

    def dcp_cached(self) -> dict[str, Any]:
        return self._timed(lambda: dcp_save(self._shared, storage_writer=_NoWriter(), planner=self._planner))

    def _timed(self, work: Callable[[], object]) -> dict[str, Any]:
        dist.barrier()
        begin_s = time.perf_counter()
        work()
        return {"seconds": time.perf_counter() - begin_s}

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()
        self._store.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    obey(Rank(json.loads(sys.argv[2])))
