"""Our format through `torch.distributed.checkpoint`, in one process."""

from __future__ import annotations

import importlib
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any, Final

import pytest
import torch
from tests.support.checkpoints.states import SHARD, flip
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlanner

from fireflyer.base.errors import DataCorruption, FireflyerError, NotFound, UsageError
from fireflyer.checkpoint import verify
from fireflyer.checkpoint.core.manifest import decode_manifest
from fireflyer.checkpoint.dcp import FireFlyerReader, FireFlyerWriter, async_save, load, metadata_pickle, save


@pytest.fixture(autouse=True)
def without_a_process_group() -> Iterator[None]:
    """DCP warns that it saves in a single process, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class Counter:
    """`Stateful`, with a plain value and a tensor."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, torch.full((3,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.seen = state["count"], state["seen"]


def state_of(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "model": {"w": torch.rand(4, 3, generator=generator), "h": torch.rand(5, generator=generator).bfloat16()},
        "transposed": torch.rand(3, 2, generator=generator).t(),
        "scalar": torch.tensor(float(number)),
        "empty": torch.empty(0, 3),
        "counter": Counter(number),
        "lr": 0.1 * number,
        "groups": [{"betas": [0.9, 0.99], "name": None}],
        "tuple": (number, 2),
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Counter):
        return equal(one.state_dict(), other.state_dict())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(type(one) is type(other) and one == other)


def test_dcp_saves_and_loads_in_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "step-00000007"
    state_dict_saver.save(state_of(7), storage_writer=FireFlyerWriter(path))
    found = state_of(1)
    state_dict_loader.load(found, storage_reader=FireFlyerReader(path))
    assert equal(found, state_of(7))

    (info,) = verify(str(tmp_path))
    assert (info.name, info.step, info.problem) == ("step-00000007", 7, None)
    values = decode_manifest((path / "manifest.json").read_bytes()).values["dcp"]["values"]
    assert values["lr"] == 0.1 * 7
    assert values["counter.count"] == 7, "plain values are readable without pickle"
    assert "tuple" not in values, "what JSON would change is not stored as JSON"


def test_what_is_written_is_read_by_any_safetensors_reader(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save(state_of(7), tmp_path, step=7)
    found = load_file(tmp_path / "step-00000007" / SHARD)
    assert torch.equal(found["model.w"], state_of(7)["model"]["w"])


def test_a_part_of_a_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    save(state_of(7), tmp_path / "a")
    part = {"model": {"w": torch.zeros(4, 3)}}
    load(part, tmp_path / "a")
    assert torch.equal(part["model"]["w"], state_of(7)["model"]["w"])
    more = {"model": {"w": torch.zeros(4, 3), "new": torch.zeros(2)}}
    load(more, tmp_path / "a", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(more["model"]["w"], state_of(7)["model"]["w"])
    with pytest.raises(FireflyerError, match=r"Missing key in checkpoint state_dict: model\.new"):
        load(more, tmp_path / "a")


def test_a_load_converts_what_has_another_dtype_and_fills_what_is_not_contiguous(tmp_path: Path) -> None:
    save({"w": torch.arange(6.0).view(2, 3)}, tmp_path / "a")
    target = torch.zeros(3, 2, dtype=torch.float64).t()
    load({"w": target}, tmp_path / "a")
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_plan_that_dcp_has_kept_is_used_again(tmp_path: Path) -> None:
    for kept in ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan"):
        getattr(SavePlanner, kept).clear()
    for number in (1, 2, 3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state_dict_saver.save(state_of(number), storage_writer=FireFlyerWriter(tmp_path, step=number), planner=planner)
    for number in (1, 2, 3):
        found = state_of(9)
        load(found, tmp_path / f"step-0000000{number}")
        assert equal(found, state_of(number))


def test_a_save_in_the_background_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        state = {"w": torch.arange(5.0)}
        ours = async_save(state, tmp_path / "ours")
        theirs = state_dict_saver.async_save(state, storage_writer=FireFlyerWriter(tmp_path / "theirs"))
        state["w"].zero_()
        ours.result(60)
        assert isinstance(theirs, Future)
        theirs.result(60)
        with pytest.raises(UsageError, match="exists already"):
            async_save(state, tmp_path / "ours").result(60)
    finally:
        dist.destroy_process_group()
    for name in ("ours", "theirs"):
        found = {"w": torch.zeros(5)}
        load(found, tmp_path / name)
        assert found["w"].tolist() == [0, 1, 2, 3, 4]


def test_nothing_is_overwritten_and_a_save_that_failed_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "a")
    with pytest.raises(UsageError, match="exists already; give another path"):
        save({"w": torch.zeros(3)}, tmp_path / "a")

    class Fails(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "w":
                raise OSError("lost")
            return super().resolve_data(write_item)

    with pytest.raises(FireflyerError, match="save failed on rank 0: OSError: lost"):
        save({"a": torch.zeros(3), "w": torch.zeros(3)}, tmp_path / "b", planner=Fails())
    assert sorted(path.name[:6] for path in tmp_path.iterdir()) == [".tmp-b", "a"]
    with pytest.raises(NotFound, match="is no checkpoint and holds none"):
        load({"w": torch.zeros(3)}, tmp_path / "b")
    save({"w": torch.zeros(3)}, tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"], "the next save removes what was left"


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("ckpt-1767225600000", 0),
        ("ckpt-1767225600000000", 0),
        ("step-1767225600000", 0),
        ("ckpt-1000000000000", 10**12),
    ],
)
def test_a_name_that_ends_in_a_time_is_a_name_without_a_step(tmp_path: Path, name: str, step: int) -> None:
    save({"w": torch.ones(2)}, tmp_path / name)
    assert decode_manifest((tmp_path / name / "manifest.json").read_bytes()).step == step
    found = {"w": torch.zeros(2)}
    load(found, tmp_path / name)
    assert found["w"].tolist() == [1, 1]


def test_text_that_json_cannot_hold_comes_back_and_a_name_of_it_is_refused(tmp_path: Path) -> None:
    save({"file": "model\udcff", "w": torch.ones(2)}, tmp_path / "a")
    found: dict[str, Any] = {"file": "", "w": torch.zeros(2)}
    load(found, tmp_path / "a")
    assert found["file"] == "model\udcff"
    with pytest.raises(UsageError, match=r"the name of a value is the text .* no valid Unicode"):
        save({"model\udcff": 5}, tmp_path / "b")


def test_errors_of_the_one_line_are_dcps_and_those_of_our_calls_are_exceptions(tmp_path: Path) -> None:
    assert not issubclass(CheckpointException, Exception)
    with pytest.raises(CheckpointException):
        state_dict_saver.save(
            {"w": torch.zeros(3, dtype=torch.complex128)}, storage_writer=FireFlyerWriter(tmp_path / "a")
        )
    with pytest.raises(UsageError, match=r"dtype torch\.complex128"):
        save({"w": torch.zeros(3, dtype=torch.complex128)}, tmp_path / "a")
    with pytest.raises(UsageError, match="begins with 'own/'"):
        save({"own/w": torch.zeros(3)}, tmp_path / "a")


def test_one_wrong_bit_is_refused(tmp_path: Path) -> None:
    save({"w": torch.arange(50.0), "v": torch.ones(3)}, tmp_path / "a")
    shard = tmp_path / "a" / SHARD
    whole = shard.read_bytes()
    flip(shard, whole.index(torch.arange(50.0).numpy().tobytes()) + 77)
    with pytest.raises(DataCorruption, match=r"tensor 'w' in .*/a/shard-00000-of-00001.safetensors does not match"):
        load({"w": torch.zeros(50)}, tmp_path / "a")
    found = {"v": torch.zeros(3)}
    load(found, tmp_path / "a")
    assert found["v"].tolist() == [1, 1, 1], "what is whole can be had"
    flip(tmp_path / "a" / "manifest.json", 40)
    with pytest.raises(DataCorruption, match=r"manifest.json"):
        load({"v": torch.zeros(3)}, tmp_path / "a")


class Harm:
    """Pickles that run something when they are loaded."""

    def __reduce__(self) -> Any:
        return print, ("harm",)


def test_a_pickle_that_could_run_code_is_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({"it": Harm(), "w": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(DataCorruption, match=r"refuses .* if you trust who wrote it, give trust_pickles=True"):
        load({"it": None, "w": torch.zeros(2)}, tmp_path / "a")
    assert "harm" not in capsys.readouterr().out
    load({"it": None, "w": torch.zeros(2)}, tmp_path / "a", trust_pickles=True)
    assert "harm" in capsys.readouterr().out

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(DataCorruption, match=r"names builtins.print, which is nothing that DCP writes"):
        load({"w": torch.zeros(2)}, theirs)
    assert "harm" not in capsys.readouterr().out


class Reach:
    def __init__(self, *whose: object) -> None:
        self.whose = whose

    def __reduce__(self) -> Any:
        return getattr, self.whose


@pytest.mark.parametrize("whose", [(TensorProperties, "__init__"), ("text", "join"), (_MEM_FORMAT_ENCODING, "mro")])
def test_a_pickle_takes_members_of_enumerations_and_no_other_attributes(tmp_path: Path, whose: tuple[Any, str]) -> None:
    """Some releases of Python 3.11 pickle a member of an enumeration as an attribute."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Reach(*whose)))
    with pytest.raises(DataCorruption, match="an attribute of something that is no enumeration"):
        load({"w": torch.zeros(2)}, tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Reach(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")))
    with pytest.raises(DataCorruption, match="is no metadata of a DCP checkpoint"):  # so the member was taken
        load({"w": torch.zeros(2)}, tmp_path)


def building(whose: bytes, state: object) -> bytes:
    """A pickle that sets `state` on what the opcodes `whose` push."""
    return b"\x80\x02" + whose + pickle.dumps(state, protocol=2)[2:-1] + b"b."


@pytest.mark.parametrize(
    "whose",
    [
        f"c{each.__module__}\n{each.__qualname__}\n".encode()
        for each in (
            Metadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata,
            TensorProperties, StorageMeta, _StorageInfo, _MEM_FORMAT_ENCODING, OrderedDict, PosixPath, torch.Size,
        )
    ]
    + [b"cbuiltins\ngetattr\n", b"ctorch.serialization\n_get_layout\n", b"ctorch\nfloat32\n"],
)  # fmt: skip
@pytest.mark.parametrize("state", [{"planted": 1}, (None, {"planted": 1})])
def test_a_pickle_sets_nothing_on_what_it_names(tmp_path: Path, whose: bytes, state: object) -> None:
    (tmp_path / ".metadata").write_bytes(building(whose, state))
    with pytest.raises(DataCorruption, match=r"metadata"):
        load({"w": torch.zeros(2)}, tmp_path)
    assert not any(hasattr(one, "planted") for one in metadata_pickle._ALLOWED.values())
    module, name = whose[1:].decode().split()
    if module != "builtins":
        assert not hasattr(getattr(importlib.import_module(module), name), "planted")


def of_w(metadata: Any) -> Any:
    return metadata.state_dict_metadata["w"]


@pytest.mark.parametrize(
    ("whose", "fields", "said"),
    [
        (lambda one: one, {"state_dict_metadata": []}, "a list where a mapping is due"),
        (lambda one: one, {"storage_data": {"w": 1}}, "something else where a MetadataIndex is due"),
        (lambda one: one, {"storage_meta": {}}, "something else where a StorageMeta is due"),
        (lambda one: one, {"version": 7}, "a int where a name is due"),
        (lambda one: one, {"planner_data": {"w": 5}}, "a int where a path in the nested state is due"),
        (of_w, {"size": (2,)}, "a tuple where the size of a tensor is due"),
        (lambda one: of_w(one).chunks[0], {"sizes": torch.Size([1 << 60])}, "negative or too large"),
        (of_w, {"chunks": None}, "the chunks of a tensor are no list"),
        (lambda one: of_w(one).chunks[0], {"sizes": "x"}, "where the size of a tensor is due"),
        (lambda one: of_w(one).properties, {"dtype": 3}, "where the properties of a tensor"),
    ],
)
def test_fields_that_are_not_of_the_class_or_its_types_are_refused(
    tmp_path: Path, whose: Callable[[Any], Any], fields: dict[str, object], said: str
) -> None:
    state_dict_saver.save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path))
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    vars(whose(metadata)).update(fields)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataCorruption, match=said):
        load({"w": torch.zeros(2)}, tmp_path)


def test_fields_that_other_programs_add_are_left_out(tmp_path: Path) -> None:
    """As Megatron's planner adds `mcore_data` to `Metadata`."""
    state_dict_saver.save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path))
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.mcore_data = {"w": {"shape": (2,)}}
    of_w(metadata).items = 1
    path.write_bytes(pickle.dumps(metadata))
    found = {"w": torch.zeros(2)}
    load(found, tmp_path)
    assert found["w"].tolist() == [1.0, 1.0]
    made: Any = metadata_pickle.load_metadata(path.read_bytes())
    assert not hasattr(made, "mcore_data")
    assert callable(of_w(made).__class__.__init__)
    assert "items" not in vars(of_w(made))


PATH: Final = b"\x80\x02cpathlib\nPosixPath\nq\x00X\x01\x00\x00\x00aq\x01"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            PATH + b"".join(b"h\x00h%ch%c\x86Rq%c" % (at, at, at + 1) for at in range(1, 20)) + b".",
            "_Parts where a name",
        ),
        (b"\x80\x02}" + b")" + b"\x85" * 3_000_000 + b"Ns.", "33 tuples in each other"),
        (b"\x80\x02}" + b")" + b"\x85Nb" * 40 + b"Ns.", "33 tuples in each other"),
        (b"\x80\x02)q\x00" + b"".join(b"0h%c\x85q%c" % (at, at + 1) for at in range(40)) + b".", "33 tuples"),
        (b"\x80\x02)p0\ng 0\n.", "a place that is no number"),
        (b"\x80\x02(q\x00.", "far behind the last"),
        (b"\x80\x02N(b.", "takes more than there is"),
        (b"\x80\x02h\x05.", "takes what it has not kept"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "a place that is far behind the last"),
        (b"\x80\x04\x8f.", "the operation EMPTY_SET"),
        (b"\x80\x02N2.", "the operation DUP"),
        (b"\x80\x02\x86.", "takes more than there is"),
        (b"\x80\x02t.", "takes more than there is"),
        (building(b"ctorch\nSize\n", ())[:-1] + b".", "metadata"),
        (b"\x80\x02ctorch\nSize\nX\x02\x00\x00\x00ab\x85R.", "a str where the size of a tensor"),
        (b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 65 + b"t\x85R.", "a tuple where the size of a tensor"),
        (b"\x80\x02ccollections\nOrderedDict\n]\x85R.", "metadata"),
    ],
)
def test_a_pickle_takes_no_more_memory_and_time_than_its_size(content: bytes, said: str) -> None:
    """Each of these took gigabytes, or ended the process."""
    with pytest.raises((pickle.UnpicklingError, TypeError, AttributeError)) as refused:
        metadata_pickle.load_metadata(content)
    if said != "metadata":
        assert said in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("length", 1 << 50, "ends within"),
        ("length", 1 << 64, "ends within"),
        ("length", -1, "without a file, an offset and a length"),
        ("offset", 1 << 64, "ends within"),
        ("offset", "0", "without a file, an offset and a length"),
        ("relative_path", 7, "without a file, an offset and a length"),
    ],
)
def test_what_metadata_claim_takes_no_memory_and_is_told(tmp_path: Path, field: str, value: object, said: str) -> None:
    state_dict_saver.save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path))
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data = {key: replace(info, **{field: value}) for key, info in metadata.storage_data.items()}
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataCorruption, match=said):
        load({"w": torch.zeros(2)}, tmp_path)


def test_what_dcp_has_written_is_loaded_where_it_is(tmp_path: Path) -> None:
    state_dict_saver.save(state_of(7), storage_writer=FileSystemWriter(tmp_path / "theirs"))
    found = state_of(1)
    state_dict_loader.load(found, storage_reader=FireFlyerReader(tmp_path / "theirs"))
    assert equal(found, state_of(7))
    data = next((tmp_path / "theirs").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(FireflyerError):
        load(state_of(1), tmp_path / "theirs")


def test_the_newest_of_a_directory_is_loaded_and_models_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    save({"model": model.state_dict()}, tmp_path, step=10)
    first = model.state_dict()["0.weight"].clone()
    with torch.no_grad():
        model[0].weight.add_(1)  # type: ignore[operator]
    save({"model": model}, tmp_path, step=20)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    load({"model": other}, tmp_path)
    assert equal(dict(other.state_dict()), dict(model.state_dict()))
    load({"model": other}, tmp_path / "step-00000010")
    assert torch.equal(other.state_dict()["0.weight"], first)


def test_a_newest_checkpoint_that_is_damaged_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        save({"a": torch.tensor([float(step)])}, tmp_path, step=step)
    flip(tmp_path / "step-00000020" / "manifest.json", 40)
    loaded = {"a": torch.zeros(1)}
    load(loaded, tmp_path)
    assert loaded["a"].item() == 10
    assert "checkpoint skipped name=step-00000020 reason=" in caplog.text
