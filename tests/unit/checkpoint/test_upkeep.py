"""`ff ckpt`: what it shows, keeps, removes, exports and imports."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.checkpoints.counting import Counting
from tests.support.checkpoints.states import SHARD, flip, listed, manager, newest, save_all, state_of
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fireflyer.base.errors import NoSpace, PermissionDenied, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.ports import Transfer
from fireflyer.checkpoint import State, capture, exporting, importing, load_into
from fireflyer.checkpoint.core.blocks import BLOCK_BYTES
from fireflyer.checkpoint.core.exporting import plan_export
from fireflyer.checkpoint.core.manifest import decode_manifest
from fireflyer.checkpoint.core.retention import to_remove
from fireflyer.checkpoint.core.safetensors import TensorSpec
from fireflyer.checkpoint.dcp import load
from fireflyer.checkpoint.importing import import_checkpoint
from fireflyer.checkpoint.upkeep import damages, pin, remove, unpin
from fireflyer.cli.main import main
from fireflyer.runtime.disk import RealDisk, RealFile

Capture = pytest.CaptureFixture[str]


def ff(capsys: Capture, *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["ckpt", *map(str, arguments)])
    found = capsys.readouterr()
    return code, found.out, found.err


def names(directory: Path) -> list[str]:
    return [name for name in listed(path.name for path in directory.iterdir()) if name != "job.json"]


def save_model(directory: Path, step: int = 7) -> nn.Module:
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 300_000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with manager(directory) as ours:
        ours.save(step, capture(model, optimizer), blocking=True).result()
    return model


# Looking.


def test_ls_shows_steps_sizes_when_and_by_whom(tmp_path: Path, capsys: Capture) -> None:
    save_all(tmp_path, [10, 20])
    code, out, _ = ff(capsys, "ls", tmp_path)
    assert code == 0
    header, second, first = out.splitlines()
    assert header.split() == ["NAME", "STEP", "SIZE", "RANKS", "SAVED", "BY", "STATE"]
    assert re.fullmatch(r"step-00000020 +20 +\S+ \S+ +1 +\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ +\S+@\S+ +-", second)
    assert first.startswith("step-00000010")
    flip(tmp_path / "step-00000010" / "manifest.json", 30)
    _, out, _ = ff(capsys, "ls", "--json", tmp_path)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["step"], row["problem"] is None, row["pinned"]) for row in rows] == [
        (20, True, False),
        (10, False, False),
    ]
    assert ff(capsys, "ls", tmp_path / "none")[0] == 1
    (tmp_path / "empty").mkdir()
    assert ff(capsys, "ls", tmp_path / "empty") == (0, f"no checkpoint in {tmp_path / 'empty'}\n", "")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("ls missing", 1, "missing is no directory; give the one in which a job saves its checkpoints"),
        ("ls file", 1, "file is no directory; give the one in which a job saves its checkpoints"),
        ("ls checkpoints/step-00000010", 2, "step-00000010 is a checkpoint: `ff ckpt show` shows it"),
        ("verify missing", 1, "missing is no directory; give the one in which a job saves its checkpoints"),
        ("export checkpoints out --max-file 5XB", 2, "'--max-file': size '5XB' is not understood"),
        ("export checkpoints out --max-file 0", 2, "'--max-file': 0 is nothing; give 1 byte or more"),
        (
            "ls ff:///run",
            2,
            "name one in the path, as ff://host:7000/path, or in the environment variable FIREFLYER_FS",
        ),
        ("ls ff://127.0.0.1:1/run", 2, "name a file with your token in FIREFLYER_FS_TOKEN_FILE"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, line: str, code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("FIREFLYER_FS", "FIREFLYER_FS_TOKEN_FILE", "FF_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)
    save_all(tmp_path / "checkpoints", [10])
    (tmp_path / "file").write_text("")
    found, out, error = ff(capsys, *line.split())
    assert (found, out) == (code, "")
    assert error.startswith("error: ")
    assert said in error
    assert error.count("\n") == 1


def test_show_lists_tensors_with_types_shapes_and_sizes(tmp_path: Path, capsys: Capture) -> None:
    save_model(tmp_path)
    code, out, _ = ff(capsys, "show", tmp_path)
    assert code == 0
    assert "step       7\n" in out
    assert re.search(r"^model/0.weight +F32 +4x5 +80 B +whole$", out, re.MULTILINE)
    _, out, _ = ff(capsys, "show", "--json", tmp_path / "step-00000007")
    shown = json.loads(out)
    assert shown["values"]["optimizer"]["kind"] == "SGD"
    assert {"name": "model/1.bias", "shape": [300_000]}.items() <= next(
        tensor for tensor in shown["tensors"] if tensor["name"] == "model/1.bias"
    ).items()


def test_verify_names_every_damaged_file_and_tensor(tmp_path: Path, capsys: Capture) -> None:
    save_all(tmp_path, [10, 20])
    code, out, _ = ff(capsys, "verify", tmp_path)
    assert (code, [line.split(" (")[0] for line in out.splitlines()]) == (
        0,
        ["step-00000020: whole", "step-00000010: whole"],
    )
    shard = tmp_path / "step-00000010" / SHARD
    content = shard.read_bytes()
    for name in ("w0", "w3"):
        flip(shard, content.index(state_of(10).shared[name].numpy().tobytes()))
    code, out, _ = ff(capsys, "verify", tmp_path / "step-00000010")
    assert code == 1
    first, *problems = out.splitlines()
    assert first.startswith("step-00000010: damaged")
    assert [re.findall(r"tensor '(\w+)' in .*/step-00000010/shard-00000-of-00001", line) for line in problems] == [
        ["w0"],
        ["w3"],
    ]
    shard.write_bytes(content[:-1])
    code, out, _ = ff(capsys, "verify", "--json", tmp_path)
    whole, damaged = (json.loads(line) for line in out.splitlines())
    assert (code, whole["problems"], len(damaged["problems"])) == (1, [], 1)
    assert f"bytes instead of {len(content)}" in damaged["problems"][0]


def damaged_checkpoint(directory: Path, tensors: int) -> Counting:
    """Reads of `ff ckpt verify` of a checkpoint in which every second tensor is damaged."""
    shared = {f"w{number:04}": torch.full((100,), float(number)) for number in range(tensors)}
    with manager(directory) as ours:
        ours.save(10, State(shared, {}, {}), blocking=True).result()
    shard = directory / "step-00000010" / SHARD
    content = bytearray(shard.read_bytes())
    for record in decode_manifest((directory / "step-00000010" / "manifest.json").read_bytes()).shards[0].tensors[::2]:
        content[record.offset] ^= 1
    shard.write_bytes(content)
    disk = Counting()
    found = list(damages(disk, str(directory), "step-00000010"))
    assert [text.split("'")[1] for text in found] == [f"w{number:04}" for number in range(0, tensors, 2)]
    return disk


def test_a_damaged_shard_of_many_tensors_is_read_once(tmp_path: Path) -> None:
    for tensors in (100, 200):
        disk = damaged_checkpoint(tmp_path / str(tensors), tensors)
        size = (tmp_path / str(tensors) / "step-00000010" / SHARD).stat().st_size
        listed_bytes = (tmp_path / str(tensors) / "step-00000010" / "manifest.json").stat().st_size
        assert disk.opened == 2
        assert disk.read_bytes <= size + 4096, "direct IO ends where a page does"
        assert disk.other_bytes <= size + listed_bytes, "the manifest, and the header once"


def test_where_a_disk_cannot_read_a_place_the_tensors_beside_it_are_told_apart(tmp_path: Path) -> None:
    with manager(tmp_path) as ours:
        shared = {f"w{number}": torch.full((1 << 16,), number, dtype=torch.uint8) for number in range(9)}
        ours.save(10, State(shared, {}, {}), blocking=True).result()
    (shard,) = decode_manifest((tmp_path / "step-00000010" / "manifest.json").read_bytes()).shards
    lost = next(tensor.offset for tensor in shard.tensors if tensor.name == "w5") + (1 << 15)

    class Unreadable(RealDisk):
        def open(self, path: str, *, direct: bool = False) -> RealFile:
            file = super().open(path, direct=direct)
            start = file.start_pread

            def refuse(target: memoryview, offset: int) -> Transfer:
                if offset <= lost < offset + len(target):
                    raise translate_os_error(OSError(errno.EIO, "Input/output error"), f"read {path}")
                return start(target, offset)

            file.start_pread = refuse  # type: ignore[method-assign]
            return file

    (found,) = damages(Unreadable(), str(tmp_path), "step-00000010")
    assert re.fullmatch(r"tensor 'w5' cannot be read: read .*: the device failed \(EIO\).*", found)


# Keeping and removing.


def test_a_job_keeps_the_newest_every_nth_and_the_pinned(tmp_path: Path, capsys: Capture) -> None:
    save_all(tmp_path, [10, 20], keep=2)
    assert ff(capsys, "pin", tmp_path / "step-00000010")[:2] == (0, f"{tmp_path}/step-00000010: pinned\n")
    assert "pinned already" in ff(capsys, "pin", tmp_path / "step-00000010")[1]
    save_all(tmp_path, [30, 40, 50, 60], keep=2, keep_every=20)
    kept = ["step-00000010", "step-00000010.pinned", *(f"step-000000{step}" for step in (20, 40, 50, 60))]
    assert names(tmp_path) == kept
    assert newest(tmp_path).step == 60
    assert "pinned" in next(line for line in ff(capsys, "ls", tmp_path)[1].splitlines() if "step-00000010" in line)
    assert "unpinned" in ff(capsys, "unpin", tmp_path / "step-00000010")[1]
    assert "not pinned" in ff(capsys, "unpin", tmp_path / "step-00000010")[1]
    save_all(tmp_path, [70], keep=1)
    assert names(tmp_path) == ["step-00000070"]


def test_what_a_restore_passed_over_stays_if_it_is_pinned() -> None:
    found = ["step-00000005", "step-00000020", "step-00000020.pinned", "step-00000030"]
    assert to_remove(found, committed="step-00000030", keep=1, refused=["step-00000020"]) == ["step-00000005"]
    found.remove("step-00000020.pinned")
    removed = to_remove(found, committed="step-00000030", keep=1, refused=["step-00000020"])
    assert removed == ["step-00000005", "step-00000020"]


def test_rm_refuses_the_pinned_and_the_last_whole_one(tmp_path: Path, capsys: Capture) -> None:
    save_all(tmp_path, [10, 20, 30], keep=3)
    ff(capsys, "pin", tmp_path / "step-00000010")
    code, _, err = ff(capsys, "rm", tmp_path / "step-00000010", "--force")
    assert (code, "is pinned; run `ff ckpt unpin" in err) == (2, True)
    assert ff(capsys, "rm", tmp_path / "step-00000030")[0] == 0
    assert names(tmp_path) == ["step-00000010", "step-00000010.pinned", "step-00000020"]
    flip(tmp_path / "step-00000010" / SHARD, -1)
    code, _, err = ff(capsys, "rm", tmp_path / "step-00000020")
    assert (code, "is the last whole checkpoint there" in err) == (2, True), "the other is damaged"
    assert ff(capsys, "rm", "--force", tmp_path / "step-00000020")[0] == 0
    assert names(tmp_path) == ["step-00000010", "step-00000010.pinned"]
    ff(capsys, "unpin", tmp_path / "step-00000010")
    assert ff(capsys, "rm", tmp_path / "step-00000010")[0] == 0, "a damaged one is not the last whole one"
    for arguments in (("rm", tmp_path), ("pin", tmp_path), ("rm", tmp_path / "step-00000099")):
        code, _, err = ff(capsys, *arguments)
        assert code in (1, 2)
        assert err.count("\n") == 1


# Other programs.


@pytest.mark.parametrize(("change", "done"), [(pin, "pinned"), (unpin, "unpinned"), (remove, "removed")])
def test_who_may_not_write_is_told_what_was_not_done(tmp_path: Path, change: Callable[..., object], done: str) -> None:
    save_all(tmp_path, [10, 20])

    class ReadOnly(RealDisk):
        def create(self, path: str, *, direct: bool = False) -> RealFile:
            raise PermissionDenied(f"create {path}: permission denied")

        def rename(self, source: str, target: str) -> None:
            raise PermissionDenied(f"rename {source} to {target}: permission denied")

        def remove(self, path: str) -> None:
            raise PermissionDenied(f"remove {path}: permission denied")

    checkpoint = tmp_path / "step-00000010"
    with pytest.raises(PermissionDenied) as refused:
        change(checkpoint, disk=ReadOnly())
    said = f"{checkpoint} is not {done}: permission denied; that needs the right to write in {tmp_path}"
    assert refused.value.message == said
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize(("change", "done"), [(pin, "pinned"), (unpin, "unpinned"), (remove, "removed")])
def test_a_file_system_that_is_read_only_is_said(tmp_path: Path, change: Callable[..., object], done: str) -> None:
    save_all(tmp_path, [10, 20])

    def refuse() -> NoReturn:
        error = OSError(errno.EROFS, "Read-only file system")
        raise translate_os_error(error, "write") from error

    class ReadOnly(RealDisk):
        def create(self, path: str, *, direct: bool = False) -> RealFile:
            refuse()

        def rename(self, source: str, target: str) -> None:
            refuse()

        def remove(self, path: str) -> None:
            refuse()

    checkpoint = tmp_path / "step-00000010"
    with pytest.raises(PermissionDenied, match=f"{checkpoint} is not {done}: the file system is read-only"):
        change(checkpoint, disk=ReadOnly())


def test_an_export_is_the_model_as_hugging_face_names_it(tmp_path: Path, capsys: Capture) -> None:
    model = save_model(tmp_path / "c")
    code, out, _ = ff(capsys, "export", tmp_path / "c", tmp_path / "one")
    assert (code, out) == (0, f"{tmp_path}/one: 4 tensors, 5.7 MiB in 1 file\n")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["model.safetensors"]
    state = model.state_dict()
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())

    assert ff(capsys, "export", tmp_path / "c", tmp_path / "many", "--max-file", "1MiB")[0] == 0
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    assert sorted({*index["weight_map"].values()}) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "many" / file)[name], state[name])

    code, _, err = ff(capsys, "export", tmp_path / "c", tmp_path / "one")
    assert (code, "exists already" in err) == (2, True)
    assert ff(capsys, "export", tmp_path / "c", tmp_path / "two", "--prefix", "none/")[0] == 2


def test_an_export_of_damage_leaves_nothing(tmp_path: Path, capsys: Capture) -> None:
    model = save_model(tmp_path / "c")
    shard = tmp_path / "c" / "step-00000007" / SHARD
    flip(shard, shard.read_bytes().index(model.state_dict()["1.bias"].numpy().tobytes()) + 5)
    code, _, err = ff(capsys, "export", tmp_path / "c", tmp_path / "out")
    assert (code, "'model/1.bias'" in err) == (1, True)
    assert os.listdir(tmp_path) == ["c"], "not under a temporary name either, which takes space of a full disk"


def not_heard(*_: object) -> NoReturn:
    raise AssertionError("the command does not listen")


@pytest.fixture
def without_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, not_heard)
    yield
    assert signal.signal(signal.SIGTERM, before) is not_heard, "a command puts back what it found"


@pytest.mark.usefixtures("without_handler")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_export_or_import_that_a_signal_ends_leaves_nothing(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    save_model(tmp_path / "c")
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    for module, last in ((exporting, "commit"), (importing, "commit_manifest")):
        monkeypatch.setattr(module, last, lambda *_: signal.raise_signal(number))  # all files are written
    for line in (
        ("export", tmp_path / "c", tmp_path / "out"),
        ("import", tmp_path / "a.safetensors", tmp_path / "d", "--step", "1"),
    ):
        code, _, err = ff(capsys, *line)
        assert (code, err) == (130, "\nerror: interrupted\n")
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "c", "d"]
    assert os.listdir(tmp_path / "d") == []


def test_a_damaged_newest_checkpoint_is_named_with_the_one_that_is_used_instead(
    tmp_path: Path, capsys: Capture
) -> None:
    save_all(tmp_path / "c", [10, 20])
    flip(tmp_path / "c" / "step-00000020" / "manifest.json", 30)
    said = re.compile(r"warning: step-00000020 is damaged: .*manifest\.json.*; step-00000010 is used instead\n")
    for line in (("show", tmp_path / "c"), ("show", "--json", tmp_path / "c")):
        code, out, err = ff(capsys, *line)
        assert (code, "step-00000010" in out) == (0, True)
        assert said.fullmatch(err), err
    code, out, err = ff(capsys, "export", tmp_path / "c", tmp_path / "out")
    assert (code, out.startswith(f"{tmp_path}/out: 5 tensors")) == (0, True)
    assert said.fullmatch(err), err
    assert ff(capsys, "show", tmp_path / "c" / "step-00000010")[2] == "", "who names the older one asked for it"
    flip(tmp_path / "c" / "step-00000010" / "manifest.json", 30)
    code, out, err = ff(capsys, "show", tmp_path / "c")
    assert (code, out, err.count("\n"), "none of the 2 checkpoints" in err) == (1, "", 1, True)


def test_files_are_filled_in_order_up_to_their_size() -> None:
    specs = [TensorSpec(name, "U8", (size,)) for name, size in (("a", 4), ("b", 5), ("c", 30), ("d", 1), ("e", 9))]
    assert [[spec.name for spec in file.tensors] for file in plan_export(specs, 10)] == [["a", "b"], ["c"], ["d", "e"]]
    assert [file.name for file in plan_export(specs, 100)] == ["model.safetensors"]


def test_what_another_program_wrote_becomes_a_checkpoint_that_a_loop_restores(tmp_path: Path, capsys: Capture) -> None:
    model = save_model(tmp_path / "c")
    ff(capsys, "export", tmp_path / "c", tmp_path / "hf", "--max-file", "1MiB")
    code, out, _ = ff(capsys, "import", tmp_path / "hf", tmp_path / "new", "--step", "3", "--prefix", "model/")
    assert (code, out) == (0, f"{tmp_path}/new/step-00000003: 4 tensors, 5.7 MiB\n")
    other = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 300_000))
    restored = newest(tmp_path / "new")
    load_into(restored.shared, restored.values, other)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    code, _, err = ff(capsys, "import", tmp_path / "hf", tmp_path / "new", "--step", "3")
    assert (code, "has a checkpoint of step 3 already" in err) == (2, True)
    with pytest.raises(UsageError, match="is no checkpoint of DCP"):
        import_checkpoint(str(tmp_path / "hf"), tmp_path / "new", step=4, model="model")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"short", "is no safetensors file"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "is no safetensors file"),
        ((9).to_bytes(8, "little") + b"{not json", "is not readable"),
        ((63).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(63), "offset"),
    ],
)
def test_files_that_are_no_safetensors_are_refused(
    tmp_path: Path, capsys: Capture, content: bytes, reason: str
) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    code, _, err = ff(capsys, "import", tmp_path / "a.safetensors", tmp_path / "new", "--step", "3")
    assert (code, reason in err, err.count("\n")) == (1, True, 1), err
    assert not (tmp_path / "new").exists()


def test_an_import_that_ends_in_the_middle_leaves_nothing(tmp_path: Path, capsys: Capture) -> None:
    save_model(tmp_path / "c")
    ff(capsys, "export", tmp_path / "c", tmp_path / "hf")

    class Full(RealDisk):
        def create(self, path: str, *, direct: bool = False) -> RealFile:
            if path.endswith("manifest.json"):
                raise NoSpace(f"create {path}: no space left on the device")
            return super().create(path, direct=direct)

    with pytest.raises(NoSpace):
        import_checkpoint(str(tmp_path / "hf"), tmp_path / "new", step=3, disk=Full())
    assert os.listdir(tmp_path / "new") == []


def test_why_a_source_of_an_import_cannot_be_read_is_told(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    for source, said in (
        (tmp_path / "none", "none does not exist; give a checkpoint of DCP, a safetensors file, or"),
        (tmp_path / "file" / "hf", "file/hf does not exist"),
    ):
        _, _, err = ff(capsys, "import", source, tmp_path / "new", "--step", "3")
        assert said in err


def test_a_checkpoint_of_dcp_becomes_one_of_ours(tmp_path: Path, capsys: Capture) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    state: dict[str, Any] = {"model": model.state_dict(), "lr": 0.5, "odd": (1, 2)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_saver.save(state, storage_writer=FileSystemWriter(tmp_path / "theirs"))
        assert ff(capsys, "import", tmp_path / "theirs", tmp_path / "new", "--step", "3")[0] == 0
        found: dict[str, Any] = {"model": nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), "lr": 0, "odd": ()}
        load(found, tmp_path / "new")
    assert (found["lr"], found["odd"]) == (0.5, (1, 2))
    for name, value in found["model"].state_dict().items():
        assert torch.equal(value, model.state_dict()[name])

    assert ff(capsys, "import", tmp_path / "theirs", tmp_path / "new", "--step", "4", "--model", "model")[0] == 0
    other = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    restored = newest(tmp_path / "new")
    assert restored.step == 4
    load_into(
        {name: value for name, value in restored.shared.items() if "/" in name and "bytes" not in name}, {}, other
    )
    assert torch.equal(other.state_dict()["0.weight"], model.state_dict()["0.weight"])
    code, _, err = ff(capsys, "import", tmp_path / "theirs", tmp_path / "new", "--step", "5", "--model", "net")
    assert (code, "has no model below 'net'; its keys are lr, model, odd" in err) == (2, True), err


def test_large_tensors_are_exported_in_bands_and_imported_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fireflyer.checkpoint import exporting

    monkeypatch.setattr(exporting, "_BAND_BYTES", BLOCK_BYTES + 1000)
    tensors = {"w": torch.arange(3 * BLOCK_BYTES // 4 + 77, dtype=torch.int32), "s": torch.tensor(3.0)}
    tensors["m"] = torch.rand(1001, 1500)
    tensors["row"] = torch.rand(1, 3, 1001, 501)
    save_file(tensors, tmp_path / "a.safetensors")
    import_checkpoint(str(tmp_path / "a.safetensors"), tmp_path / "c", step=1)
    exporting.export(tmp_path / "c", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
