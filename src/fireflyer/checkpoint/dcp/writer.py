"""`FireFlyerWriter`: `torch.distributed.checkpoint` saves in our format.

    coordinator   prepare_global_plan   mkdir  PARENT/.tmp-NAME-TAG
    all ranks     write_data            its shard, durable
    coordinator   finish                manifest, durable; rename to PARENT/NAME; sync of PARENT

DCP puts a barrier between these. A save that fails or dies leaves `.tmp-…`, which the next save of that name removes;
the name itself always stands for something whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fireflyer.base.decoding import decode_json
from fireflyer.base.errors import DataCorruption, NoSpace, NotFound, UsageError
from fireflyer.base.ports import Disk
from fireflyer.checkpoint.core.manifest import (
    Manifest,
    Saved,
    ShardRecord,
    check_listed,
    decode_record,
    encode_record,
    version_of,
)
from fireflyer.checkpoint.core.names import MAX_STEP, final_name, parse_final, shard_name
from fireflyer.checkpoint.core.plain import check_plain
from fireflyer.checkpoint.core.safetensors import TensorSpec, place
from fireflyer.checkpoint.core.shares import OWN_PREFIX
from fireflyer.checkpoint.core.slices import Box, Slice, slice_name, whole
from fireflyer.checkpoint.dcp.objects import BYTES_PREFIX, VALUES_KEY, plain_value
from fireflyer.checkpoint.engine.image import header_of
from fireflyer.checkpoint.engine.stream import write_stream
from fireflyer.checkpoint.fresh import begin, commit_manifest, temporary_names
from fireflyer.checkpoint.saved import saved_now
from fireflyer.checkpoint.storage import open_storage
from fireflyer.checkpoint.tensors import bytes_of, spec_of

__all__ = ["FireFlyerWriter"]

_DIGITS = re.compile(r"[0-9]+$")
_FEW: Final = 500_000
"""So many tensors and slices, with names of usual length, any manifest can list."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Sent by the coordinator with a rank's plan. DCP may send it once and use it again for later saves of the same
    plan: then `directory` is of an earlier save, and may still be there where that failed."""

    rank: int
    world_size: int
    directory: str
    save_id: Any
    """What the rank's writer has put into its plan: of the save that the directory is of."""


class _Written(msgspec.Struct, frozen=True):
    """Of one rank, for the coordinator."""

    record: msgspec.Raw
    values: dict[str, Any]


class FireFlyerWriter(StorageWriter):
    """Storage writer of `dcp.save` and `dcp.async_save`.

        dcp.save(state, storage_writer=FireFlyerWriter("checkpoints/step-00000100"))
        dcp.save(state, storage_writer=FireFlyerWriter("checkpoints", step=100))        # the same
        dcp.save(state, checkpoint_id="checkpoints/100", storage_writer=FireFlyerWriter())

    `path` is the checkpoint, a directory that does not exist yet, or `ff://…/path` of 3FS; with `step` it is the
    directory of all checkpoints. Without `step` the number at the end of the name is the step, or 0 where there is none
    or it is above `MAX_STEP`, as that of a time in milliseconds. Nothing is ever overwritten.
    Raises `UsageError` for a path that exists, a dtype that safetensors has no name for, and a name that begins with
    `own/`; `NoSpace` and other `FireflyerError`s of the disk. DCP wraps what a rank raises into `CheckpointException`,
    which is no `Exception`; `fireflyer.checkpoint.dcp.save` unwraps it.
    """

    def __init__(self, path: str | os.PathLike[str] = "", *, step: int | None = None, disk: Disk | None = None) -> None:
        if step is not None and not 0 <= step <= MAX_STEP:
            raise UsageError(f"step {step} is out of range; it must be between 0 and {MAX_STEP}")
        self._given_step, self._given_disk = step, disk
        self._given = os.fspath(path)
        self._save_id = ""
        self._directory = ""
        self._is_coordinator = False

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._given = os.fspath(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path that was given."""
        return self._given

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._given, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if kwargs.get("use_collectives") is False:
            raise UsageError("FireFlyerWriter commits all ranks together; call dcp.save without use_collectives=False")
        if not self._given:
            raise UsageError("FireFlyerWriter needs a path, or dcp.save a checkpoint_id")
        self._is_coordinator = is_coordinator
        self._save_id = secrets.token_hex(8)
        storage = open_storage(self._given, disk=self._given_disk)
        self._disk = storage.disk
        self._parent, self._name, self._step = self._target(storage.root)

    def _target(self, root: str) -> tuple[str, str, int]:
        """The directory of checkpoints, the name in it, the step."""
        if self._given_step is not None:
            return root, final_name(self._given_step, []), self._given_step
        parent, _, name = root.rpartition("/")
        if not name or name.startswith("."):
            raise UsageError(f"{self._given!r} is no name for a checkpoint; give a directory that does not exist yet")
        final, digits = parse_final(name), _DIGITS.search(name)
        step = final.step if final is not None else int(digits[0]) if digits else 0
        return parent or "/", name, step if step <= MAX_STEP else 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=self._save_id) if plan.usable else plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if sum(len(plan.items) for plan in plans) > _FEW:
            check_listed(
                (_spec(item, None), 1) for plan in plans for item in plan.items if item.tensor_data is not None
            )
        self._directory = begin(self._disk, self._parent, self._name, self._save_id)
        return [
            dataclasses.replace(plan, storage_data=_Place(rank, len(plans), self._directory, plan.storage_data))
            if plan.usable
            else plan
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        target = plan.storage_data
        if not isinstance(target, _Place):
            raise UsageError("the plan does not come from FireFlyerWriter.prepare_global_plan")
        directory = self._where(target)
        tensors, values = _resolve(plan, planner)
        placed = place(spec for spec, _ in tensors.values())
        header = header_of(placed, step=self._step, rank=target.rank)
        self._expect_space(len(header) + sum(item.spec.size_bytes for item in placed))

        def source(spec: TensorSpec) -> Iterator[memoryview]:
            found = tensors[spec.name][1]
            data = planner.resolve_data(found) if isinstance(found, WriteItem) else found
            if not isinstance(data, torch.Tensor):
                raise UsageError(f"the planner gives {type(data).__name__} for tensor {spec.name[:80]!r}")
            resolved = spec_of(spec.name, data)
            if (resolved.dtype, resolved.shape) != (spec.dtype, spec.shape):
                raise UsageError(f"the planner gives {spec.name[:80]!r} as {resolved}, its plan says {spec}")
            yield bytes_of(data.detach().cpu().contiguous())

        path = f"{self._parent}/{directory}/{shard_name(target.rank, target.world_size)}"
        record = write_stream(self._disk, path, header, placed, source, rank=target.rank)
        written = msgspec.json.encode(_Written(msgspec.Raw(encode_record(record)), values))
        results = [WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, WriteResult(MetadataIndex(record.file), record.file_bytes, written)])
        return future

    def _where(self, target: _Place) -> str:
        """The temporary directory of this save."""
        if self._is_coordinator:
            return self._directory
        if target.save_id == self._save_id and self._disk.is_dir(f"{self._parent}/{target.directory}"):
            return target.directory
        names = temporary_names(self._disk, self._parent, self._name)
        if len(names) != 1:
            raise NotFound(
                f"{len(names)} saves of {self._parent}/{self._name} are in progress; all ranks need the same storage, "
                "and one job a directory of its own"
            )
        return names[0]

    def _expect_space(self, needed_bytes: int) -> None:
        free_bytes = self._disk.free_bytes(self._parent)
        if free_bytes < needed_bytes:
            raise NoSpace(f"a shard of {needed_bytes} bytes does not fit into {self._parent}: {free_bytes} are free")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        shards: list[ShardRecord] = []
        values: dict[str, Any] = {}
        for rank, of_rank in enumerate(results):
            written = decode_json(of_rank[-1].storage_data, _Written)
            shards.append(decode_record(bytes(written.record), rank, len(results)))
            self._check_written(shards[-1])
            values.update(written.values)
        manifest = _manifest(self._step, shards, values, metadata, saved_now())
        commit_manifest(self._disk, self._parent, self._name, self._directory, manifest)

    def _check_written(self, shard: ShardRecord) -> None:
        """Whether a rank has written where the coordinator commits."""
        path = f"{self._parent}/{self._directory}/{shard.file}"
        with contextlib.closing(self._disk.open(path)) as file:
            size = file.size()
        if size != shard.file_bytes:
            raise DataCorruption(f"{path} has {size} bytes instead of {shard.file_bytes}")


def _manifest(
    step: int, shards: list[ShardRecord], values: Mapping[str, Any], metadata: Metadata, saved: Saved
) -> Manifest:
    paths = metadata.planner_data
    if paths is not None and not isinstance(paths, Mapping):
        raise UsageError(f"planner data of type {type(paths).__name__} cannot be stored; allowed is that of DCP's own")
    of_dcp = {"paths": None if paths is None else check_plain(paths, "planner_data"), "values": dict(values)}
    return Manifest(
        version=version_of(shards),
        step=step,
        attempt=0,
        world_size=len(shards),
        shards=tuple(shards),
        values={VALUES_KEY: of_dcp},
        saved=saved,
    )


def _resolve(
    plan: SavePlan, planner: SavePlanner
) -> tuple[dict[str, tuple[TensorSpec, WriteItem | torch.Tensor]], dict[str, Any]]:
    """The tensors to store by stored name, each with where it comes from; and plain values."""
    tensors: dict[str, tuple[TensorSpec, WriteItem | torch.Tensor]] = {}
    values: dict[str, Any] = {}
    for item in plan.items:
        name = item.index.fqn
        if name.startswith((OWN_PREFIX, BYTES_PREFIX)):
            raise UsageError(f"{name[:80]!r} begins with {OWN_PREFIX!r} or {BYTES_PREFIX!r}; choose another name")
        if item.type == WriteItemType.BYTE_IO:
            data: Any = planner.resolve_data(item)
            content = data.getvalue()
            is_plain, value = plain_value(content)
            if is_plain:
                values[check_plain(name, "the name of a value")] = value
                continue
            stored = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            spec = spec_of(f"{BYTES_PREFIX}{name}", stored)
            tensors[spec.name] = (spec, stored)
            continue
        spec = _spec(item, planner)
        if spec.name in tensors:
            raise UsageError(f"tensor {spec.name[:80]!r} comes twice in the plan of a rank")
        tensors[spec.name] = (spec, item)
    return tensors, values


def _spec(item: WriteItem, planner: SavePlanner | None) -> TensorSpec:
    data = item.tensor_data
    if data is None:
        raise UsageError(f"the plan says nothing about tensor {item.index.fqn[:80]!r}")
    name, shape = item.index.fqn, tuple(data.size)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    plain = spec_of(name, torch.empty(0, dtype=data.properties.dtype))
    if box == whole(shape):
        return TensorSpec(name, plain.dtype, shape)
    axes, placements = _layout(planner, name)
    return TensorSpec(slice_name(name, box), plain.dtype, box.shape, Slice(name, shape, box.offset, axes, placements))


def _layout(planner: SavePlanner | None, name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Mesh and placements, where the planner lets one look at the tensor."""
    state = getattr(planner, "state_dict", None)
    tensor = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(tensor, DTensor):
        return (), ()
    return tuple(tensor.device_mesh.shape), tuple(map(str, tensor.placements))
