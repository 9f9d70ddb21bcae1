"""Any tensors go through a checkpoint unchanged; any bytes in place of a manifest are refused or harmless."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.checkpoints.states import snapshot_of

from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.base.ports import Disk
from fireflyer.checkpoint import State
from fireflyer.checkpoint.core.manifest import (
    Manifest,
    decode_manifest,
    decode_record,
    encode_manifest,
    encode_record,
)
from fireflyer.checkpoint.core.names import candidates, final_name, is_leftover, shard_name, temporary_name, trash_name
from fireflyer.checkpoint.core.plain import check_plain, decode_state, encode_state
from fireflyer.checkpoint.core.retention import to_remove
from fireflyer.checkpoint.core.safetensors import DTYPE_BYTES, TensorSpec, build_header, encode_entries, place
from fireflyer.checkpoint.core.shares import assign, own_name, share_of, split_own
from fireflyer.checkpoint.engine.image import RunningSums, write_shard
from fireflyer.checkpoint.engine.loading import load, sink_of
from fireflyer.checkpoint.engine.steps import run_steps
from fireflyer.checkpoint.manager import CheckpointManager
from fireflyer.checkpoint.snapshot import SnapshotBuffer
from fireflyer.checkpoint.tensors import DTYPES, bytes_of
from fireflyer.native import crc32c
from fireflyer.runtime.disk import RealDisk
from fireflyer.sim import SimDisk

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: not name.startswith("own/") and name != "__metadata__"
)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
specs = st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), shapes), max_size=8).map(
    lambda chosen: [TensorSpec(name, dtype, shape) for name, (dtype, shape) in chosen.items()]
)
relaxed = settings(max_examples=60)


def tensor_of(spec: TensorSpec, seed: int) -> torch.Tensor:
    raw = random.Random(f"{seed}/{spec.name}").randbytes(spec.size_bytes)
    if spec.dtype == "BOOL":
        raw = bytes(byte & 1 for byte in raw)
    if not raw:
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(DTYPES[spec.dtype]).reshape(spec.shape)


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bytes_of(left) == bytes_of(right)


@relaxed
@given(specs, st.integers(0, 1 << 16))
def test_any_tensors_come_back_bit_for_bit(shared: list[TensorSpec], seed: int) -> None:
    disk = SimDisk().mount()
    tensors = {spec.name: tensor_of(spec, seed) for spec in shared}
    own = {f"mine {spec.name}": tensor_of(spec, seed + 1) for spec in shared}
    with CheckpointManager("/c", rank=0, world_size=1, store=None, disk=disk) as manager:
        manager.save(seed, State(tensors, own, {"seed": seed}), blocking=True).result()
        restored = manager.restore()
    assert restored is not None
    assert restored.values == {"seed": seed}
    assert restored.own is not None
    assert {*restored.shared} == {*tensors}
    assert all(equal_bits(restored.shared[name], tensor) for name, tensor in tensors.items())
    assert all(equal_bits(restored.own[name], tensor) for name, tensor in own.items())


@relaxed
@given(specs, st.integers(1, 100))
def test_the_reference_library_loads_any_shard(
    tmp_path_factory: pytest.TempPathFactory, shared: list[TensorSpec], piece_bytes: int
) -> None:
    directory = tmp_path_factory.mktemp("shard")
    tensors = {spec.name: tensor_of(spec, 1) for spec in shared}
    share = SnapshotBuffer().take(3, snapshot_of(State(tensors)))
    path = f"{directory}/{shard_name(0, 1)}"
    record = run_steps(write_shard(RealDisk(), path, share, piece_bytes=piece_bytes))
    loaded = safetensors.torch.load_file(path)
    assert {*loaded} == {*tensors}
    assert all(equal_bits(loaded[name], tensor) for name, tensor in tensors.items())
    data = Path(path).read_bytes()
    assert record.file_bytes == len(data)
    for tensor in record.tensors:
        assert crc32c(data[tensor.offset : tensor.offset + tensor.size_bytes]) == tensor.crc32c
        assert tensor.offset % DTYPE_BYTES[tensor.dtype] == 0, "aligned to its element"


def test_views_and_transposed_tensors_are_stored_as_they_look() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {"t": base.t(), "part": base[1:3, ::2], "wide": base[:1].expand(3, 6), "scalar": base[2, 3]}
    disk = SimDisk().mount()
    with CheckpointManager("/c", rank=0, world_size=1, store=None, disk=disk) as manager:
        manager.save(1, State(tensors), blocking=True).result()
        restored = manager.restore()
    assert restored is not None
    assert all(torch.equal(restored.shared[name], tensor) for name, tensor in tensors.items())


@relaxed
@given(specs, st.integers(1, 6), st.randoms())
def test_every_shared_tensor_has_one_writer_and_the_loads_are_even(
    shared: list[TensorSpec], world_size: int, rng: random.Random
) -> None:
    owners = assign(shared, world_size)
    mixed = list(shared)
    rng.shuffle(mixed)
    assert assign(mixed, world_size) == owners, "the same on every rank, whatever the order"
    stored = [spec for rank in range(world_size) for spec in share_of(rank, shared, [], world_size)]
    assert sorted(stored, key=lambda spec: spec.name) == sorted(shared, key=lambda spec: spec.name)
    loads = [sum(spec.size_bytes for spec in shared if owners[spec.name] == rank) for rank in range(world_size)]
    sizes = [spec.size_bytes for spec in shared]
    assert max(loads) <= sum(sizes) / world_size + max(sizes, default=0)


@given(st.integers(0, 10**6), names)
def test_own_names_can_be_told_apart(rank: int, name: str) -> None:
    assert split_own(own_name(rank, name)) == (rank, name)
    assert split_own(name) is None
    assert split_own("own/x/y") is None
    assert split_own("own/5") is None
    for text in (f"0{rank}", f"+{rank}", f"{rank} ", "٣", f"1{rank:07}"):
        assert split_own(f"own/{text}/{name}") is None, "nobody of us writes it so"


@given(st.lists(st.binary(max_size=9), max_size=8), st.integers(1, 7))
def test_running_sums_do_not_depend_on_how_the_data_is_cut(parts: list[bytes], piece_bytes: int) -> None:
    data = memoryview(b"".join(parts))
    sums = RunningSums([len(part) for part in parts])
    for start in range(0, len(data), piece_bytes):
        sums.update(data[start : start + piece_bytes])
    assert sums.sums == [crc32c(part) for part in parts]


def test_names_that_come_twice_and_unknown_types_are_refused() -> None:
    twice = [TensorSpec("a", "F32", (1,)), TensorSpec("a", "F64", (1,))]
    with pytest.raises(UsageError, match="twice"):
        place(twice)
    with pytest.raises(UsageError, match="dtype 'F128'"):
        place([TensorSpec("a", "F128", (1,))])


@pytest.mark.parametrize("name", ["", "__metadata__", "x" * 2000, "\ud800"])
def test_names_that_the_format_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not allowed"):
        place([TensorSpec(name, "F32", (1,))])


# Manifests.


def manifest_of(shared: list[TensorSpec], world_size: int, disk: Disk | None = None) -> Manifest:
    disk = disk or SimDisk().mount()
    disk.mkdir("/c")
    records = []
    for rank in range(world_size):
        tensors = {spec.name: tensor_of(spec, 1) for spec in shared}
        share = SnapshotBuffer().take(3, snapshot_of(State(tensors), rank=rank, world_size=world_size))
        records.append(run_steps(write_shard(disk, f"/c/{shard_name(rank, world_size)}", share)))
    return Manifest(1, 3, 0, world_size, tuple(records), {"lr": 0.1, "betas": [0.9, 1e-300]}, {"plan": None})


SAMPLE_DISK = SimDisk().mount()
SAMPLE = manifest_of(
    [TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "BF16", ()), TensorSpec("c", "I8", (0,))], 2, SAMPLE_DISK
)


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where numbers are in what JSON holds."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in numbers_in(inner, (*path, key))]
    if isinstance(value, list):
        return [found for index, inner in enumerate(value) for found in numbers_in(inner, (*path, index))]
    return [path] if isinstance(value, int) else []


@relaxed
@given(specs, st.integers(1, 4))
def test_a_manifest_comes_back_as_it_was(shared: list[TensorSpec], world_size: int) -> None:
    manifest = manifest_of(shared, world_size)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    for shard in manifest.shards:
        assert decode_record(encode_record(shard), shard.rank, world_size) == shard


@given(st.data())
def test_a_manifest_with_any_byte_changed_is_refused(data: st.DataObject) -> None:
    encoded = bytearray(encode_manifest(SAMPLE))
    position = data.draw(st.integers(0, len(encoded) - 2))
    encoded[position] ^= data.draw(st.integers(1, 255))
    changed: Manifest | None = None
    with contextlib.suppress(DataCorruption):
        changed = decode_manifest(bytes(encoded))
    assert changed in (None, SAMPLE), "white space may change, nothing else"


@given(st.integers(0, len(encode_manifest(SAMPLE)) - 2))
def test_a_manifest_cut_anywhere_is_refused(length: int) -> None:
    with pytest.raises(DataCorruption):
        decode_manifest(encode_manifest(SAMPLE)[:length])


@given(st.sampled_from(numbers_in(msgspec.json.decode(msgspec.json.encode(SAMPLE)))), st.integers(-(2**63), 2**64 - 1))
def test_a_manifest_with_any_number_is_refused_or_read(path: tuple[Any, ...], number: int) -> None:
    """A number out of range must not raise what nobody expects: the checkpoint before would not be used."""
    body = inner = msgspec.json.decode(msgspec.json.encode(SAMPLE))
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = number
    data = msgspec.json.encode(body)
    with contextlib.suppress(DataCorruption):
        found = decode_manifest(b'{"crc32c":"%08x","body":%b}' % (crc32c(data), data))
        load(SAMPLE_DISK, "", "c", found, sink_of(lambda _rank, _tensor: None))


@given(st.binary(max_size=200))
@example(b'{"crc32c":"00000000","body":{}}')
@example(b'{"crc32c":"00000000","body":' + b"[" * 100_000)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(DataCorruption):
        decode_manifest(data)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"file": "../../etc/passwd"}, "names file"),
        ({"file": "shard-00001-of-00002.safetensors"}, "names file"),
        ({"header_bytes": 4}, "out of range"),
        ({"header_bytes": 10**9}, "out of range"),
        ({"file_bytes": -1}, "out of range"),
        ({"file_bytes": 1 << 60}, "out of range"),
        ({"file_bytes": 10_000}, "its tensors need"),
        ({"rank": 1}, "one shard for each"),
        ({"rank": -1}, "one shard for each"),
        ({"header_crc32c": -1}, "checksum that is out of range"),
        ({"header_crc32c": 1 << 32}, "checksum that is out of range"),
    ],
)
def test_a_manifest_that_proves_itself_but_lies_is_refused(changes: dict[str, object], reason: str) -> None:
    first = msgspec.structs.replace(SAMPLE.shards[0], **changes)
    with pytest.raises(DataCorruption, match=reason):
        decode_manifest(encode_manifest(msgspec.structs.replace(SAMPLE, shards=(first, *SAMPLE.shards[1:]))))


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 0},
        {"offset": -8},
        {"size_bytes": 1 << 40},
        {"size_bytes": -4},
        {"shape": (-1, -24)},
        {"shape": (1 << 62, 1 << 62)},
        {"shape": (1,) * 1000},
        {"dtype": "F32; rm"},
        {"name": "b"},
        {"crc32c": -1},
        {"crc32c": 1 << 32},
        {"blocks": (1, 2)},
    ],
)
def test_tensors_that_overlap_or_leave_their_file_are_refused(changes: dict[str, object]) -> None:
    (position, shard) = next((index, it) for index, it in enumerate(SAMPLE.shards) if it.tensors[0].name == "a")
    tensor = msgspec.structs.replace(shard.tensors[0], **changes)
    shards = list(SAMPLE.shards)
    shards[position] = msgspec.structs.replace(shard, tensors=(tensor, *shard.tensors[1:]))
    with pytest.raises(DataCorruption):
        decode_manifest(encode_manifest(msgspec.structs.replace(SAMPLE, shards=tuple(shards))))


@pytest.mark.parametrize(
    "changes", [{"version": 2}, {"step": -1}, {"step": 10**15}, {"world_size": 0}, {"world_size": 3}]
)
def test_versions_and_numbers_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DataCorruption):
        decode_manifest(encode_manifest(msgspec.structs.replace(SAMPLE, **changes)))


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=10,
)


@given(plain)
def test_plain_values_survive_exactly(value: object) -> None:
    checked = check_plain({"value": value}, "values")
    manifest = msgspec.structs.replace(SAMPLE, values=checked)
    back = decode_manifest(encode_manifest(manifest)).values["value"]
    assert back == value
    assert repr(back) == repr(value), "also the sign of zero, and 1.0 is not 1"


@pytest.mark.parametrize("value", [math.inf, math.nan, b"x", {1: 2}, 2**64, {1, 2}, object(), "\ud800", {"a\udfff": 1}])
def test_values_that_json_would_change_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="values"):
        check_plain({"value": [value]}, "values")


def test_values_that_contain_themselves_are_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="levels deep"):
        check_plain(endless, "values")


FORMS = ("float", "mapping", "counter")
states = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | text,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(text | st.integers(-9, 9) | st.floats(allow_nan=False) | st.none(), inner, max_size=3)
        | st.dictionaries(text | st.integers(-9, 9), st.integers(-9, 9)).map(Counter)
        | st.builds(lambda key, value: {key: value}, st.sampled_from([f"fireflyer.{it}" for it in FORMS]), inner)
    ),
    max_leaves=10,
)


@given(states)
def test_states_of_schedulers_survive_exactly(value: object) -> None:
    encoded = encode_state(value, "state")
    assert check_plain(encoded, "state") == encoded
    manifest = msgspec.structs.replace(SAMPLE, values={"state": encoded})
    back = decode_state(decode_manifest(encode_manifest(manifest)).values["state"])
    assert repr(back) == repr(value), "also types, the sign of zero, and numbers that are none"


@given(plain)
def test_a_state_of_plain_values_is_stored_as_it_is(value: object) -> None:
    assert encode_state(value, "state") == check_plain(value, "state")


@pytest.mark.parametrize(
    "value", [b"x", {1, 2}, object(), "\ud800", {(1, 2): 3}, {b"x": 1}, [math.inf, {"a": {2**64}}]]
)
def test_states_that_cannot_be_stored_are_refused_by_name(value: object) -> None:
    with pytest.raises(UsageError, match=r"stateful\['loader'\]"):
        encode_state({"loader": value}, "stateful")


@pytest.mark.parametrize(
    "value", [{"float": "1.5"}, {"float": [1]}, {"mapping": 3}, {"mapping": [[1]]}, {"counter": [[[1], 2]]}]
)
def test_states_that_no_release_writes_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(DataCorruption, match="which no release writes"):
        decode_state({f"fireflyer.{form}": inner for form, inner in value.items()})


def test_a_state_that_is_nested_without_end_is_refused() -> None:
    deep: list[object] = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(DataCorruption, match="levels deep"):
        decode_state(deep)


# Names and retention.

steps = st.integers(0, 10**11)


@given(steps, st.integers(0, 99999), st.integers(1, 999999), st.integers(1, 4))
def test_only_committed_names_are_candidates(step: int, attempt: int, sequence: int, copies: int) -> None:
    temporary = temporary_name(step, attempt, sequence)
    listing = [temporary, trash_name(temporary, []), "job.json", "step-12", "step-00000012.1", "step-٠٠٠٠٠٠٠١", "notes"]
    for _ in range(copies):
        listing.append(final_name(step, listing))
    found = candidates(listing)
    assert [(item.step, item.revision) for item in found] == [(step, revision) for revision in range(copies, 0, -1)]
    assert len({*listing}) == len(listing)
    assert is_leftover(temporary)
    assert trash_name("step-1", [trash_name("step-1", [])]) != trash_name("step-1", [])


@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=12, unique_by=lambda item: item[0]),
    st.integers(1, 4),
    st.data(),
)
def test_the_committed_one_and_the_newest_good_ones_stay(
    saved: list[tuple[int, bool]], keep: int, data: st.DataObject
) -> None:
    listing = [final_name(step, []) for step, _ in saved]
    committed = data.draw(st.sampled_from(listing))
    refused = [final_name(step, []) for step, damaged in saved if damaged and final_name(step, []) != committed]
    removed = to_remove(listing, committed=committed, keep=keep, refused=refused)
    stay = [name for name in sorted(listing, reverse=True) if name not in removed]
    good = [name for name in sorted(listing, reverse=True) if name not in refused]
    assert committed in stay
    good_that_stay = [name for name in stay if name not in refused]
    assert len(good_that_stay) == min(keep, len(good))
    others = [name for name in good if name != committed]
    assert {*good_that_stay} == {committed, *others[: keep - 1]}
    assert all(name > committed for name in stay if name in refused)


def test_nothing_is_removed_when_the_committed_one_is_not_in_sight() -> None:
    assert to_remove(["step-00000001", "step-00000002"], committed="step-00000003", keep=1, refused=()) == []


def test_a_header_is_aligned_and_says_what_the_format_wants() -> None:
    placed = place([TensorSpec("b", "F32", (2,)), TensorSpec("a", "F64", (1,))])
    header = build_header(encode_entries(placed), {"step": "7"})
    assert len(header) % 64 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert msgspec.json.decode(header[8:]) == {
        "__metadata__": {"step": "7"},
        "a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    }
